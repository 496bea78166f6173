"""Products of bytes by our own kernel, `_c/bytes.c`: rounding of inputs, sums, scales and bias in one operation.

Sums of integers are exact, so its outputs are those of oneDNN's kernel, to the last bit. That needs eight
operations of torch's beside it. Microseconds for so many rows (two cores of an EPYC, Zen 5; 24 layers in turn)::

    rows                               1     4     8    16    32    64    200
    3,072 outputs, oneDNN's           87   101   104   124   166   246    576
    of 576 inputs, ours               40    44    49    65    99   169    458
    4,864 outputs, oneDNN's          156   160   190   225   317   477  1,210
    of 896 inputs, ours              105   107   110   145   219   371  1,018
"""

from functools import cache

import torch
from torch import Tensor

from lookahead import _native
from lookahead.runtime.layer_trials import COLUMNS

_AXES = 3  # of a weight that is packed for it
_SIGNS = -0x7F7F7F80  # the sign bits of four bytes
_MOST_INPUTS = 1 << 16  # whose sums four bytes hold


@cache
def _is_there() -> bool:
    """Whether this processor has the instructions; the kernel answers with no outputs if not."""
    rows, weight = torch.ones(1, 4), torch.zeros(1, 1, COLUMNS, dtype=torch.int32)
    return _native.operations() and product_of_bytes(rows, weight, torch.ones(COLUMNS), torch.ones(0)).numel() > 0


def in_fours(numbers: Tensor) -> Tensor | None:
    """A weight ``[out, in]`` of bytes packed for the kernel; None = it takes no such weight, or is not to be had.

    It lies as ``[out / 32, in / 4, 32]``: four inputs of 32 outputs abreast, and each 128 more than it means, as one
    factor of the kernel's products has no sign.
    """
    outputs, inputs = numbers.shape
    if outputs % COLUMNS or inputs % 4 or inputs > _MOST_INPUTS or not _is_there():
        return None
    fours = numbers.view(torch.int32).bitwise_xor(_SIGNS).view(-1, COLUMNS, inputs // 4)
    return fours.transpose(1, 2).contiguous()


def is_in_fours(packed: Tensor) -> bool:
    return packed.ndim == _AXES


def product_of_bytes(rows: Tensor, packed: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """Outputs ``[row, out]`` of rows ``[row, in]``, each rounded to its own steps; ``bias``: in bfloat16."""
    rows = rows if rows.dtype == torch.bfloat16 else rows.float()
    outputs: Tensor = torch.ops.lookahead.multiplied_bytes(rows, packed, scales, bias)
    return outputs

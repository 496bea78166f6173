"""Linear layers over packed weights: what makes a pass over a few nodes cheap on a CPU.

A weight ``[out, in]`` lies in memory row by row. Kernels for a few rows of input read it badly so, and the time of a
pass rises steeply with its first nodes. oneDNN, which comes with torch, has layouts of its own and kernels that read
them. Milliseconds of a linear layer with 4.4M weights and so many nodes (two cores of a Xeon with AVX-512)::

    nodes                   1      4      8     16     32     64
    bfloat16, as it lies   0.76   0.96   1.21   1.67   2.62   4.53
    bfloat16, packed       0.48   0.53   0.79   1.25   2.12   4.06
    float32, as it lies    0.83   1.66   1.88   1.99   2.46   3.52
    float32, packed        0.91   1.01   1.06   1.32   1.86   3.01

Packed weights are a copy, so they are made where memory is plenty, and of models whose weights fill no cache. They are
made once passes have cost so much that packing would have saved its price (ski rental, as for traces), or where a
call still promises that, and only where a trial on this machine shows a gain. The model itself is left alone: passes
run on a twin of its modules.
"""

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.models.code_safety import is_safe
from lookahead.models.fingerprint import weights_stamp
from lookahead.models.twins import twin_of

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_BYTES = 192 << 20  # of all linear layers; what fits into a cache gains little
_MOST_MEMORY = 0.5  # of the memory that is free
_TRIAL_AFTER_MS = 1000.0  # of passes: a trial takes some 30
_TRIAL_ROWS = (1, 4, 8, 16, 32)
_TRIAL_ROUNDS = 4
_LEAST_GAIN = 0.08  # of the time of linear layers
_TOLERANCE = 0.02  # of the spread of a layer's outputs
_ROWS_HINT = 16  # of the input, for which oneDNN chooses a layout; the others cost hardly more

Packed = dict[int, Tensor]  # by the id of the weight

_SOURCE = """
def packed_linear(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
"""


@cache
def _kernel() -> Any:
    """oneDNN's linear layer; a RuntimeError where torch was built without it. Compiled, because the tracer of
    `runtime.tracing` knows no operation with such a list of options."""
    return torch.jit.CompilationUnit(_SOURCE).packed_linear


def _packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = _kernel()(rows, weight, bias)
    return output


class PackedLinear(nn.Linear):
    """A linear layer beside whose weight lies a packed copy, ``packed``."""

    packed: Tensor
    packs_single: bool

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // max(1, input.shape[-1])
        if rows == 0 or (rows == 1 and not self.packs_single):
            return nn.functional.linear(input, self.weight, self.bias)
        return _packed_linear(input, self.packed, self.bias)


@dataclass
class Packing:
    """What is known of one model's packed weights.

    Attributes:
        spent_ms: of passes without them.
        single_ms: of such passes over one node, the fastest; None = there was none.
        gain: share of a linear layer's time that packing saves; None = not tried, 0 = they are not packed.
        single_gain: the same for one row.
        cost_ms: of packing all layers.
        stamp: of the weights when they were packed.
    """

    spent_ms: float = 0.0
    single_ms: float | None = None
    gain: float | None = None
    single_gain: float = 0.0
    cost_ms: float = 0.0
    stamp: Hashable = None
    weights: Packed = field(default_factory=dict)

    def spend(self, nodes: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes in all, without packed weights."""
        self.spent_ms += ms
        if nodes == 1:
            self.single_ms = ms if self.single_ms is None else min(ms, self.single_ms)


_packings: PerModel[Packing] = PerModel(Packing)
_making = threading.Lock()


def packing_of(model: PreTrainedModel) -> Packing:
    return _packings.of(model)


def packed_weights(model: PreTrainedModel, *, worth_ms: float | None = None) -> Packed | None:
    """A model's packed weights; None = passes run without. Made here when they pay for ``worth_ms`` of passes; None =
    for as much as passes have taken so far, infinite = at once, to be measured.

    Weights that have changed since are packed anew, once that has come to pay again.
    """
    packing = _packings.of(model)
    worth_ms = packing.spent_ms if worth_ms is None else worth_ms
    if packing.gain == 0.0 or (worth_ms < _TRIAL_AFTER_MS and not packing.weights):
        return None
    layers = list(_layers(model))
    if sum(layer.weight.nbytes for layer in layers) < _LEAST_BYTES or not is_safe(model):
        return None
    stamp = weights_stamp(layer.weight for layer in layers)
    if packing.weights and packing.stamp == stamp:
        return packing.weights
    packing.weights = {}
    if not _making.acquire(blocking=False):
        return None
    try:
        with torch.inference_mode():
            return _bought(packing, layers, stamp, worth_ms)
    except (RuntimeError, AttributeError):  # this machine's torch has no such kernel
        packing.gain = 0.0
        return None
    finally:
        _making.release()


def _bought(packing: Packing, layers: list[nn.Linear], stamp: Hashable, worth_ms: float) -> Packed | None:
    if packing.gain is None:
        _try(packing, layers)
    free = _free_bytes()
    fits = free is not None and sum(layer.weight.nbytes for layer in layers) <= _MOST_MEMORY * free
    if not packing.gain or not fits or worth_ms * packing.gain < packing.cost_ms:
        return None
    packed = {id(layer.weight): _pack(layer.weight) for layer in layers}
    packing.weights, packing.stamp, packing.spent_ms = packed, stamp, 0.0
    return packed


def _try(packing: Packing, layers: list[nn.Linear]) -> None:
    """Measure what packing costs and brings, on the largest layer but the output's."""
    total = sum(layer.weight.numel() for layer in layers)
    weight = max((layer.weight for layer in layers[:-1] or layers), key=lambda weight: weight.numel())
    start = perf_counter()
    packed = _pack(weight)
    packing.cost_ms = 1e3 * (perf_counter() - start) * total / weight.numel()
    before, after = [], []
    for rows in _TRIAL_ROWS:
        given = torch.arange(rows * weight.shape[1], dtype=weight.dtype).sin_().view(rows, -1)
        plain, ours = nn.functional.linear(given, weight), _packed_linear(given, packed, None)
        if not bool((plain - ours).abs().max() <= _TOLERANCE * (plain.float().std() + 1e-9)):
            packing.gain = 0.0
            return
        before.append(
            min(_seconds(lambda given=given: nn.functional.linear(given, weight)) for _ in range(_TRIAL_ROUNDS))
        )
        after.append(
            min(_seconds(lambda given=given: _packed_linear(given, packed, None)) for _ in range(_TRIAL_ROUNDS))
        )
    gain = 1.0 - sum(now / then for now, then in zip(after, before, strict=True)) / len(before)
    packing.gain = gain if gain >= _LEAST_GAIN else 0.0
    packing.single_gain = 1.0 - after[0] / before[0]


def _seconds(run: Any) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
    return packed


def _layers(model: PreTrainedModel) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.is_contiguous():
                yield module


def packed_twin(model: PreTrainedModel, packed: Packed) -> Any:
    """The model's modules, its linear layers over their ``packed`` weights."""
    packs_single = _packings.of(model).single_gain > 0.0

    def change(twin: Any) -> None:
        weight = packed.get(id(twin._parameters.get("weight"))) if type(twin) is nn.Linear else None
        if weight is not None:
            twin.__dict__["_buffers"] = {"packed": weight}
            twin.__dict__["packs_single"] = packs_single
            twin.__class__ = PackedLinear

    return twin_of(model, change)


def _free_bytes() -> int | None:
    """Memory that this process may still take; None = nobody says."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, KeyError):  # another system, or a group without a limit
        pass
    return min(found, default=None)

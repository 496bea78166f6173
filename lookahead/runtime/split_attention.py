"""Masked attention on CUDA: of many rows by one kernel, of few rows over a long history with the keys in chunks.

A kernel gives each block of the GPU some 64 rows of one key head, and lets it go through all keys. A tree has few rows,
so most of the GPU would wait. Here the history is viewed as chunks that are attended to side by side, as in
flash-decoding; each gives its output and the logarithm of its sum of exponentials, by which the outputs are weighed and
added up::

    slots     0 ... L-1 | L ... 2L-1 | ... | rest       one kernel for the chunks, one for the rest, if there is any
    output    o0        | o1         | ... | or
    weight    softmax over chunks of their log-sum-exp: 0 where a row sees nothing of a chunk

Kernels are called by name, and ask nothing of the device, so that they can be captured. cuDNN's is up to three times
faster than torch's memory-efficient one, and splits the keys of single nodes by itself; but it plans anew for every
shape and in every thread, so it is for ``planned`` passes: many of the same shapes, over long histories.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from lookahead.runtime.masks import ALIGNED

_TILE = 64  # rows of a block of the GPU
_LEAST_CHUNK = 256  # keys; chunks are multiples of ALIGNED
# What a further kernel, and each further chunk, take, in the time that a block takes for so many keys.
_KERNEL_KEYS = 512
_CHUNK_KEYS = 16
_MOST_ROUNDS = 4  # in which all processors work through the chunks
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Stands for what is hidden; in float16, which has no such number, its lowest one does. Unlike bfloat16's and float32's
# lowest it stays finite in the kernels, so rows that see nothing of a chunk have a log-sum-exp, and not NaN.
_HIDDEN = -1e30
_no_plan: set[tuple[torch.dtype, int, int]] = set()  # dtypes and channels for which cuDNN has none


class RowsMask:
    """A pass's mask ``[batch, 1, node, slot]`` for rows in which the heads of one key head lie one behind the other:
    ``[batch, 1, head of a key head * node, slot]``."""

    def __init__(self, mask: Tensor, nodes: int, heads: int) -> None:
        self.known_by = mask  # held, so that no other one takes its place while this is known by it
        slots = mask.shape[-1]
        if mask.is_floating_point():
            mask = mask.clamp(min=max(_HIDDEN, torch.finfo(mask.dtype).min))
        if mask.device.type != "cpu" and slots % ALIGNED:
            mask = functional.pad(mask, (0, -slots % ALIGNED))
        self.is_single = nodes == 1
        rows = (
            mask.expand(-1, -1, heads, -1) if self.is_single else mask.expand(-1, -1, nodes, -1).repeat(1, 1, heads, 1)
        )
        self.rows = rows[..., :slots]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: RowsMask, scale: float | None, *, planned: bool = False
) -> Tensor:
    """Attention of packed rows ``[batch, key head, row, channel]`` over keys and values ``[batch, key head, slot,
    channel]``; gives ``[batch, key head, row, value channel]``. ``scale`` None is 1 over the root of the channels;
    ``planned``: kernels may be planned for these shapes, which come again in this thread."""
    batch, heads, rows, channels = query.shape
    slots = key.shape[2]
    if planned and mask.is_single:
        single, bias = query.reshape(batch, heads * rows, 1, channels), mask.rows[:, :, :1].expand(batch, -1, -1, -1)
        if (told := _by_plan(single, key, value, bias, scale)) is not None:
            return told[0].reshape(batch, heads, rows, -1)
    length = chunk_length(batch, heads * -(-rows // _TILE), slots, _processors(query.device))
    bias = mask.rows.expand(batch, heads, -1, -1)
    if length >= slots:
        return _attended(query, key, value, bias, scale, with_sums=False, planned=planned)[0]
    return torch.stack([_split(*each, scale, length, planned) for each in zip(query, key, value, bias, strict=True)])


def _split(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None, length: int, planned: bool
) -> Tensor:
    """One sequence's rows ``[key head, row, channel]`` over its keys in chunks."""
    slots, rows = key.shape[1], query.shape[1]
    whole = slots // length * length
    outputs, sums = [], []
    for start, stop, size in ((0, whole, length), (whole, slots, slots - whole)):
        if start == stop:
            continue
        keys, values = (states[:, start:stop].unflatten(1, (-1, size)) for states in (key, value))
        masks = bias[..., start:stop].unflatten(-1, (-1, size)).transpose(1, 2)
        queries = query[:, None].expand(-1, keys.shape[1], -1, -1)
        output, log_sum = _attended(queries, keys, values, masks, scale, with_sums=True, planned=planned)
        outputs.append(output)
        sums.append(log_sum[..., :rows])
    weights = torch.cat(sums, dim=1).softmax(1)[..., None]
    parts = weights.split([output.shape[1] for output in outputs], dim=1)
    first, *others = [(output * part).sum(1) for output, part in zip(outputs, parts, strict=True)]
    return sum(others, first).to(query.dtype)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None, *, with_sums: bool, planned: bool
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp where asked for, whose rows may be followed by others that mean nothing."""
    aten = torch.ops.aten
    if planned and (told := _by_plan(query, key, value, bias, scale, with_sums=with_sums)) is not None:
        return told
    if query.device.type == "cpu":
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
        return output, sums
    output, sums, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, with_sums, scale=scale)
    return output, sums


def _by_plan(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None, *, with_sums: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The same by cuDNN's kernel, which may also have fewer key heads than heads; None where it does not serve."""
    kind = query.dtype, query.shape[-1], value.shape[-1]
    if kind in _no_plan or not _can_plan(query, key, value, bias):
        return None
    try:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, sums, *_ = attend(query, key, value, bias, with_sums, scale=scale)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # there is no plan, though there might have been
        _no_plan.add(kind)
        return None
    return output, sums.flatten(2) if with_sums else sums


@cache
def may_plan(device: torch.device) -> bool:
    """Whether cuDNN's kernel was seen to be the faster one on such a device, which is an H200's kind."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


def _can_plan(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> bool:
    if not may_plan(query.device):
        return False
    grouped = query.shape[1] != key.shape[1]
    asked = torch.backends.cuda.SDPAParams(query, key, value, bias, 0.0, False, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


@lru_cache(maxsize=64)
def chunk_length(batch: int, blocks: int, slots: int, processors: int) -> int:
    """How many slots a chunk best has, where so many ``blocks`` of the GPU attend for one sequence, and ``processors``
    work side by side; all of them where splitting would not help."""
    best, least = slots, -(-batch * blocks // processors) * slots
    for count in range(2, min(slots // _LEAST_CHUNK, _MOST_ROUNDS * processors // blocks) + 1):
        length = -(-slots // (count * ALIGNED)) * ALIGNED
        whole, rest = divmod(slots, length)
        taken = -(-blocks * whole // processors) * length + _KERNEL_KEYS + _CHUNK_KEYS * whole
        if rest:
            taken += -(-blocks // processors) * rest + _KERNEL_KEYS
        if batch * taken < least:
            best, least = length, batch * taken
    return best


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether :func:`fused_attention` can be asked."""
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in _DTYPES:
        return False
    states = (query, key, value)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states)
    alike = all(tensor.dtype == query.dtype for tensor in (key, value, mask))
    return alike and not trained and torch.backends.cuda.mem_efficient_sdp_enabled() and all(map(_is_aligned, states))


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the kernel reads 16 bytes at once everywhere."""
    per_read = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    return last == 1 and not any(size % per_read for size in (tensor.shape[-1], *strides, tensor.storage_offset()))

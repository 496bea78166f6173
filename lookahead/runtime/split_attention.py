"""Masked attention on CUDA: of many rows by one kernel, of few rows over a long history with the keys in chunks.

torch's memory-efficient kernel gives each block of the GPU 64 rows of one key head, and lets it go through all keys. A
tree has few rows, so most of the GPU would wait. Here the history is viewed as chunks that are attended to side by
side, as in flash-decoding; each gives its output and the logarithm of its sum of exponentials, by which the outputs are
weighed and added up::

    slots     0 ... L-1 | L ... 2L-1 | ... | rest       one kernel for the chunks, one for the rest, if there is any
    output    o0        | o1         | ... | or
    weight    softmax over chunks of their log-sum-exp, 0 where a row sees nothing of a chunk

The kernel is called by name, because SDPA might choose cuDNN's, which plans anew for every shape and in every thread.
All shapes are known beforehand and nothing is asked of the device, so it can be captured.
"""

import threading
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from lookahead.runtime.thread_settings import During

_TILE = 64  # rows of a block of the GPU
_GRANULE = 64  # keys; chunks are multiples of it, and the kernel wants rows of masks aligned
_LEAST_CHUNK = 256  # keys
# What a further kernel, and each further chunk, take, in the time that a block takes for so many keys.
_KERNEL_KEYS = 512
_CHUNK_KEYS = 16
_MOST_ROUNDS = 4  # in which all processors work through the chunks
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _Settings(threading.local):
    chunk: int | None = None  # slots; None = as shapes say


_thread = _Settings()


class RowsMask:
    """A pass's mask ``[batch, 1, node, slot]`` for rows in which the heads of one key head lie one behind the other.

    Attributes:
        rows: ``[batch, 1, head of a key head * node, slot]``.
    """

    def __init__(self, mask: Tensor, nodes: int, heads: int) -> None:
        self.mask = mask  # held, so that no other one takes its place while this is known by it
        self._heads = heads
        self._seen: dict[int, Tensor] = {}
        slots = mask.shape[-1]
        if mask.device.type != "cpu":
            mask = functional.pad(mask, (0, -slots % _GRANULE)) if slots % _GRANULE else mask.contiguous()
        if nodes == 1:
            self.rows = mask.expand(-1, -1, heads, -1)
        else:
            self.rows = mask.expand(-1, -1, nodes, -1).repeat(1, 1, heads, 1)
        self.rows = self.rows[..., :slots]

    def seen(self, length: int) -> Tensor:
        """Whether each row sees anything of chunks of ``length`` slots, and of the rest: ``[batch, chunk, row]``."""
        if length not in self._seen:
            shown = self.mask > torch.finfo(self.mask.dtype).min / 2
            whole = shown.shape[-1] // length * length
            seen = shown[..., :whole].unflatten(-1, (-1, length)).any(-1)
            if whole < shown.shape[-1]:
                seen = torch.cat([seen, shown[..., whole:].any(-1, keepdim=True)], dim=-1)
            rows = self.rows.shape[2]
            self._seen[length] = seen[:, 0].transpose(1, 2).repeat(1, 1, rows // seen.shape[2])
        return self._seen[length]


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: RowsMask, scale: float | None) -> Tensor:
    """Attention of packed rows.

    Args:
        query: ``[batch, key head, row, channel]``.
        key, value: ``[batch, key head, slot, channel]``.
        scale: of the scores; None is 1 over the root of the channels.

    Returns:
        ``[batch, key head, row, value channel]``.
    """
    batch, heads, rows, _ = query.shape
    slots, length = key.shape[2], _thread.chunk
    if length is None:
        length = chunk_length(batch, heads * -(-rows // _TILE), slots, _processors(query.device))
    bias = mask.rows.expand(batch, heads, -1, -1)
    if length >= slots:
        return _attended(query, key, value, bias, scale)[0]
    seen = mask.seen(length).expand(batch, -1, -1)
    return torch.stack([_split(*each, scale, length) for each in zip(query, key, value, bias, seen, strict=True)])


def _split(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, seen: Tensor, scale: float | None, length: int
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
        output, log_sum = _attended(queries, keys, values, masks, scale, with_sums=True)
        outputs.append(output)
        sums.append(log_sum[..., :rows])
    known = torch.cat(sums, dim=1)
    # The kernels say 0 of rows that see nothing.
    weights = known.masked_fill(~seen, torch.finfo(known.dtype).min).softmax(1)[..., None]
    parts = weights.split([output.shape[1] for output in outputs], dim=1)
    added = [(output * part).sum(1) for output, part in zip(outputs, parts, strict=True)]
    return sum(added[1:], added[0]).to(query.dtype)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None, *, with_sums: bool = False
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp where asked for, whose rows may be followed by others that mean nothing."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
    else:
        told = aten._scaled_dot_product_efficient_attention(query, key, value, bias, with_sums, scale=scale)
        output, sums = told[:2]
    return output, sums


@lru_cache(maxsize=64)
def chunk_length(batch: int, blocks: int, slots: int, processors: int) -> int:
    """How many slots a chunk best has; all of them where splitting would not help.

    Args:
        blocks: of the GPU, that attend for one sequence.
        processors: that can work side by side.
    """
    best, least = slots, -(-batch * blocks // processors) * slots
    for count in range(2, min(slots // _LEAST_CHUNK, _MOST_ROUNDS * processors // blocks) + 1):
        length = -(-slots // (count * _GRANULE)) * _GRANULE
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
    """Whether :func:`fused_attention` can be asked, on CUDA unless a test splits attention elsewhere."""
    if _thread.chunk is not None:
        return True
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in _DTYPES:
        return False
    states = (query, key, value)
    if any(tensor.dtype != query.dtype for tensor in (key, value, mask)) or not _may_be_used(states):
        return False
    return all(_is_aligned(tensor) for tensor in states)


def _may_be_used(states: tuple[Tensor, ...]) -> bool:
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states)
    return torch.backends.cuda.mem_efficient_sdp_enabled() and not trained


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the kernel reads 16 bytes at once everywhere."""
    per_read = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    return last == 1 and not any(size % per_read for size in (tensor.shape[-1], *strides, tensor.storage_offset()))


def chunked(length: int) -> During:
    """Split attention of this thread's passes into chunks of ``length`` slots, on any device, while the block runs."""
    return During(_thread, chunk=length)

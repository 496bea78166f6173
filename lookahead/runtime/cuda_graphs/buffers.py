"""Memory of passes with static shapes: packed inputs, buffers and graphs, kept for a model's next call, up to some
bytes a model. A call takes what it uses, so two calls at once never share a buffer."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import TokenTree
from lookahead._per_model import MOST_PASSES, PerModel
from lookahead.models.hidden_states import Outputs
from lookahead.models.mask_rules import MaskRule
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.masks import ALIGNED, ancestor_words, map_rules
from lookahead.runtime.split_attention import may_plan

_BUCKETS = (1, 8, 16, 32, 64, 128)
_LEAST_SPAN = 256  # slots
MOVES = 32  # accepted nodes a row that the pass itself moves; longer paths are moved before it
# What waits for a model's next calls takes at most half of what its weights take, or this: where the weights fit, this
# does, and a server's few kinds of calls do.
_LEAST_BUDGET = 16 << 20  # bytes
# A plan of cuDNN's takes 60 ms, a process's first ones a second. On an H200 it saves an 8B model's pass 2 ms behind
# 8,192 tokens, and half of one behind 256: plans are for passes over so many slots, once there were so many of them.
_PLANNED_SLOTS, _PLANNED_AFTER = 2048, 512
_SMALL = 16  # keys and values that take less than a sixteenth of the weights' memory need not be saved

_T = TypeVar("_T")


def bucket_of(nodes: int) -> int:
    """The number of nodes that a static pass over ``nodes`` nodes computes."""
    return next((size for size in _BUCKETS if size >= nodes), -(-nodes // 64) * 64)


def span_of(slots: int) -> int:
    """Slots rounded up to a power of two or one and a half of one, at least 256."""
    span = _LEAST_SPAN
    while span < slots:
        span *= 2
    middle = span // 4 * 3
    return middle if middle >= max(slots, _LEAST_SPAN) else span


@dataclass(slots=True)
class Graph:
    """A captured pass. It is ``checked`` once its first replay gave what the pass itself gives, and a replay of a pass
    with as many nodes did so at another base."""

    replay: Callable[[], None]
    outputs: Outputs  # of the pass, overwritten by every replay
    base: int  # of the pass it was captured in
    held: Any  # what the graph reads and does not own
    checked: bool = False


class Inputs:
    """All that a pass of one bucket is told, packed into one vector on the host and one on the device.

    Attributes:
        tokens, depths: ``[batch, node]``.
        ancestors: ``[batch, node, words]``, see :func:`lookahead.runtime.masks.ancestor_words`.
        roots: ``[batch]``, position of each sequence's root.
        lengths: ``[batch]``, slots that each sequence has filled.
        base: ``[1]``, slot of node 0.
        sources, targets: ``[batch, move]``, what the pass before left to be moved.
    """

    def __init__(self, batch: int, nodes: int, device: torch.device) -> None:
        words = -(-nodes // 64)
        shapes: dict[str, tuple[int, ...]] = {"tokens": (batch, nodes), "depths": (batch, nodes)}
        shapes |= {"ancestors": (batch, nodes, words), "roots": (batch,), "lengths": (batch,), "base": (1,)}
        shapes |= {"sources": (batch, MOVES), "targets": (batch, MOVES)}
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self._host = torch.zeros(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        host, parts = (
            [part.view(shape) for shape, part in zip(shapes.values(), packed.split(sizes), strict=True)]
            for packed in (self._host, self._device)
        )
        self.host: dict[str, np.ndarray] = {name: part.numpy() for name, part in zip(shapes, host, strict=True)}
        self.tokens, self.depths, self.ancestors, *others = parts
        self.roots, self.lengths, self.base, self.sources, self.targets = others
        self.counting = torch.arange(nodes, device=device)
        self._words = words
        # A node that only fills up the bucket sees itself alone.
        self._alone = ancestor_words([-1] * nodes, words)

    def send(
        self,
        trees: Sequence[TokenTree],
        roots: list[int],
        lengths: list[int],
        base: int,
        moves: list[list[tuple[int, int]]],
    ) -> None:
        """Pack a pass and put it on its way; returns before it is there."""
        host = self.host
        for row, tree in enumerate(trees):
            count = len(tree)
            host["tokens"][row, :count] = tree.tokens
            host["tokens"][row, count:] = tree.tokens[0]
            host["depths"][row, :count] = tree.depths
            host["depths"][row, count:] = 0
            host["ancestors"][row, :count] = ancestor_words(tree.parents, self._words)
            host["ancestors"][row, count:] = self._alone[count:]
        host["roots"][:], host["lengths"][:], host["base"][0] = roots, lengths, base
        host["sources"][:], host["targets"][:] = padded_moves(moves, MOVES)
        self._device.copy_(self._host, non_blocking=True)

    def settle(self) -> None:
        """The moves are made: running the pass again makes them no second time."""
        self.sources.zero_()
        self.targets.zero_()


def padded_moves(moves: list[list[tuple[int, int]]], width: int) -> np.ndarray:
    """Moves as int64 ``[2, batch, width]``, from-slots and to-slots: each row's last pair repeated, or (0, 0)."""
    filled = [(pairs + pairs[-1:] * (width - len(pairs))) for pairs in (row or [(0, 0)] for row in moves)]
    return np.array(filled, dtype=np.int64).transpose(2, 0, 1)


class StaticBuffers:
    """Buffers and graphs of one batch size, used by one call at a time. Holds nothing that holds the model; ``key``
    stands for the kind of call that they serve, see :func:`lease`."""

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device, key: Any = None) -> None:
        self.batch, self.dtype, self.device, self.key = batch, dtype, device, key
        self.capacity = 0  # slots of every buffer, a multiple of ALIGNED
        self.extent = Extent(0, 0, ALIGNED)  # says how many the call needs
        self.padding = torch.zeros(batch, dtype=torch.long, device=device)  # slots before each sequence's first token
        self.types = torch.zeros((batch, 1), dtype=torch.long, device=device)  # the token type that is carried on
        self.rows = torch.arange(batch, device=device)[:, None]
        self.bits = torch.arange(64, device=device)
        self.inputs: dict[int, Inputs] = {}
        self.graphs: dict[tuple[int, int], Graph] = {}  # by (nodes, span); the most recently replayed last
        self.warm: set[tuple[int, ...]] = set()  # buckets, and (nodes, span), run for captures, with their threads
        self.follow: set[int] = set()  # buckets of which a graph was seen to follow the history
        self.long = 0  # passes over long histories, so far
        self.failure: str | None = None  # why passes are not captured any more
        self.proven = False  # a pass has run to its end
        self.plain_ms: float | None = None  # of a pass over one node without a graph; None = that is not known
        self.pool: Any = None  # memory that all graphs share, since only one of them runs at a time
        self.stream: Any = None  # where passes are captured
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.stock: list[Tensor] = []  # an earlier call's buffers of the KV cache
        self._resize(0)

    def forget_passes(self) -> None:
        """Free what belongs to passes over buffers of this capacity."""
        self.graphs.clear()
        self._masks.clear()
        self.pool = None

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.forget_passes()
        self.stock.clear()
        # [batch, capacity]; False where the prompt has padding or holes
        self.shown = torch.ones((self.batch, capacity), dtype=torch.bool, device=self.device)
        self.columns = torch.arange(capacity, device=self.device)

    def reserve(self, extent: Extent, *, at_once: bool, spare: int = 0) -> None:
        """Get ready for a call: with as many slots as it needs in the beginning, or ``at_once`` all of them. Larger
        buffers of an earlier call are used if they take at most ``spare`` bytes, or if graphs read them and they are
        less than twice as large: captures cost more than such memory."""
        self.extent = extent
        slots = extent.most if at_once else extent.first
        most = 2 * extent.most if self.graphs else extent.most
        large = self.capacity > most and sum(buffer.nbytes for buffer in self.stock) > spare
        if slots > self.capacity or large:
            self._resize(slots)
        else:
            self.shown.fill_(True)

    def allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer of zeros: an earlier call's where there is one of this shape. Those of one shape come in the order
        in which they were given back, so that each layer gets its own, which graphs read."""
        shape = (*shape[:3], self.capacity, shape[4])
        for place, known in enumerate(self.stock):
            if (known.shape, known.dtype) == (shape, like.dtype):
                return self.stock.pop(place).zero_()  # what an earlier call left there may not even be finite
        self.graphs.clear()
        return sparing(lambda: like.new_zeros(shape))

    def widen(self, buffers: Sequence[Tensor]) -> None:
        """The call's ``buffers`` of the KV cache may have more slots now; what is known of the prompt stays."""
        capacity = min(buffer.shape[3] for buffer in buffers)
        if capacity > self.capacity:
            shown = self.shown
            self._resize(capacity)
            self.shown[:, : shown.shape[1]] = shown

    @property
    def nbytes(self) -> int:
        """Bytes that wait here, as far as they can be counted: what graphs use inside of passes is not."""
        told = [part for graph in self.graphs.values() for part in (graph.outputs.logits, *graph.outputs.hidden)]
        return sum(tensor.nbytes for tensor in (*self.stock, *self._masks.values(), *told))

    def inputs_of(self, nodes: int) -> Inputs:
        if nodes not in self.inputs:
            self.inputs[nodes] = Inputs(self.batch, nodes, self.device)
        return self.inputs[nodes]

    def mask_of(self, nodes: int, span: int) -> Tensor:
        """The mask buffer ``[batch, 1, nodes, span]`` of a bucket."""
        if (nodes, span) not in self._masks:
            shape = (self.batch, 1, nodes, span)
            self._masks[nodes, span] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._masks[nodes, span]

    def masks(self, rules: Any, inputs: Inputs, slots: Tensor, mask: Tensor) -> Any:
        """The masks of :func:`.tree_masks` over a fixed span of slots, for nodes at ``slots`` ``[node]``, computed on
        the device without asking it anything. ``mask`` ``[batch, 1, node, span]`` is overwritten, and returned for
        layers that are only causal."""
        nodes, span = mask.shape[2:]
        lowest, columns = torch.finfo(mask.dtype).min, self.columns[:span]
        branches = ((inputs.ancestors[..., None] >> self.bits) & 1).flatten(2)[:, :, :nodes].bool()
        history = self.shown[:, :span] & (columns < inputs.lengths[:, None])
        visible = history[:, None, :].repeat(1, nodes, 1).index_copy_(2, slots, branches)
        mask.fill_(lowest).masked_fill_(visible[:, None], 0.0)

        def build(rule: MaskRule) -> Tensor:
            if rule is None:
                return mask
            first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=mask.device)
            queries = (inputs.lengths - self.padding)[:, None] + inputs.depths
            keys = (columns - self.padding[:, None]).index_copy_(1, slots, queries)
            seen = rule(first, first, queries[:, None, :, None], keys[:, None, None, :])
            return mask.masked_fill(~seen, lowest)

        return map_rules(rules, build)

    def plans(self, span: int) -> bool:
        """Count a pass; whether kernels are to be planned for it, which need graphs of their own."""
        if span < _PLANNED_SLOTS or not may_plan(self.device):
            return False
        self.long += 1
        if self.long == _PLANNED_AFTER:
            self.graphs = {key: graph for key, graph in self.graphs.items() if key[1] < _PLANNED_SLOTS}
        return self.long >= _PLANNED_AFTER

    def add(self, key: tuple[int, int], graph: Graph) -> None:
        """Remember a graph, and forget the one that was replayed longest ago if there are too many."""
        while len(self.graphs) >= MOST_PASSES:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest], self._masks[oldest]
        self.graphs[key] = graph


# Buffers that wait for a model's next call; the most recently used last.
_waiting: PerModel[list[StaticBuffers]] = PerModel(list)
_lock = threading.Lock()
capturing = threading.Lock()  # a capture must not meet another thread's, or its waiting for the whole device


def lease(model: PreTrainedModel, key: Any, batch: int, dtype: torch.dtype, device: torch.device) -> StaticBuffers:
    """Buffers that no other call uses: some that wait for this kind of call, or new ones. ``key`` is the model's
    fingerprint, and what else the kind of call depends on; None = its buffers serve it alone. Buffers of what the model
    was before something of it was changed are dropped."""
    with _lock:
        waiting = [] if key is None else _waiting.of(model)
        waiting[:] = [buffers for buffers in waiting if buffers.key[0] == key[0]]
        place = next((place for place, buffers in enumerate(waiting) if buffers.key == key), None)
        if place is None:
            return StaticBuffers(batch, dtype, device, key)
        buffers = waiting.pop(place)
    if device.type == "cuda":  # an earlier call's work may still read what this one writes
        with capturing:
            torch.cuda.synchronize(device)
    return buffers


def give_back(model: PreTrainedModel, buffers: StaticBuffers, cache: Sequence[Tensor]) -> None:
    """Let ``buffers``, and the buffers of the KV cache, wait for the model's next call."""
    if buffers.key is None:
        return
    buffers.stock = list(cache)
    left = max(_LEAST_BUDGET, weight_bytes(model) // 2)
    with _lock:
        waiting = _waiting.of(model)
        kept = []
        for each in (buffers, *reversed(waiting)):
            if each.nbytes <= left:
                left -= each.nbytes
                kept.append(each)
        waiting[:] = reversed(kept)


def spare_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values that need not be saved: few beside the weights."""
    return weight_bytes(model) // _SMALL


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in model.parameters())


def is_small(forward: TreeForward, slots: int) -> bool:
    """True if keys and values of so many slots, as the config speaks of them, are little beside the weights."""
    config = forward.traits.config
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
    layers, heads, hidden, key_heads, channels = (getattr(config, name, None) for name in names)
    key_heads = key_heads or heads
    if not (isinstance(layers, int) and isinstance(key_heads, int)):
        return False
    channels = channels or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None)
    if not isinstance(channels, int):
        return False
    numbers = 2 * layers * forward.batch * slots * key_heads * channels
    return bool(numbers * forward.traits.dtype.itemsize <= spare_bytes(forward.model))


def release() -> None:
    """Free the buffers and graphs that wait for any model's next call."""
    _waiting.clear()


def sparing(allocate: Callable[[], _T]) -> _T:
    """Allocate, if need be after freeing what only waits."""
    try:
        return allocate()
    except torch.OutOfMemoryError:
        release()
        return allocate()

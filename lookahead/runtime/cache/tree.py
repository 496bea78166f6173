"""The KV cache of tree forwards: preallocated buffers that keep chosen slots, ragged over the batch.

During the prefill, layers hold what the model gives them. Then all layers of one shape move into one buffer
``[entry, batch, head, slot, channel]`` (an entry is one layer's keys or values), so that keeping a sequence's accepted
slots is one gather and one copy for the whole model. Sliding-window layers keep every slot too: windows are the mask's.

A pass writes its nodes at slots ``base .. base+T-1`` of every sequence; ``base`` is the longest one's length. What a
shorter one has between its own length and ``base`` is masked out and later overwritten. With static shapes
(`runtime.cuda_graphs`) a pass writes at slots that a tensor holds, and reads a fixed number of slots. An offloaded
cache lies in the host's memory; each layer fetches its own keys and values once a pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer

from jacobi import LookaheadError
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.layers import EMPTY_LAYERS, Allocate, LayerBuffer, TreeLayer


class TreeCache(Cache):
    """The cache that tree forwards run on.

    Args:
        n_layers: layers of the model; None = as many as turn up.
        on_host: keys and values lie in the host's memory, wherever the layers compute.

    Attributes:
        base: first slot of the pass's nodes, the longest sequence's length.
        lengths: slots that each sequence has filled.
        slots: with static shapes, where the pass writes, ``[node]``; None = at ``base`` and the slots after it.
    """

    def __init__(self, n_layers: int | None, *, on_host: bool = False) -> None:
        self.on_host = on_host
        if n_layers is None:
            super().__init__(layer_class_to_replicate=partial(TreeLayer, self))
        else:
            super().__init__(layers=[TreeLayer(self) for _ in range(n_layers)])
        self.base = 0
        self.lengths: list[int] = []
        self.slots: Tensor | None = None
        self._groups: list[LayerBuffer] = []

    def load(self, cache: Cache) -> None:
        """Start from what another cache holds; the other cache is only read. A sliding-window layer that has dropped
        its oldest slots gets zeros there: no later token can see them."""
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        while self.layer_class_to_replicate is not None and len(self.layers) < len(cache.layers):
            self.layers.append(self.layer_class_to_replicate())
        for layer, source in zip(self.layers, cache.layers, strict=False):
            length = 0 if isinstance(source, EMPTY_LAYERS) else int(source.get_seq_length())
            if length == 0:
                continue
            keys, values = source.keys, source.values
            if isinstance(source, StaticLayer):
                keys, values = keys[:, :, :length], values[:, :, :length]
            dropped = length - keys.shape[-2]
            if dropped:
                keys, values = (torch.nn.functional.pad(states, (0, 0, dropped, 0)) for states in (keys, values))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.indexer_keys = getattr(source, "indexer_keys", None)

    def consolidate(self, capacity: int, allocate: Allocate | None = None) -> None:
        """Move what the prefill left into shared buffers with about ``capacity`` slots, from ``allocate`` if given. The
        prompt's last token then counts as the one node of the prompt's own pass, so that it is kept like any other."""
        by_kind: dict[tuple[Any, ...], list[tuple[TreeLayer, str, Tensor]]] = {}
        for layer in self.layers:
            if layer.is_initialized:
                for name in ("key", "value"):
                    states = getattr(layer, f"{name}s")
                    kind = (states.shape, states.dtype, states.device)
                    by_kind.setdefault(kind, []).append((layer, name, states))
                if layer.indexer_keys is not None:
                    states = layer.indexer_keys[:, None]
                    by_kind.setdefault((states.shape, states.dtype, states.device), []).append((layer, "index", states))
                layer.keys = layer.values = layer.indexer_keys = None
        lengths = {shape[-2] for shape, *_ in by_kind}
        if len(lengths) > 1:
            raise LookaheadError(
                f"The layers of this model's cache hold {sorted(lengths)} slots: expected one number, that of the "
                "prompt's tokens. Drop use_lookahead."
            )
        for members in by_kind.values():
            pinned = self.on_host and torch.cuda.is_available()
            group = LayerBuffer([states for _, _, states in members], capacity, allocate, pinned=pinned)
            self._groups.append(group)
            for entry, (layer, name, _) in enumerate(members):
                setattr(layer, f"{name}_entry", (group, entry))
        if not self._groups:
            raise LookaheadError("This model fills no key/value cache, so no tree can be verified. Drop use_lookahead.")
        (length,) = lengths
        self.base, self.lengths = length - 1, [length - 1] * self._groups[0].buffer.shape[1]

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Append slots ``base + node`` of the last pass to each sequence, for its ``chosen`` nodes, root first."""
        for row, nodes in enumerate(chosen):
            start = self.lengths[row]
            self.lengths[row] = start + len(nodes)
            slots = [self.base + node for node in nodes]
            settled = next((place for place, slot in enumerate(slots) if slot != start + place), len(slots))
            slots, start = slots[settled:], start + settled
            if slots:
                self._move_row(row, slots, start)
        self.base = max(self.lengths)

    def _move_row(self, row: int, slots: Sequence[int], start: int) -> None:
        """Copy ``slots`` of a sequence, in rising order, to ``start`` and the slots after it, which lie before them."""
        first, count = slots[0], len(slots)
        stop = start + count
        in_one_piece = slots[-1] == first + count - 1 and stop <= first
        for group in self._groups:
            states = group.buffer[:, row]
            if in_one_piece:
                states[:, :, start:stop] = states[:, :, first : first + count]
            else:
                states[:, :, start:stop] = states.index_select(2, torch.tensor(slots, device=states.device))

    def advance(self, chosen: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
        """Like :meth:`keep`, but return each sequence's copies, (from slot, to slot) rising, for :meth:`move`."""
        moves = []
        for row, nodes in enumerate(chosen):
            start = self.lengths[row]
            pairs = [(self.base + node, start + place) for place, node in enumerate(nodes)]
            moves.append([pair for pair in pairs if pair[0] != pair[1]])
            self.lengths[row] = start + len(nodes)
        self.base = max(self.lengths)
        return moves

    def move(self, sources: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Copy slots ``sources`` to ``targets``, both ``[batch, move]``, without reading an index on the host. Where
        targets of a sequence are equal, so are the sources. ``rows`` is ``[batch, 1]``, counting up from 0."""
        for group in self._groups:
            states = group.buffer.permute(1, 3, 0, 2, 4)
            states[rows, targets] = states[rows, sources]

    def open_views(self, nodes: int) -> list[Tensor]:
        """What a pass over ``nodes`` nodes writes to and reads, for every entry of every group in turn."""
        start, stop = self.base, self.base + nodes
        for group in self._groups:
            group.open(start, stop)
        return [view for group in self._groups for view in (*group.fresh, *group.history)]

    @contextmanager
    def given_views(self, views: Sequence[Tensor]) -> Iterator[None]:
        """Let a pass use other tensors, in the order of :meth:`open_views`, while the block runs."""
        left = iter(views)
        before = [(group.fresh, group.history) for group in self._groups]
        for group, (fresh, history) in zip(self._groups, before, strict=True):
            group.fresh = tuple(next(left) for _ in fresh)
            group.history = tuple(next(left) for _ in history)
        try:
            yield
        finally:
            for group, (fresh, history) in zip(self._groups, before, strict=True):
                group.fresh, group.history = fresh, history

    def open_static(self, slots: Tensor, span: int) -> None:
        """Let the next pass write at ``slots`` ``[node]`` and read the first ``span`` slots, at most the capacity."""
        self.slots = slots
        for group in self._groups:
            group.open_static(span)

    def close_static(self) -> None:
        """Let the next pass write at ``base``, with shapes that follow the text."""
        self.slots = None

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers ``[entry, batch, head, slot, channel]``, one for each shape of keys or values."""
        return [group.buffer for group in self._groups]

    def grow(self, capacity: int) -> None:
        """Move on to buffers of ``capacity`` slots, zero where nothing is held."""
        for group in self._groups:
            group.grow(capacity)

    def store(self, cache: Cache) -> None:
        """Leave keys and values in ``cache`` as plain decoding would have: its layers, its lengths, its windows. All
        sequences must be equally long."""
        length = self.base
        while len(cache.layers) < len(self.layers) and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        for source, layer in zip(self.layers, cache.layers, strict=False):
            if source.key_entry is None or source.value_entry is None:
                continue
            keys, values = (group.buffer[at, :, :, :length] for group, at in (source.key_entry, source.value_entry))
            if not layer.is_initialized:
                layer.lazy_initialization(keys[:, :, :0].to(source.device), values[:, :, :0].to(source.device))
            if isinstance(layer, StaticLayer):
                layer.keys[:, :, :length], layer.values[:, :, :length] = keys, values
                layer.cumulative_length.fill_(length)
                continue
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length
                window = layer.sliding_window - 1
                keys, values = keys[:, :, max(0, length - window) :], values[:, :, max(0, length - window) :]
            place = keys.device if cache.offloading else source.device
            layer.keys, layer.values = keys.to(place, copy=True), values.to(place, copy=True)
            if source.index_entry is not None:
                group, entry = source.index_entry
                states = group.buffer[entry, :, 0, :length]
                layer.lazy_initialization_indexer(states)
                layer.indexer_keys = states.clone()


def empty_cache(traits: ModelTraits, given: Cache | None) -> TreeCache:
    """A cache for tree forwards, started from what ``given`` holds, if anything."""
    n_layers = None if traits.is_encoder_decoder else traits.config.num_hidden_layers
    cache = TreeCache(n_layers, on_host=getattr(given, "offloading", False))
    if given is not None:
        cache.load(given)
    return cache

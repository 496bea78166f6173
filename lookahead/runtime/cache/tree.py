"""The key/value history: one preallocated buffer that keeps chosen slots, ragged over the batch.

While the prompt runs, layers hold what the model gives them. Then all layers of one shape move into one buffer
``[entry, batch, head, slot, channel]`` (an entry is one layer's keys or values), so that keeping a row's accepted slots
is one gather and one copy for the whole model. Every layer keeps every slot, sliding-window layers too: the window is
the mask's business.

A pass writes its nodes at slots ``base .. base+T-1`` of every row, ``base`` being the longest row's history; what a
shorter row has between its own history and ``base`` is masked out and later overwritten.

With static shapes (`runtime.cuda_graphs`) a pass writes by index, at slots that a tensor holds, and reads a fixed
number of slots whatever the history's length.

An offloaded cache's history lies in the host's memory. Each layer fetches its own when its turn comes, once a pass
however many nodes the pass has.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
)

from jacobi import LookaheadError
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.buffers import Allocate, LayerBuffer


def layer_kinds(*names: str) -> tuple[type, ...]:
    """The cache's layers, or mixins of theirs, of these names that this version of transformers has."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


EMPTY_LAYERS = layer_kinds("DummyLayer")  # they never hold anything: their keys are another layer's


class TreeLayer(DynamicLayer):
    """One layer's keys and values: concatenated while the prompt runs, views into a shared buffer afterwards."""

    def __init__(self, store: "TreeCache") -> None:
        self._own: dict[str, Tensor | None] = {}  # keys and values, until they move into buffers
        super().__init__()
        self._store = store
        self.key_entry: tuple[LayerBuffer, int] | None = None
        self.value_entry: tuple[LayerBuffer, int] | None = None
        self.index_entry: tuple[LayerBuffer, int] | None = None
        self.indexer_keys: Tensor | None = None  # [batch, slot, channel], until they move into a buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a pass's keys and values ``[batch, head, node, channel]``; return history and pass together."""
        if self.key_entry is None or self.value_entry is None:
            if self._store.on_host:
                return self._update_on_host(key_states, value_states)
            return super().update(key_states, value_states)
        slots = self._store.slots
        if slots is not None:
            (group, entry), (value_group, value_entry) = self.key_entry, self.value_entry
            keys, values = group.history[entry], value_group.history[value_entry]
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
            return keys, values
        return self._append(self.key_entry, key_states), self._append(self.value_entry, value_states)

    def _update_on_host(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The same while the prompt runs, for a history that lies in the host's memory between the layer's turns."""
        self.device = key_states.device
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.to(self.device), self.values.to(self.device)
        keys, values = super().update(key_states, value_states)
        self.keys, self.values = keys.cpu(), values.cpu()
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append a pass's keys ``[batch, node, channel]`` of the indexer; return history and pass together."""
        if self.index_entry is None:
            before = [] if self.indexer_keys is None else [self.indexer_keys]
            self.indexer_keys = torch.cat([*before, indexer_key_states], dim=1)
            return self.indexer_keys
        return self._append(self.index_entry, indexer_key_states[:, None])[:, 0]

    def _append(self, place: "tuple[LayerBuffer, int]", states: Tensor) -> Tensor:
        """Write a pass's states ``[batch, head, node, channel]`` at ``base``; return history and pass together."""
        start = self._store.base
        stop = start + states.shape[-2]
        group, entry = place
        group.open(start, stop)
        group.fresh[entry].copy_(states)
        return group.history[entry].to(states.device)

    def _states(self, name: str, entry: "tuple[LayerBuffer, int] | None") -> Tensor | None:
        if entry is None:
            return self._own.get(name)
        return entry[0].buffer[entry[1], :, :, : self._store.base]

    @property
    def keys(self) -> Tensor | None:
        """History ``[batch, head, slot, channel]``; only models that look past :meth:`update` read it (Mllama)."""
        return self._states("keys", self.key_entry)

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._own["keys"] = states

    @property
    def values(self) -> Tensor | None:
        """The same of the values."""
        return self._states("values", self.value_entry)

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._own["values"] = states

    def get_seq_length(self) -> int:
        """Slots that hold history (of the longest row)."""
        return self._store.base if self.key_entry is not None else super().get_seq_length()


class TreeCache(Cache):
    """The cache that fused passes run on.

    Args:
        n_layers: layers of the model; None = as many as turn up.
        on_host: the history lies in the host's memory, wherever the layers compute.

    Attributes:
        base: first slot of the pass's nodes; every row's history lies below it.
        lengths: slots of history in each row.
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
        """Start from another cache's history; the other cache is only read.

        A sliding-window layer that has dropped its oldest slots gets zeros there: no later token can see them.
        """
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
        """Move what the prompt left into shared buffers with about ``capacity`` slots.

        The prompt's last token then counts as the one node of the prompt's own pass, so that it is kept like any other.

        Args:
            capacity: slots; rounded up to a multiple of 64.
            allocate: makes the buffers; None = fresh ones.
        """
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
        """Append slots ``base + node`` of the last pass to each row's history.

        Args:
            chosen: for each row the visited nodes, root first; empty where a row does not advance.
        """
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
        """Copy ``slots`` of a row, in rising order, to ``start`` and the slots after it, which lie before them."""
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
        """Count nodes as history without moving them yet: :meth:`keep` for passes that move by index tensors.

        Args:
            chosen: as for :meth:`keep`.

        Returns:
            For each row the moves (from slot, to slot) that :meth:`move` still has to make, in rising order.
        """
        moves = []
        for row, nodes in enumerate(chosen):
            start = self.lengths[row]
            pairs = [(self.base + node, start + place) for place, node in enumerate(nodes)]
            moves.append([pair for pair in pairs if pair[0] != pair[1]])
            self.lengths[row] = start + len(nodes)
        self.base = max(self.lengths)
        return moves

    def move(self, sources: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Copy slots within each row, without reading an index on the host.

        Args:
            sources: ``[batch, move]``.
            targets: ``[batch, move]``; of equal ones in a row the sources are equal too.
            rows: ``[batch, 1]``, counting up from 0.
        """
        for group in self._groups:
            states = group.buffer.permute(1, 3, 0, 2, 4)
            states[rows, targets] = states[rows, sources]

    def open_views(self, nodes: int) -> list[Tensor]:
        """What a pass over so many nodes writes to and reads, for every entry of every group in turn."""
        start, stop = self.base, self.base + nodes
        for group in self._groups:
            group.open(start, stop)
        return [view for group in self._groups for view in (*group.fresh, *group.history)]

    @contextmanager
    def given_views(self, views: Sequence[Tensor]) -> Iterator[None]:
        """Let a pass write to and read others, in the order of :meth:`open_views`, while the block runs."""
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
        """Let the next pass write at ``slots`` and read the first ``span`` slots.

        Args:
            slots: ``[node]``.
            span: at least every slot's number plus one, at most the capacity.
        """
        self.slots = slots
        for group in self._groups:
            group.open_static(span)

    def close_static(self) -> None:
        """Let the next pass write at ``base``, with shapes that follow the history."""
        self.slots = None

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers ``[entry, batch, head, slot, channel]``, one for each shape of keys or values."""
        return [group.buffer for group in self._groups]

    def grow(self, capacity: int) -> None:
        """Move the history into buffers of ``capacity`` slots, zero where there is no history."""
        for group in self._groups:
            group.grow(capacity)

    def store(self, cache: Cache) -> None:
        """Leave the history in ``cache`` as plain decoding would have: its layers, its lengths, its windows.

        Every row must have the same length.
        """
        length = self.base
        while len(cache.layers) < len(self.layers) and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        for source, layer in zip(self.layers, cache.layers, strict=False):
            if source.key_entry is None or source.value_entry is None:
                continue
            keys, values = (
                group.buffer[entry, :, :, :length] for group, entry in (source.key_entry, source.value_entry)
            )
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

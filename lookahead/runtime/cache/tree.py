"""The KV cache of tree forwards: preallocated buffers that keep chosen slots, ragged over the batch.

A pass writes its nodes at slots ``base .. base+T-1`` of every sequence; ``base`` is the longest one's length. What a
shorter one has between its own length and ``base`` is masked out and later overwritten. With static shapes
(`runtime.cuda_graphs`) a pass writes at slots that a tensor holds, and reads a fixed number of slots. An offloaded
cache lies in the host's memory; each layer fetches its own keys and values once a pass.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer

from jacobi import LookaheadError, TokenTree
from lookahead.models.families.scans import Scans
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.buffers import Allocate, Extent, Store
from lookahead.runtime.cache.layers import EMPTY_LAYERS, TreeLayer
from lookahead.runtime.cache.states import StateLayer, keep_states, tree_layer, types_with_keys
from lookahead.runtime.scores import send


class TreeCache(Cache):
    """The cache that tree forwards run on.

    Args:
        types: of the layers with keys, as far as they are known: layers of one type have states of one shape.
        n_layers: layers of the cache; None = as many as turn up.
        on_host: keys and values lie in the host's memory, wherever the layers compute.
        kinds: of the layers in transformers' own cache, where some are recurrent.

    Attributes:
        lengths: slots that each sequence has filled.
        states: the layers that have recurrent states.
    """

    def __init__(
        self,
        types: Sequence[Hashable],
        n_layers: int | None = None,
        *,
        on_host: bool = False,
        kinds: Sequence[type] = (),
    ) -> None:
        self._store = Store(types, on_host)  # which does not hold the layers: nothing here refers to itself
        if n_layers is None:
            super().__init__(layer_class_to_replicate=partial(TreeLayer, self._store))
        else:
            super().__init__(layers=[tree_layer(kind, self._store) for kind in kinds or [object] * n_layers])
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.lengths: list[int] = []
        self.on_host = on_host

    @property
    def base(self) -> int:
        """First slot of the pass's nodes, the longest sequence's length."""
        return self._store.base

    def reserve(self, extent: Extent, allocate: Allocate | None = None) -> None:
        """Say, before anything is written, how large buffers are to be, and where they come from; None = new ones."""
        self._store.extent, self._store.allocate = extent, allocate

    def load(self, cache: Cache, *, take: bool = False) -> None:
        """Start from what another cache holds; it is only read, or emptied with ``take``. A sliding-window layer that
        has dropped its oldest slots gets zeros there: no later token can see them."""
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        while self.layer_class_to_replicate is not None and len(self.layers) < len(cache.layers):
            self.layers.append(self.layer_class_to_replicate())
        for layer, source in zip(self.layers, cache.layers, strict=False):
            if isinstance(layer, StateLayer):
                layer.load(source)
            has_keys = isinstance(layer, TreeLayer) and not isinstance(source, EMPTY_LAYERS)
            length = int(source.get_seq_length()) if has_keys else 0
            if length == 0:
                continue
            keys, values = source.keys, source.values
            if isinstance(source, StaticLayer):
                keys, values = keys[:, :, :length], values[:, :, :length]
            dropped = length - keys.shape[-2]
            if dropped:
                keys, values = (torch.nn.functional.pad(states, (0, 0, dropped, 0)) for states in (keys, values))
            layer.fill(keys, values, getattr(source, "indexer_keys", None))
            if take:
                source.keys = source.values = None

    def consolidate(self) -> None:
        """The prompt has been read: its last token counts as the one node of its pass, to be kept like any other."""
        keyed = [layer for layer in self.layers if isinstance(layer, TreeLayer)]
        lengths = set[int]().union(*(layer.read.values() for layer in keyed if layer.is_initialized))
        if len(lengths) > 1:
            raise LookaheadError(
                f"The layers of this model's cache hold {sorted(lengths)} slots: expected one number, that of the "
                "prompt's tokens. Drop use_lookahead."
            )
        if not lengths:
            raise LookaheadError("This model fills no key/value cache, so no tree can be verified. Drop use_lookahead.")
        self._store.settle()
        for layer in self.states:
            layer.settle()
        (length,) = lengths
        self._store.base, self.lengths = length - 1, [length - 1] * self._store.groups[0].buffer.shape[1]

    def keep_prompts(self, behind: Sequence[int]) -> None:
        """Keep all slots of the prompts' pass but those ``behind`` each prompt."""
        self.lengths = [self.base + 1 - padding for padding in behind]
        self._store.base = max(self.lengths)

    def make_room(self, nodes: int) -> int:
        """Have room for a pass over ``nodes`` nodes. The first slot that sliding-window layers hold from now on."""
        sliding = [group for group in self._store.groups if group.window is not None]
        for group in sliding:
            group.oldest = max(0, min(self.lengths) - (group.window or 0) + 1)
            group.reach(self.base + nodes)
        if len({group.first for group in sliding}) > 1:  # where memory was short, some have grown less than others
            for group in sliding:
                group.slide()
        return sliding[0].first if sliding else 0

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Append slots ``base + node`` of the last pass to each sequence, for its ``chosen`` nodes, root first."""
        keep_states(self._store, self.states, chosen)
        moves = [(row, *pair) for row, pairs in enumerate(self.advance(chosen)) for pair in pairs]
        if moves:
            places = np.array(moves).T
            devices = {group.buffer.device for group in self._store.groups if not group.on_host}
            sent = {device: send(places, device) for device in devices}
            for group in self._store.groups:
                group.move(*places if group.on_host else sent[group.buffer.device])

    def advance(self, chosen: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
        """Like :meth:`keep`, but return each sequence's copies, (from slot, to slot) rising, for :meth:`move`."""
        moves = []
        for row, nodes in enumerate(chosen):
            start = self.lengths[row]
            pairs = [(self.base + node, start + place) for place, node in enumerate(nodes)]
            moves.append([pair for pair in pairs if pair[0] != pair[1]])
            self.lengths[row] = start + len(nodes)
        self._store.base = max(self.lengths)
        return moves

    def move(self, sources: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Copy slots ``sources`` to ``targets``, both ``[batch, move]``, without reading an index on the host. Where
        targets of a sequence are equal, so are the sources. ``rows`` is ``[batch, 1]``, counting up from 0."""
        for group in self._store.groups:
            group.slots[rows, targets] = group.slots[rows, sources]

    def scan(self, trees: Sequence[TokenTree]) -> Scans:
        """The scans of a pass over ``trees``, one for each sequence."""
        scans = self._store.scans = Scans.over(trees, self.states[0].device)
        return scans

    def open_views(self, nodes: int) -> list[Tensor]:
        """Views that a pass over ``nodes`` nodes writes to, for all states as they turned up, then those it reads."""
        start, stop = self.base, self.base + nodes
        for group in self._store.groups:
            group.open(start, stop)
        places = self._store.places
        return [group.fresh[entry] for group, entry in places] + [group.history[entry] for group, entry in places]

    @contextmanager
    def given_views(self, views: Sequence[Tensor]) -> Iterator[None]:
        """Let a pass use other tensors, in the order of :meth:`open_views`, while the block runs."""
        before = [(group, group.fresh, group.history) for group in self._store.groups]
        places = self._store.places
        for group in self._store.groups:
            group.fresh, group.history = (
                tuple(view for (owner, _), view in zip(places, part, strict=True) if owner is group)
                for part in (views[: len(places)], views[len(places) :])
            )
        try:
            yield
        finally:
            for group, fresh, history in before:
                group.fresh, group.history = fresh, history

    def open_static(self, slots: Tensor | None, span: int = 0) -> None:
        """Let the next pass write at ``slots`` ``[node]`` and read the first ``span`` slots, at most the capacity; None
        = it writes at ``base``, with shapes that follow the text."""
        self._store.slots = slots
        for group in self._store.groups if slots is not None else ():
            group.open(0, span)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers ``[entry, batch, head, slot, channel]``, one for each shape of keys or values."""
        return [group.buffer for group in self._store.groups]

    def reach(self, stop: int) -> None:
        """Have slots up to ``stop``."""
        for group in self._store.groups:
            group.reach(stop)

    def store(self, cache: Cache, *, move: bool = False, row: int | None = None) -> None:
        """Leave keys and values in ``cache`` as plain decoding would have: its layers, its lengths, its windows. All
        sequences must be equally long, or only those of one ``row`` are left there. With ``move`` nothing stays here,
        and buffers go as they are emptied."""
        length = self.base if row is None else self.lengths[row]
        rows = slice(None) if row is None else slice(row, row + 1)
        if move:
            self._store.clear()
        while len(cache.layers) < len(self.layers) and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        for source, layer in zip(self.layers, cache.layers, strict=False):
            if isinstance(source, StateLayer):
                source.leave(layer, rows)
            if not isinstance(source, TreeLayer):
                continue
            if source.is_initialized:
                _leave(source, layer, length, rows, on_host=cache.offloading)
            if move:
                source.places.clear()

    def close(self) -> None:
        """Hold nothing any more."""
        self._store.clear()
        self.layers.clear()
        self.states.clear()


def join(cache: TreeCache, other: TreeCache, most: int) -> None:
    """Copy the sequences of another cache of the same model behind those of ``cache``, ``most`` of them at most."""
    cache._store.widen(other._store.extent)
    here, slots = len(cache.lengths), other.base
    new = slice(here, here + len(other.lengths))
    for group in cache._store.groups:
        group.add_rows(len(other.lengths), most)
        group.reach(slots)
        # What nobody sees has to be finite, because attention multiplies it by 0.
        group.buffer[:, :here, :, cache.base : slots] = 0
        group.buffer[:, new, :, slots : cache.base] = 0
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        if isinstance(ours, StateLayer):
            ours.join(theirs)
        for name, (group, entry) in getattr(ours, "places", {}).items():
            source, place = theirs.places[name]
            group.buffer[entry, new, :, :slots] = source.buffer[place, : len(other.lengths), :, :slots]
    cache.lengths += other.lengths
    cache._store.base = max(cache.lengths)


def repeat(cache: TreeCache, count: int) -> None:
    """Hold the only sequence of a cache ``count`` times."""
    for layer in cache.states:
        layer.pick([0] * count)
    for group in cache._store.groups:
        group.add_rows(count - 1, count)
        group.buffer[:, 1:] = group.buffer[:, :1]
    cache.lengths *= count


def drop(cache: TreeCache, row: int) -> None:
    """Hold a sequence no more; the last one takes its place."""
    for layer in cache.states:
        layer.drop_row(row)
    for group in cache._store.groups:
        group.drop_row(row)
    cache.lengths[row] = cache.lengths[-1]
    del cache.lengths[-1]
    cache._store.base = max(cache.lengths)


def _leave(source: TreeLayer, layer: Any, length: int, rows: slice, *, on_host: bool) -> None:
    """Copy the first ``length`` slots of some rows of a layer into one of transformers' own."""
    assert source.keys is not None and source.values is not None
    first = source.places["key"][0].first
    keys, values = source.keys[rows, :, : length - first], source.values[rows, :, : length - first]
    if not layer.is_initialized:
        layer.lazy_initialization(keys[:, :, :0].to(source.device), values[:, :, :0].to(source.device))
    if isinstance(layer, StaticLayer):
        layer.keys[:, :, :length], layer.values[:, :, :length] = keys, values
        layer.cumulative_length.fill_(length)
        return
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length
        start = max(0, length - layer.sliding_window + 1) - first
        keys, values = keys[:, :, start:], values[:, :, start:]
    place = keys.device if on_host else source.device
    layer.keys, layer.values = keys.to(place, copy=True), values.to(place, copy=True)
    if "index" in source.places:
        group, entry = source.places["index"]
        states = group.buffer[entry, rows, 0, :length]
        layer.lazy_initialization_indexer(states)
        layer.indexer_keys = states.clone()


def empty_cache(traits: ModelTraits, kinds: Sequence[type], *, on_host: bool) -> TreeCache:
    """A cache for tree forwards, whose layers are of ``kinds`` (see :class:`TreeCache`)."""
    count = traits.config.num_hidden_layers
    types = getattr(traits.config, "layer_types", None) or [None] * count
    own = count - (getattr(traits.config, "num_kv_shared_layers", None) or 0)  # the others read another layer's states
    return TreeCache(
        types_with_keys(types[:own], kinds), None if traits.is_encoder_decoder else count, on_host=on_host, kinds=kinds
    )

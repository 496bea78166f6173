"""The KV cache's layers, and the buffer in which layers of one shape lie together."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

Allocate = Callable[[tuple[int, ...], Tensor], Tensor]  # (shape, a tensor of the dtype and device) -> buffer
_GRANULE = 64  # slots; capacities are rounded up to it


def layer_kinds(*names: str) -> tuple[type, ...]:
    """The cache's layers, or mixins of theirs, of these names that this version of transformers has."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


EMPTY_LAYERS = layer_kinds("DummyLayer")  # they never hold anything: their keys are another layer's


def _rounded(slots: int) -> int:
    return -(-slots // _GRANULE) * _GRANULE


class LayerBuffer:
    """All entries of one shape, dtype and device, in one ``buffer`` ``[entry, batch, head, slot, channel]`` that grows.

    Attributes:
        span: first and last-plus-one slot of the pass that the views below are for.
        fresh: for each entry, the slots of the pass; unused with static shapes.
        history: for each entry, all slots up to the pass's last; with static shapes, up to the span's last.
    """

    def __init__(
        self, entries: list[Tensor], capacity: int, allocate: Allocate | None = None, *, pinned: bool = False
    ) -> None:
        first = entries[0]
        batch, heads, length, channels = first.shape
        shape = (len(entries), batch, heads, _rounded(max(capacity, length)), channels)
        self.buffer = first.new_empty(shape, pin_memory=pinned) if allocate is None else allocate(shape, first)
        for slot, entry in enumerate(entries):
            self.buffer[slot, :, :, :length] = entry
        self.span = (0, 0)
        self.fresh: tuple[Tensor, ...] = ()
        self.history: tuple[Tensor, ...] = ()

    def open(self, start: int, stop: int) -> None:
        """Make the views for a pass over slots ``start`` to ``stop``: once for all layers, growing where needed."""
        if self.span == (start, stop):
            return
        capacity = self.buffer.shape[3]
        if stop > capacity:
            self.grow(_rounded(max(stop, 2 * capacity)))
        self.span = (start, stop)
        self.fresh = self.buffer[:, :, :, start:stop].unbind(0)
        self.history = self.buffer[:, :, :, :stop].unbind(0)

    def open_static(self, span: int) -> None:
        """Make the views for passes that read ``span`` slots, wherever they write."""
        if self.span != (-1, span):
            self.span = (-1, span)
            self.fresh = ()
            self.history = self.buffer[:, :, :, :span].unbind(0)

    def grow(self, capacity: int) -> None:
        """Go on in a buffer of ``capacity`` slots, zero past those of the old one."""
        old = self.buffer
        with torch.inference_mode(old.is_inference()):  # a pass in inference mode may be what asks for it
            buffer = old.new_zeros((*old.shape[:3], capacity, old.shape[4]), pin_memory=old.is_pinned())
            buffer[:, :, :, : old.shape[3]] = old
        self.buffer, self.span = buffer, (0, 0)


class Slots(Protocol):
    """What a layer reads from its cache, see :class:`lookahead.runtime.cache.tree.TreeCache`."""

    on_host: bool
    base: int
    slots: Tensor | None


class TreeLayer(DynamicLayer):
    """One layer's keys and values: concatenated while the prompt runs, views into a shared buffer afterwards."""

    def __init__(self, store: Slots) -> None:
        self._own: dict[str, Tensor | None] = {}  # keys and values, until they move into buffers
        super().__init__()
        self._store = store
        self.key_entry: tuple[LayerBuffer, int] | None = None
        self.value_entry: tuple[LayerBuffer, int] | None = None
        self.index_entry: tuple[LayerBuffer, int] | None = None
        self.indexer_keys: Tensor | None = None  # [batch, slot, channel], until they move into a buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a pass's keys and values ``[batch, head, node, channel]``; return all there are now."""
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
        """The same during the prefill of a cache that lies in the host's memory between the layer's turns."""
        self.device = key_states.device
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.to(self.device), self.values.to(self.device)
        keys, values = super().update(key_states, value_states)
        self.keys, self.values = keys.cpu(), values.cpu()
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append a pass's keys ``[batch, node, channel]`` of the indexer; return all there are now."""
        if self.index_entry is None:
            before = [] if self.indexer_keys is None else [self.indexer_keys]
            self.indexer_keys = torch.cat([*before, indexer_key_states], dim=1)
            return self.indexer_keys
        return self._append(self.index_entry, indexer_key_states[:, None])[:, 0]

    def _append(self, place: tuple[LayerBuffer, int], states: Tensor) -> Tensor:
        start = self._store.base
        group, entry = place
        group.open(start, start + states.shape[-2])
        group.fresh[entry].copy_(states)
        return group.history[entry].to(states.device)

    def _states(self, name: str, entry: tuple[LayerBuffer, int] | None) -> Tensor | None:
        return self._own.get(name) if entry is None else entry[0].buffer[entry[1], :, :, : self._store.base]

    @property
    def keys(self) -> Tensor | None:
        """``[batch, head, slot, channel]``; only models that look past :meth:`update` read it (Mllama)."""
        return self._states("keys", self.key_entry)

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._own["keys"] = states

    @property
    def values(self) -> Tensor | None:
        return self._states("values", self.value_entry)

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._own["values"] = states

    def get_seq_length(self) -> int:
        return self._store.base if self.key_entry is not None else super().get_seq_length()

"""The KV cache's layers."""

from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from lookahead.runtime.cache.buffers import Entry, Store

# Layers that never hold anything, as their keys are another layer's; newer versions have some.
EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


class TreeLayer(DynamicLayer):
    """One layer's keys and values: entries of buffers that all layers share.

    Attributes:
        key_entry, value_entry, index_entry: where these and an indexer's keys lie; None = there are none yet.
        length: tokens of the prompt so far.
    """

    def __init__(self, store: Store) -> None:
        self.is_initialized = False  # keys and values lie in buffers, not here
        self._store = store
        self._place = store.layers
        store.layers += 1
        self.length = 0
        self.key_entry: Entry | None = None
        self.value_entry: Entry | None = None
        self.index_entry: Entry | None = None
        self._index_length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find the entries for states like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        alike = 2 if key_states.shape == value_states.shape else 1
        self.key_entry = self._store.place(self._place, "key", key_states, alike)
        self.value_entry = self._store.place(self._place, "value", value_states, alike)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a pass's keys and values ``[batch, head, node, channel]``; return all there are now."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.key_entry is not None and self.value_entry is not None
        store = self._store
        if store.reading:
            self.device = key_states.device
            keys = self._read(self.key_entry, self.length, key_states)
            values = self._read(self.value_entry, self.length, value_states)
            self.length += key_states.shape[-2]
            return keys, values
        if store.slots is not None:
            (group, entry), (value_group, value_entry) = self.key_entry, self.value_entry
            keys, values = group.history[entry], value_group.history[value_entry]
            keys.index_copy_(2, store.slots, key_states)
            values.index_copy_(2, store.slots, value_states)
            return keys, values
        return self._append(self.key_entry, key_states), self._append(self.value_entry, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append a pass's keys ``[batch, node, channel]`` of the indexer; return all there are now."""
        states = indexer_key_states[:, None]
        if self.index_entry is None:
            self.index_entry = self._store.place(self._place, "index", states, 1)
        if self._store.reading:
            keys = self._read(self.index_entry, self._index_length, states)
            self._index_length += states.shape[-2]
            return keys[:, 0]
        return self._append(self.index_entry, states)[:, 0]

    def fill(self, keys: Tensor, values: Tensor, indexer_keys: Tensor | None) -> None:
        """Hold these, and nothing else."""
        self.length = self._index_length = 0
        self.update(keys, values)
        if indexer_keys is not None:
            self.update_indexer(indexer_keys)

    def entries(self) -> list[Entry]:
        """Where its states lie, as far as it has any."""
        return [place for place in (self.key_entry, self.value_entry, self.index_entry) if place is not None]

    def lengths(self) -> set[int]:
        """Number of the prompt's tokens that its entries hold."""
        return {self.length} if self.index_entry is None else {self.length, self._index_length}

    def _read(self, place: Entry, start: int, states: Tensor) -> Tensor:
        group, entry = place
        held = group.write(entry, start, states)
        return states if start == 0 and held.device != states.device else held.to(states.device)

    def _append(self, place: Entry, states: Tensor) -> Tensor:
        start = self._store.base
        group, entry = place
        group.open(start, start + states.shape[-2])
        group.fresh[entry].copy_(states)
        return group.history[entry].to(states.device)

    def _states(self, place: Entry | None) -> Tensor | None:
        if place is None:
            return None
        group, entry = place
        return group.buffer[entry, : group.rows, :, : self.get_seq_length() - group.first]

    @property
    def keys(self) -> Tensor | None:
        """``[batch, head, slot, channel]`` of the slots it holds, for models that look past :meth:`update` (Mllama)."""
        return self._states(self.key_entry)

    @property
    def values(self) -> Tensor | None:
        return self._states(self.value_entry)

    def get_seq_length(self) -> int:
        return self.length if self._store.reading else self._store.base

    def close(self) -> None:
        self.key_entry = self.value_entry = self.index_entry = None

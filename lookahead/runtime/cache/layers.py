"""The KV cache's layers."""

from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from lookahead.runtime.cache.buffers import Entry, Store

# Layers that never hold anything, as their keys are another layer's; newer versions have some.
EMPTY_LAYERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


class TreeLayer(DynamicLayer):
    """One layer's states: entries of buffers that all layers share.

    Attributes:
        places: where its keys, its values and an indexer's keys lie (``"key"``, ``"value"``, ``"index"``).
        read: likewise, how many tokens of the prompt they hold so far.
    """

    def __init__(self, store: Store) -> None:
        self.is_initialized = False  # keys and values lie in buffers, not here
        self._store = store
        self._number = store.layers
        store.layers += 1
        self.places: dict[str, Entry] = {}
        self.read: dict[str, int] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find the entries for states like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        alike = 2 if key_states.shape == value_states.shape else 1
        for name, states in (("key", key_states), ("value", value_states)):
            self.places[name] = self._store.place(self._number, name, states, alike)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a pass's keys and values ``[batch, head, node, channel]``; return all there are now."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put("key", key_states), self._put("value", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append a pass's keys ``[batch, node, channel]`` of the indexer; return all there are now."""
        states = indexer_key_states[:, None]
        if "index" not in self.places:
            self.places["index"] = self._store.place(self._number, "index", states, 1)
        return self._put("index", states)[:, 0]

    def fill(self, keys: Tensor, values: Tensor, indexer_keys: Tensor | None) -> None:
        """Hold these, and nothing else."""
        self.read.clear()
        self.update(keys, values)
        if indexer_keys is not None:
            self.update_indexer(indexer_keys)

    def _put(self, name: str, states: Tensor) -> Tensor:
        """Append some states; all there are now."""
        store, (group, entry) = self._store, self.places[name]
        count = states.shape[-2]
        if store.reading:
            self.device, start = states.device, self.read.get(name, 0)
            held, self.read[name] = group.write(entry, start, states), start + count
            return states if start == 0 and held.device != states.device else held.to(states.device)
        if store.slots is not None:
            return group.history[entry].index_copy_(2, store.slots, states)
        group.open(store.base, store.base + count)
        group.fresh[entry].copy_(states)
        return group.history[entry].to(states.device)

    def _states(self, name: str) -> Tensor | None:
        if name not in self.places:
            return None
        group, entry = self.places[name]
        return group.buffer[entry, : group.rows, :, : self.get_seq_length() - group.first]

    @property
    def keys(self) -> Tensor | None:
        """``[batch, head, slot, channel]`` of the slots it holds, for models that look past :meth:`update` (Mllama)."""
        return self._states("key")

    @property
    def values(self) -> Tensor | None:
        return self._states("value")

    @property
    def holds_all(self) -> bool:
        """Whether keys and values are all that there is of the text, whatever window the layer has."""
        return "index" not in self.places and all(group.window is None for group, _ in self.places.values())

    def get_seq_length(self) -> int:
        return self.read.get("key", 0) if self._store.reading else self._store.base

"""Ways back to a place in a text that a cache of transformers has left, recurrent states included."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

_CUT_LAYERS = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")  # all keys are there: the last can be cut off


def recurrent_layers(cache: Cache) -> list[Any]:
    """The layers of a cache that keep a recurrent or convolution state."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def holds_text(cache: Cache) -> bool:
    """True if a cache of any kind holds a part of a text."""
    layers = getattr(cache, "layers", None)
    if layers and len(recurrent_layers(cache)) == len(layers):  # nothing there counts tokens
        return any(any(layer.has_previous_state.values()) for layer in layers)
    return int(cache.get_seq_length()) > 0


def holds_keys(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and layer.is_initialized and layer.keys is not None and layer.keys.ndim == 4


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The states of a recurrent layer that are there, by name and index."""
    return {
        (name, index): state
        for name in ("conv_states", "recurrent_states")
        for index, state in getattr(layer, name).items()
        if state is not None
    }


def record_past(cache: Cache, on: bool) -> bool:
    """Let a cache that can be cropped keep all of what it is given until it is, or not; returns which."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = on
    return on


class Snapshot:
    """A way back to one place in a text. States are copied, into the memory of the snapshot before; keys are not."""

    def __init__(self, cache: Cache) -> None:
        self._recurrent = recurrent_layers(cache)
        self._attention = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        self._copies: list[dict[tuple[str, int], Tensor]] = [{} for _ in self._recurrent]
        self._flags: list[dict[int, bool]] = [{} for _ in self._recurrent]
        self._fields: list[dict[str, Any]] = []

    def take(self) -> None:
        for place, layer in enumerate(self._recurrent):
            copies = self._copies[place]
            for key, state in states_of(layer).items():
                known = copies.get(key)
                if known is None or known.shape != state.shape:
                    copies[key] = state.clone()
                else:
                    known.copy_(state)
            self._flags[place] = dict(layer.has_previous_state)
        # A layer appends by concatenation, so keys that are noted stay what they are. Only those of sliding windows are
        # noted; others are cut off at their length, so that they are not in memory twice.
        self._fields = [
            {"keys": layer.keys.shape[-2]}
            if type(layer).__name__ in _CUT_LAYERS and holds_keys(layer)
            else _fields(layer)
            for layer in self._attention
        ]

    def restore(self) -> None:
        """Put the cache back; may be done again, until :meth:`take`."""
        for layer, copies, flags in zip(self._recurrent, self._copies, self._flags, strict=True):
            for (name, index), copy in copies.items():
                states = getattr(layer, name)
                if states[index].shape == copy.shape:
                    states[index].copy_(copy)
                else:
                    states[index] = copy.clone()
            layer.has_previous_state.update(flags)
        for layer, fields in zip(self._attention, self._fields, strict=True):
            if isinstance(fields.get("keys"), int):
                length = fields["keys"]
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            else:
                vars(layer).update(fields)


def _fields(layer: Any) -> dict[str, Any]:
    own = ("conv_states", "recurrent_states", "has_previous_state")
    return {name: value for name, value in vars(layer).items() if name not in own}

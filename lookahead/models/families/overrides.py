"""Logical places for models that build position biases themselves, from the cache's slots.

ALiBi adds a bias to every key that grows with the key's place, GPT-Neo cuts its local windows out of a table, and
Llama 4 scales the queries of layers without RoPE by how far the text has come. All count slots, which is right for a
text and wrong for a tree, whose siblings lie in different slots at the same place.
For the duration of a pass their builders are asked for a plain stretch of text, and every slot reads the line of its
own place; so slopes, offsets and roundings stay the model's.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_thread = threading.local()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the nodes and slots of a pass lie in their rows.

    Attributes:
        nodes: ``[batch, node]``, counted in slots from the row's first token.
        slots: ``[batch, slot]``, the same for all slots that the pass reads, the nodes' own last.
        tokens: ``[batch, slot]``, counted in tokens that are not masked.
        high: at least the largest place.
        mask_dtype: of the mask that the prompt was given.
    """

    nodes: Tensor
    slots: Tensor
    tokens: Tensor
    high: int
    mask_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Builder:
    """One thing that counts slots: where it is found, under which name, and what stands in for it during a pass."""

    owner: Any
    name: str
    stand_in: Callable[[Any, Any], Any]


class _RowBias:
    """ALiBi biases with a line for each row, where MPT's attention expects one for all rows: it only adds them."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias  # [batch, head, 1, slot]

    @property
    def shape(self) -> torch.Size:
        return self._bias.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, _: Any) -> "_RowBias":
        return self  # already as long as the keys

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self._bias


class _Table:
    """GPT-Neo's table of what a query may see: sliced by slots outside of a pass, made from places inside."""

    def __init__(self, module: Any, table: Tensor) -> None:
        self._table = table
        self._window: int | None = module.config.window_size if module.attention_type == "local" else None

    def __getitem__(self, index: Any) -> Tensor:
        places = current_places()
        if places is None:
            return self._table[index]
        if self._window is None:
            return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=places.slots.device)
        return (places.nodes[:, None, :, None] - places.slots[:, None, None, :]) < self._window


class _QueryScales:
    """What Llama 4 makes of :class:`_ScaleFactor`: a scale for each node of each row, where it expects one row's."""

    def __init__(self, scales: Tensor) -> None:
        self._scales = scales  # [batch, node]

    def __add__(self, other: float) -> "_QueryScales":
        return _QueryScales(self._scales + other)

    def view(self, *_: Any) -> "_QueryScales":
        return self

    def expand(self, *_: Any) -> Tensor:
        return self._scales[:, :, None, None]


class _ScaleFactor:
    """Llama 4's ``attn_scale``: a number outside of a pass; inside, what it is multiplied with is made from places."""

    def __init__(self, module: Any, factor: float) -> None:
        self._module = module
        self._factor = factor

    def __rmul__(self, logarithms: Tensor) -> Any:
        places = current_places()
        if places is None:
            return logarithms * self._factor
        numbers = places.nodes - places.slots[:, :1]  # the slots that plain decoding would use, padding included
        steps = torch.floor((numbers.to(logarithms.device).float() + 1.0) / self._module.floor_scale)
        return _QueryScales(torch.log1p(steps) * self._factor)


def current_places() -> Any:
    """The places of the pass that this thread is in; None outside of one."""
    return getattr(_thread, "places", None)


def _token_alibi(_: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        places = current_places()
        if places is None:
            return original(attention_mask, num_heads, dtype)
        text = torch.ones((1, places.high + 1), dtype=places.mask_dtype, device=places.tokens.device)
        lines = original(text, num_heads, dtype).reshape(num_heads, -1)
        return lines[:, places.tokens].transpose(0, 1).reshape(-1, 1, places.tokens.shape[1])

    return build_alibi_tensor


def _slot_alibi(_: Any, original: Callable[..., Tensor]) -> Callable[..., Any]:
    def build_mpt_alibi_tensor(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> Any:
        places = current_places()
        if places is None:
            return original(num_heads, sequence_length, *args, **kwargs)
        lines = original(num_heads, places.high + 1, *args, **kwargs).reshape(num_heads, -1)
        return _RowBias(lines[:, places.slots.clamp(min=0)].transpose(0, 1)[:, :, None])

    return build_mpt_alibi_tensor


def bias_builders(model: nn.Module) -> list[Builder]:
    """What counts slots in ``model`` and can be given places instead; empty for most models."""
    found: list[Builder] = []
    for module in model.modules():
        if hasattr(type(module), "build_alibi_tensor"):
            found.append(Builder(module, "build_alibi_tensor", _token_alibi))
        elif hasattr(type(module), "build_mpt_alibi_tensor"):
            found.append(Builder(module, "build_mpt_alibi_tensor", _slot_alibi))
        elif getattr(module, "use_alibi", False) is True:
            home = sys.modules[type(module).__module__]
            if hasattr(home, "build_alibi_tensor"):
                found.append(Builder(home, "build_alibi_tensor", _token_alibi))
        elif type(module).__name__ == "GPTNeoSelfAttention" and "bias" in module._buffers:
            found.append(Builder(module, "bias", _Table))
        elif getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            found.append(Builder(module, "attn_scale", _ScaleFactor))
    return found


@contextmanager
def placed(builders: Sequence[Builder], places: Callable[[], Any]) -> Iterator[None]:
    """Let ``builders`` see ``places()`` in this thread while the block runs; other threads notice nothing."""
    if not builders:
        yield
        return
    before = current_places()
    with ExitStack() as stack:
        for builder in builders:
            stack.enter_context(_replaced(builder))
        _thread.places = places()
        try:
            yield
        finally:
            _thread.places = before


# How many passes of how many threads run over an owner, and what its own dictionary held before.
_users: dict[tuple[int, str], tuple[int, Any]] = {}
_NOTHING = object()


@contextmanager
def _replaced(builder: Builder) -> Iterator[None]:
    """Keep a builder replaced; the last one out restores what was there."""
    owner, name = builder.owner, builder.name
    key, own = (id(owner), name), vars(owner)
    with _lock:
        count, held = _users.get(key, (0, _NOTHING))
        if count == 0:
            held = own.get(name, _NOTHING)
            own[name] = builder.stand_in(owner, getattr(owner, name))  # shadows a method, or a registered buffer
        _users[key] = (count + 1, held)
    try:
        yield
    finally:
        with _lock:
            count, held = _users.pop(key)
            if count > 1:
                _users[key] = (count - 1, held)
            elif held is _NOTHING:
                del own[name]
            else:
                own[name] = held

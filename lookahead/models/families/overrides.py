"""Overrides: attributes of a model's modules that something else stands in for during a pass of ours.

A stand-in reads :func:`current_positions`, which says where the pass's nodes and slots lie. Where there are none it
does what the original does: other threads notice nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_thread = threading.local()
_lock = threading.Lock()
_NOTHING = object()
# How many passes of how many threads override an attribute, and what its owner's own dictionary held before.
_users: dict[tuple[int, str], tuple[int, Any]] = {}


@dataclass(frozen=True, slots=True)
class Override:
    """One attribute to be overridden."""

    owner: Any  # a module of a model, or a file
    name: str
    stand_in: Callable[[Any, Any], Any]  # stand_in(owner, original) makes what takes its place


@dataclass(frozen=True, slots=True)
class PassPositions:
    """Logical positions for modules that count slots, or number tokens from the cache's length on. Padding counts.

    ::

        slot      0  1  2  3  4  5      0 is padding, 1-2 the text, 3-5 a root with two children
        slots     0  1  2  3  4  4      siblings lie in different slots at the same position
    """

    tokens: Tensor  # [batch, node] token ids
    nodes: Tensor  # [batch, node] positions
    slots: Tensor  # [batch, slot] positions of all slots that the pass reads, the nodes' own last
    low: int  # the smallest position of a node
    high: int  # the largest
    counted: Tensor  # [batch, slot], as slots, but counted in tokens that are not masked
    mask_dtype: torch.dtype  # of the mask that the prompt was given


def current_positions() -> Any:
    """Positions of the pass that this thread is in, for overrides; None outside of a pass."""
    return getattr(_thread, "positions", None)


def in_passes(instead: Callable[..., Any]) -> Callable[[Any, Any], Callable[..., Any]]:
    """A stand-in for a function: in a pass ``instead(owner, original, positions, ...)``, elsewhere the original."""

    def stand_in(owner: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def either(*args: Any, **kwargs: Any) -> Any:
            if (positions := current_positions()) is None:
                return original(*args, **kwargs)
            return instead(owner, original, positions, *args, **kwargs)

        return either

    return stand_in


def file_of(module: Any) -> Any:
    """The file that a module's class is defined in."""
    return sys.modules[type(module).__module__]


@contextmanager
def overriding(overrides: Sequence[Override], positions: Callable[[], Any]) -> Iterator[None]:
    """Let ``overrides`` see ``positions()`` in this thread while the block runs."""
    if not overrides:
        yield
        return
    before = current_positions()
    with ExitStack() as stack:
        for override in overrides:
            stack.enter_context(_replaced(override))
        _thread.positions = positions()
        try:
            yield
        finally:
            _thread.positions = before


@contextmanager
def _replaced(override: Override) -> Iterator[None]:
    """Keep an attribute replaced; the last one out restores what was there."""
    owner, name = override.owner, override.name
    key, own = (id(owner), name), vars(owner)
    with _lock:
        count, held = _users.get(key, (0, _NOTHING))
        if count == 0:
            held = own.get(name, _NOTHING)
            own[name] = override.stand_in(owner, getattr(owner, name))  # shadows a method, or a registered buffer
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

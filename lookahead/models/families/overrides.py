"""Overrides: attributes of a model's modules that something else stands in for during a pass of ours.

A stand-in that finds no :func:`current_positions` does what the original does: other threads notice nothing.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

_thread = threading.local()
_lock = threading.Lock()
_NOTHING = object()
# How many passes of how many threads override an attribute, and what its owner's own dictionary held before.
_users: dict[tuple[int, str], tuple[int, Any]] = {}


@dataclass(frozen=True, slots=True)
class Override:
    """One attribute to be overridden.

    Attributes:
        owner: a module of a model, or a file.
        name: of the attribute.
        stand_in: ``stand_in(owner, original)`` makes what takes its place.
        told: the class of the positions that it understands, see `positions`.
    """

    owner: Any
    name: str
    stand_in: Callable[[Any, Any], Any]
    told: type | None = None


def current_positions() -> Any:
    """What the pass that this thread is in tells overrides; None outside of a pass."""
    return getattr(_thread, "positions", None)


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

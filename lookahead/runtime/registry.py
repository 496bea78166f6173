"""What holds while decodes of ours run: wrapped functions that transformers looks up by name, a thread's pass."""

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Wrapped:
    """One function of a registry, called as ``call(original, *args, **kwargs)`` while it is ``on``.

    The wrapper is always the same object and calls the original where a model is compiled meanwhile: a model that is
    compiled elsewhere meets it once and needs no second compilation.
    """

    def __init__(self, registry: MutableMapping[str, Any], name: str, call: Callable[..., Any]) -> None:
        self._registry = registry
        self._name = name
        self._lock = threading.Lock()
        self._users = 0
        self._original: Any = None

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._original(*args, **kwargs)
            return call(self._original, *args, **kwargs)

        self._wrapper: Any = wrapper

    @contextmanager
    def on(self) -> Iterator[None]:
        """Keep the wrapper registered while the block runs; the last one out restores what was there."""
        with self._lock:
            if self._registry[self._name] is not self._wrapper:
                self._original = self._wrapper.lookahead_original = self._registry[self._name]
                self._registry[self._name] = self._wrapper
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._registry[self._name] is self._wrapper:
                    self._registry[self._name] = self._original


class _Pass(threading.local):
    in_tree = False  # it is a tree forward
    planned = False  # of which many have the same shapes
    width: int | None = None  # nodes a sequence, behind a prompt; None = there is no such pass
    masks: dict[tuple[int, int, int], Any] | None = None  # with packed rows, for all layers
    packed: bool | None = None  # query heads are packed; None = where that pays
    masked = True  # masks are heeded: a pass without one may have to be given one that hides nothing
    sequences: Tensor | None = None  # where tokens lie, for sums in the order of the text; None = torch's kernels add
    turns: Sequence[Any] | None = None  # of the nodes that are attended to one by one; None = there are none


this_pass = _Pass()  # what this thread's pass is told


class During:
    """Tells this thread's pass other ``values`` while the block runs; afterwards they are what they were. A class,
    because it is entered in every pass."""

    __slots__ = ("_before", "_values")

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __enter__(self) -> None:
        own = vars(this_pass)
        self._before = {name: own[name] for name in self._values if name in own}
        own.update(self._values)

    def __exit__(self, *_: object) -> None:
        own = vars(this_pass)
        for name in self._values:
            del own[name]
        own.update(self._before)

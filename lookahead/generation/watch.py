"""Watching a decode pass by pass: who drafted what, what was accepted, what it took.

:func:`watching` sets a context variable, so it reaches every call of the thread or task that it surrounds, and no
other. Where nobody watches, a call asks once and makes no records.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import nan
from typing import Any

from jacobi import LookaheadError, Path, Step, TokenTree


@dataclass(frozen=True, slots=True)
class RowPass:
    """What one pass did for one sequence. All of it is empty for a sequence that had ended before.

    The prompt ended with *the*; *cat* and *dog* were drafted for what follows, *sat* below *cat*, and the model wrote
    *cat*, *sat*, *on*::

        the 1.0 -+- cat 0.6 -- sat 0.5        tokens    the   cat    dog    sat
                 +- dog 0.3                   parents    -1     0      0      1
                                              sources    ""  "pool" "pool" "suffix"
                                              chances   1.0   0.6    0.3    0.5
                                              accepted  0, 1, 3        written  cat sat on

    Attributes:
        tokens: of the tree, the root first; the prompt's pass has the prompt's last token alone.
        parents: node indices; the root's is -1.
        sources: who proposed each node, as in ``stats.sources``; empty for the root, and where no name is known.
        chances: that the node is visited, as estimated before the pass; the root's is 1, NaN = nothing was estimated.
        accepted: indices of the visited nodes, root first.
        written: token ids that the pass added to the text; all but the last were drafted.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    chances: tuple[float, ...] = ()
    accepted: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a call: ``index`` 0 is the prompt's, ``rows`` has one entry a sequence, times in ms."""

    index: int
    rows: tuple[RowPass, ...]
    draft_ms: float
    forward_ms: float
    verify_ms: float
    keep_ms: float

    @property
    def ms(self) -> float:
        """All of the pass."""
        return self.draft_ms + self.forward_ms + self.verify_ms + self.keep_ms


Watcher = Callable[[Pass], object]
_watcher: ContextVar[Watcher | None] = ContextVar("lookahead_watcher", default=None)


@contextmanager
def watching(callback: Watcher) -> Iterator[None]:
    """Call ``callback`` with a :class:`Pass` for every forward pass of the lookahead calls inside the block::

        passes = []
        with lookahead.watching(passes.append):
            model.generate(**inputs, use_lookahead=True)
        drafted = sum(len(row.written) - 1 for each in passes for row in each.rows if row.written)

    The callback runs in the thread of the call, when the pass's tokens are decided and before a streamer gets them (but
    for streamers that may draw random numbers, which get sampled tokens one by one: ``docs/sampling.md``). What it
    raises ends the call, like an exception of a streamer. A block inside another one takes its place. Calls that
    transformers' own loop decodes (``stats.plain`` says why) are not watched.

    Raises:
        LookaheadError: the callback cannot be called.
    """
    if not callable(callback):
        raise LookaheadError(f"watching() needs a function of one Pass: got {type(callback).__name__}.")
    token = _watcher.set(callback)
    try:
        yield
    finally:
        _watcher.reset(token)


def record(index: int, drafters: Sequence[Any], step: Step, written: Sequence[Sequence[int]]) -> Pass:
    """The record of a pass, which wrote so much for each sequence."""
    pairs = zip(drafters, step.trees, step.paths, written, strict=True)
    rows = tuple(_row(*each, first=not index) for each in pairs)
    return Pass(index, rows, step.draft_ms, step.forward_ms, step.verify_ms, step.keep_ms)


def watcher() -> Watcher | None:
    """Who watches the calls that begin here; None = nobody."""
    return _watcher.get()


def _row(drafter: Any, tree: TokenTree, path: Path, written: Sequence[int], *, first: bool) -> RowPass:
    if not written:
        return RowPass()
    sources, chances = [""] * len(tree), [nan] * len(tree)
    if not first and hasattr(drafter, "told"):  # it knows who proposed each node of its last tree
        told, known = drafter.told(tree)
        sources[: len(told)], chances[: len(known)] = told, known
    chances[0] = 1.0
    return RowPass(
        tuple(tree.tokens), tuple(tree.parents), tuple(sources), tuple(chances), tuple(path.nodes), tuple(written)
    )

"""Batch sources in a tree that grows node by node: one call makes the candidates of a whole level."""

from collections.abc import Iterable, Sequence
from typing import Any

from lookahead.sources.base import BatchSource, Candidate


class Frontier:
    """A batch source that is asked like any other, but has made candidates before they are asked for.

    When node ``a`` is taken first of its level, the source is asked for all that wait beside it, best first::

        0.9 a   <- taken      expand([a, b, c])
        0.6 b   <- waits      b and c are served from the same answer,
        0.2 c   <- waits      if they are taken at all

    Args:
        source: the batch source.

    Attributes:
        made: the candidates of this pass's tree, by state.
    """

    def __init__(self, source: BatchSource) -> None:
        self.made: dict[Any, Sequence[Candidate]] = {}
        self.step = source.step
        self._source = source

    def root(self) -> Any:
        """The state at the last written token, where a new tree begins."""
        self.made.clear()
        return self._source.root()

    def expand(self, states: Iterable[Any]) -> None:
        """Make the candidates of these states, where they are not made yet."""
        asked = [state for state in dict.fromkeys(states) if state not in self.made]
        self.made.update(zip(asked, self._source.expand(asked), strict=True))

    def propose(self, state: Any) -> Sequence[Candidate]:
        """The candidates of a state."""
        return self.made[state]

"""What trees ask of batch sources while they grow: the nodes of a level together, and those of several sequences."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from lookahead.sources.base import BatchSource, Candidate

Grown = TypeVar("Grown")


class Frontier:
    """A batch source that is asked like any other, but has made candidates before they are asked for.

    When node ``a`` is taken first of its level, the source is asked for all that wait beside it, best first::

        0.9 a   <- taken      expand([a, b, c])
        0.6 b   <- waits      b and c are served from the same answer,
        0.2 c   <- waits      if they are taken at all

    If asking takes time, as a pass of a draft model does, those that wait have to be worth it together.
    """

    def __init__(self, source: BatchSource) -> None:
        self.made: dict[Any, Sequence[Candidate]] = {}  # of this pass's tree, by state; nothing where none is asked for
        self.step = source.step
        self.source = source

    def root(self) -> Any:
        self.made.clear()
        return self.source.root()

    @property
    def ask_ms(self) -> float:
        """What asking takes, as far as the source knows."""
        return getattr(self.source, "ask_ms", 0.0)

    def propose(self, state: Any) -> Sequence[Candidate]:
        return self.made.get(state, ())


class Ask(NamedTuple):
    """What a tree waits for: a frontier's answer about states that it has not been asked about, each once."""

    frontier: Frontier
    states: Sequence[Any]


Growth = Generator[Ask, None, Grown]  # grows something, and waits now and then until it is answered


def grown(growth: Growth[Grown]) -> Grown:
    """What grows, with an answer to each of its questions."""
    (found,) = grown_together([growth])
    return found


def grown_together(growths: Sequence[Growth[Grown]]) -> list[Grown]:
    """What several grow. They go from question to question in step, so that all are answered at once::

    first sequence    asks a level    asks a level    is done
    second sequence   asks a level    is done
    passes            one             one
    """
    found: dict[int, Grown] = {}
    while len(found) < len(growths):
        asks = []
        for place, growth in enumerate(growths):
            if place not in found:
                try:
                    asks.append(next(growth))
                except StopIteration as end:
                    found[place] = end.value
        _answer(asks)
    return [found[place] for place in range(len(growths))]


def _answer(asks: Sequence[Ask]) -> None:
    shared: dict[Any, list[Ask]] = {}
    for ask in asks:
        shared.setdefault(getattr(ask.frontier.source, "together", None) or id(ask.frontier), []).append(ask)
    for together, each in shared.items():
        requests = [(ask.frontier.source, ask.states) for ask in each]
        answers = together(requests) if callable(together) else [source.expand(states) for source, states in requests]
        for ask, answer in zip(each, answers, strict=True):
            ask.frontier.made.update(zip(ask.states, answer, strict=True))

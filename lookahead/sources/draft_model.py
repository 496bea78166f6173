"""A draft model or a head as a source: it says what may follow at all nodes that wait, in one pass a level."""

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from time import perf_counter
from typing import Protocol

import numpy as np

from jacobi import Path, Successors, TokenTree
from lookahead.sources.base import Together
from lookahead.sources.perturbed import BINS, Draw, Offer

Branch = tuple[int, ...]  # tokens below the root
Said = tuple[np.ndarray, np.ndarray]  # the best next tokens [rank] and their logits [rank], best first

BEST = 64  # next tokens that are looked at
# Shares that were right with disturbed copies of the bundled model (argmaxes alike in 60 to 90 % of all places), by
# bin: of the best candidate, and of others.
GREEDY_PRIORS = (
    *(0.02, 0.03, 0.06, 0.11, 0.18, 0.43, 0.65, 0.84, 0.88, 0.95, 0.98, 0.99),
    *(0.01, 0.015, 0.02, 0.05, 0.15, 0.26, 0.41, 0.5, 0.6, 0.7, 0.8, 0.9),
)
DRAWN_PRIORS = (
    *(0.01, 0.02, 0.03, 0.05, 0.11, 0.22, 0.4, 0.61, 0.75, 0.85, 0.91, 0.97),
    *(0.01, 0.015, 0.025, 0.05, 0.1, 0.21, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
)
_RUNS = 9  # the last ones, of which the middle one counts


class Passes(Protocol):
    """What drafts for one sequence: a model, or a head."""

    def start(self, prompt: Sequence[int]) -> None:
        """Take in the prompt, once."""

    def write(self, path: Path) -> None:
        """The text goes on along a path of the last pass."""

    def after(self, branches: Sequence[Branch]) -> Sequence[Said | None]:
        """What may follow each branch; None where nothing can be said."""


class DraftModelSource:
    """Proposes what a draft model or a head says, under the noise of ``draw`` where tokens are drawn. A state is the
    branch of a node; a candidate's kind tells whether it is the best one, and the bin of its share."""

    def __init__(self, passes: Passes, draw: Draw | None, name: str = "draft") -> None:
        self.name = name
        self.priors = GREEDY_PRIORS if draw is None else DRAWN_PRIORS
        self.spent_ms = 0.0
        self._time = UsualTime()  # of a pass
        self.passes = passes
        self._draw = Draw(lambda index: None) if draw is None else draw
        self._index = 0  # of the next token

    @property
    def ask_ms(self) -> float:
        """What a pass takes."""
        return self._time.ms

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self.passes.start(prompt)

    def root(self) -> Branch:
        return ()

    def step(self, state: Branch, token: int) -> Branch:
        return (*state, token)

    def propose(self, state: Branch) -> Offer:
        return self.expand([state])[0]

    def expand(self, states: Sequence[Branch]) -> list[Offer]:
        start = perf_counter()
        return self.offers(states, self.passes.after(states), 1e3 * (perf_counter() - start))

    @property
    def together(self) -> Together | None:
        """Asks for several sequences in one pass; None where each has passes of its own."""
        return getattr(self.passes, "together", None)

    def offers(self, states: Sequence[Branch], said: Sequence[Said | None], ms: float, sharers: int = 1) -> list[Offer]:
        """Candidates by what was ``said`` after branches, in a pass of ``ms`` for so many ``sharers``."""
        self.spent_ms += ms / sharers
        self._time.observe(ms)
        return [self._offer(state, each) for state, each in zip(states, said, strict=True)]

    def _offer(self, state: Branch, said: Said | None) -> Offer:
        if said is None or not len(said[1]):
            return []
        tokens, logits = said
        best = self._draw.best(tokens, self._draw.chances(logits), self._draw.line(self._index + len(state)))
        return [(token, BINS * (rank > 0) + level) for rank, (token, level) in enumerate(best)]

    def rollback(self, path: Path) -> None:
        """Nothing: which branches stay is known by the tokens that were written."""

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._index += len(path.tokens)
        self.passes.write(path)


class UsualTime:
    """Milliseconds of a run: the middle one of the last, the faster of two; 0 = none was."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._runs: deque[float] = deque(maxlen=_RUNS)

    def observe(self, ms: float) -> None:
        """Take in a run; one of no time was none."""
        if ms > 0.0:
            self._runs.append(ms)
            self.ms = median_low(self._runs)

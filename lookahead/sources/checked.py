"""Sources of the caller's own, checked: what they say goes into trees, and from there into the model."""

from collections.abc import Sequence
from operator import index
from typing import Any

from jacobi import LookaheadError
from lookahead.sources.base import Candidate

_METHODS = ("start", "root", "step", "propose", "learn")


class CheckedSource:
    """A source that says by name what is wrong with another one's candidates, and otherwise is that one. Its candidates
    have to be pairs of a token of the vocabulary, below ``vocab_size``, and a kind that has a prior."""

    def __init__(self, source: Any, vocab_size: int) -> None:
        missing = [name for name in _METHODS if not callable(getattr(source, name, None))]
        missing += [name for name in ("name", "priors") if not hasattr(source, name)]
        if callable(getattr(source, "expand", None)):
            missing += [] if callable(getattr(source, "rollback", None)) else ["rollback"]
            self.expand = self._expand
        if missing:
            raise LookaheadError(
                f"{type(source).__name__} is no source of candidates: it has no {', '.join(missing)}. Expected what "
                "lookahead.sources.Source lists; examples/own_source.py has one."
            )
        self._title = f"Source {source.name!r}"
        try:
            priors = tuple(float(prior) for prior in source.priors)
        except (TypeError, ValueError):
            priors = ()
        if not priors:
            raise LookaheadError(
                f"{self._title} has the priors {source.priors!r}: expected a number between 0 and 1 for each "
                "kind of candidate."
            )
        if bad := [prior for prior in priors if not 0.0 < prior < 1.0]:
            raise LookaheadError(f"{self._title} has the prior {bad[0]}: expected a share above 0 and below 1.")
        self.name, self.priors = source.name, priors
        self.start, self.root, self.step, self.learn = source.start, source.root, source.step, source.learn
        self._source = source
        self._vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy is asked for some before it has anything
            raise AttributeError(name)
        return getattr(self._source, name)

    def propose(self, state: Any) -> Sequence[Candidate]:
        return self._checked(self._source.propose(state))

    def _expand(self, states: Sequence[Any]) -> Sequence[Sequence[Candidate]]:
        given = self._source.expand(states)
        if not isinstance(given, Sequence) or len(given) != len(states):
            raise LookaheadError(
                f"{self._title} expanded {len(states)} states to {given!r}: expected candidates for each."
            )
        return [self._checked(candidates) for candidates in given]

    def _checked(self, given: Any) -> Sequence[Candidate]:
        try:
            candidates: list[Any] = [(index(token), index(kind), *map(float, more)) for token, kind, *more in given]
        except (TypeError, ValueError) as error:
            raise LookaheadError(
                f"{self._title} proposed {given!r}: expected pairs (token, kind) of integers, or none."
            ) from error
        lengths = set(map(len, candidates))
        if lengths - {2, 3} or len(lengths) > 1 or any(not 0.0 <= more[0] <= 1.0 for _, _, *more in candidates if more):
            raise LookaheadError(
                f"{self._title} proposed {given!r}: expected pairs (token, kind), or for all of them a third item, the "
                "probability that the source gives the token."
            )
        last = len(self.priors) - 1
        for token, kind, *_ in candidates:
            if not 0 <= token < self._vocab_size:
                raise LookaheadError(f"{self._title} proposed token {token}: expected 0 to {self._vocab_size - 1}.")
            if not 0 <= kind <= last:
                raise LookaheadError(f"{self._title} proposed a candidate of kind {kind}: its priors know 0 to {last}.")
        return candidates

"""Sources of the caller's own, checked: what they say goes into trees, and from there into the model."""

from collections.abc import Sequence
from operator import index
from typing import Any

from jacobi import LookaheadError
from lookahead.sources.base import Source

_METHODS = ("start", "root", "step", "propose", "learn")


class CheckedSource:
    """A source that says by name what is wrong with another one's candidates, and otherwise is that one.

    Args:
        source: of the caller's own.
        vocab_size: tokens that the model can be fed.

    Raises:
        LookaheadError: it is no :class:`lookahead.sources.Source`; and from :meth:`propose`, its candidates are not
            pairs of a token of the vocabulary and a kind that has a prior.
    """

    def __init__(self, source: Any, vocab_size: int) -> None:
        missing = [name for name in _METHODS if not callable(getattr(source, name, None))]
        missing += [name for name in ("name", "priors") if not hasattr(source, name)]
        if missing:
            raise LookaheadError(
                f"{type(source).__name__} is no source of candidates: it has no {', '.join(missing)}. Expected what "
                "lookahead.sources.Source lists; examples/own_source.py has one."
            )
        try:
            priors = tuple(float(prior) for prior in source.priors)
        except (TypeError, ValueError):
            priors = ()
        if not priors:
            raise LookaheadError(
                f"Source {source.name!r} has the priors {source.priors!r}: expected a number between 0 and 1 for each "
                "kind of candidate."
            )
        for prior in priors:
            if not 0.0 < prior < 1.0:
                raise LookaheadError(
                    f"Source {source.name!r} has the prior {prior}: expected a share above 0 and below 1."
                )
        self.name = source.name
        self.priors = priors
        self.start, self.root, self.step, self.learn = source.start, source.root, source.step, source.learn
        self._source: Source = source
        self._vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy is asked for some before it has anything
            raise AttributeError(name)
        return getattr(self._source, name)

    def propose(self, state: Any) -> Sequence[tuple[int, int]]:
        """The source's candidates, see :meth:`lookahead.sources.Source.propose`."""
        given = self._source.propose(state)
        try:
            candidates = [(index(token), index(kind)) for token, kind in given]
        except (TypeError, ValueError) as error:
            raise LookaheadError(
                f"Source {self.name!r} proposed {given!r}: expected pairs (token, kind) of integers, or none."
            ) from error
        for token, kind in candidates:
            if not 0 <= token < self._vocab_size:
                raise LookaheadError(
                    f"Source {self.name!r} proposed token {token}: expected 0 to {self._vocab_size - 1}."
                )
            if not 0 <= kind < len(self.priors):
                raise LookaheadError(
                    f"Source {self.name!r} proposed a candidate of kind {kind}: its priors know 0 to "
                    f"{len(self.priors) - 1}."
                )
        return candidates

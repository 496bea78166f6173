"""What a source of candidates is; and sources of the caller's own, checked: what they say goes into the model."""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Protocol, TypeGuard

from jacobi import LookaheadError, Path, Successors, TokenTree

_METHODS = ("start", "root", "step", "propose", "learn")
RANKS = 3  # of candidates that are told apart: a node's first, its second, all later ones

# A token, its kind, and (for all candidates of a node or for none) the probability that the source itself gives it.
Candidate = tuple[int, int] | tuple[int, int, float]


class Source(Protocol):
    """Proposes tokens for the nodes of one sequence's draft.

    A source says where in the text a node stands by a *state* of its own making: :meth:`root` gives it for the last
    written token, :meth:`step` for the child that holds a token. For a source that goes by the last two tokens::

        text  ... the cat      root()              ("the", "cat")
        draft sat              step(state, "sat")  ("cat", "sat")

    Candidates come with a *kind*, a small integer. How often candidates of a kind turn out right is learnt while
    decoding, so a source only says what tells its better candidates from its worse ones. One that samples them also
    gives the probability with which it drew each (the q of Leviathan et al., arXiv 2211.17192); best-first growth
    leaves it aside. Where several propose the same token, the first in the strategy's order is credited.

    A source whose candidates cost time to make (it runs heads, or a model) has one more attribute, ``spent_ms``: the
    milliseconds they have taken so far. The automatic mode then asks it only where that pays. If it can make candidates
    for many nodes at once, it is a :class:`BatchSource`. One that comes first, and knows which candidates may follow
    where it was asked last, says so by a method ``allowed``. Plain class attributes do for ``name`` and ``priors``.
    """

    @property
    def name(self) -> str:
        """What statistics call it."""

    @property
    def priors(self) -> Sequence[float]:
        """For each kind of candidate, the share expected to be right before anything is learnt, in (0, 1)."""

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Take in the sequence's prompt, once: its tokens without padding, maybe none.

        ``successors`` are the model's best next tokens at the last ``len(successors.tokens)`` tokens, if gathered.
        """

    def root(self) -> Any:
        """The state at the last written token."""

    def step(self, state: Any, token: int) -> Any:
        """The state one token further on; ``state`` itself is not changed, siblings step from it too."""

    def propose(self, state: Any) -> Sequence[Candidate]:
        """Candidates for the next token, best first; each token at most once."""

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        """Take in a pass: ``tree`` was scored, and ``path.tokens`` were written, so they now follow the text.

        ``successors`` are the model's best next tokens at every node of ``tree``, if gathered.
        """


# Asks sources of several sequences at once: each of them and its states; gives what their ``expand`` would give.
Together = Callable[[Sequence[tuple[Any, Sequence[Any]]]], Sequence[Sequence[Sequence[Candidate]]]]


class BatchSource(Source, Protocol):
    """A source that makes the candidates of many nodes at once, as a draft model does in one forward pass of its own.

    Best-first growth asks it by :meth:`expand`, once for all nodes that wait on a level, and may never take some of
    them. Its states are hashable, and equal states have the same candidates. If every call takes time, an attribute
    ``ask_ms`` says how many milliseconds: deeper levels are then asked about only where that pays. If one call could do
    for several sequences, an attribute ``together`` makes it; sources with an equal one are asked by that.
    """

    def expand(self, states: Sequence[Any]) -> Sequence[Sequence[Candidate]]:
        """For each state what :meth:`propose` gives for it, in their order."""

    def rollback(self, path: Path) -> None:
        """Forget all nodes of the scored tree but those of ``path``; called after every pass, before :meth:`learn`."""


def is_batch(source: Source) -> TypeGuard[BatchSource]:
    """Whether a source makes candidates of many nodes at once."""
    return hasattr(source, "expand")


def is_expensive(source: Any) -> bool:
    """Whether a source's candidates cost time to make."""
    return hasattr(source, "spent_ms")


def runs_a_model(source: Source) -> bool:
    """Whether a source says what asking it takes: it runs a model, or a head, for every level of a tree."""
    return hasattr(source, "ask_ms")


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
            told = f"{self._title} has the priors {source.priors!r}"
            raise LookaheadError(f"{told}: expected a number between 0 and 1 for each kind of candidate.")
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

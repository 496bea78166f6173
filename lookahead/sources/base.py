"""What a source of candidates is."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

from jacobi import Path, Successors, TokenTree

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
    for many nodes at once, it is a :class:`BatchSource`. Plain class attributes do for ``name`` and ``priors``.
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


def runs_a_model(source: Source) -> bool:
    """Whether a source says what asking it takes: it runs a model, or a head, for every level of a tree."""
    return hasattr(source, "ask_ms")

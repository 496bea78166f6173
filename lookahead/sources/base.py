"""What a source of candidates is."""

from collections.abc import Sequence
from typing import Any, Protocol

from jacobi import Path, Successors, TokenTree


class Source(Protocol):
    """Proposes tokens for the nodes of one row's draft.

    A source says where in the text a node stands by a *state* of its own making: :meth:`root` gives it for the last
    written token, :meth:`step` for the child that holds a token. Candidates come with a *kind*, a small integer. How
    often candidates of a kind turn out right is learnt while decoding (`lookahead.draft.acceptance.Acceptance`), so a
    source need not know how good it is, only what tells its better candidates from its worse ones.

    A source may have any number of candidates for a node that another source has too: the first source in the
    strategy's order is credited, and agreement is part of what is learnt.
    Plain class attributes do for ``name`` and ``priors``.

    A source whose candidates cost time to make (it runs heads, or a model) says so by one more attribute, ``spent_ms``:
    the milliseconds it has taken for them so far, in all. The automatic mode then asks it only where that pays (see
    :mod:`lookahead.draft.expensive_sources`).
    """

    @property
    def name(self) -> str:
        """What statistics call it."""

    @property
    def priors(self) -> Sequence[float]:
        """For each kind of candidate, the share expected to be right before anything is learnt, in (0, 1)."""

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Take in the row's prompt, once.

        Args:
            prompt: the row's tokens, padding left out; may be empty.
            successors: the model's best next tokens at the last ``len(successors.tokens)`` tokens of the prompt; None
                where they were not gathered.
        """

    def root(self) -> Any:
        """The state at the last written token."""

    def step(self, state: Any, token: int) -> Any:
        """The state one token further on; ``state`` itself is not changed, siblings step from it too."""

    def propose(self, state: Any) -> Sequence[tuple[int, int]]:
        """Candidates for the next token as (token, kind), best first; each token at most once."""

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        """Take in a pass.

        Args:
            tree: what was scored.
            path: what was written: ``path.tokens`` now follow the text.
            successors: the model's best next tokens at every node of ``tree``; None where they were not gathered.
        """

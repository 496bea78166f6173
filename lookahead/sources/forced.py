"""What a grammar forces: tokens that no text of it can do without at a place."""

from collections.abc import Sequence
from typing import Any

from jacobi import Path, Successors, TokenTree
from lookahead.sources.base import Candidate


class Place:
    """A place in a draft: ``taken`` since the ``matcher``'s; and candidates of this and the next tokens, once asked."""

    __slots__ = ("ahead", "matcher", "taken")

    def __init__(self, matcher: Any, taken: tuple[int, ...] = (), ahead: list[Candidate] | None = None) -> None:
        self.matcher, self.taken, self.ahead = matcher, taken, ahead


class ForcedSource:
    """Candidates that a grammar leaves no choice about, at the keys of objects for example::

        schema   {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, ...}
        text     {"name": "Ann
        draft    ", then "age":       nothing is drafted in the middle of a string; a draft that ends it is gone on with

    Args:
        matcher: of llguidance, at the beginning of the grammar; it is moved along with the text.
        tokenizer: of llguidance.
    """

    name = "grammar"
    # Kind 0: the only token that may follow. Kind 1: a token of bytes that must follow, which longer ones hold, too.
    priors = (0.999, 0.8)

    def __init__(self, matcher: Any, tokenizer: Any) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Nothing: the grammar is one of what is written."""

    def root(self) -> Place:
        return Place(self._matcher)

    def step(self, state: Place, token: int) -> Place:
        ahead = state.ahead[1:] if state.ahead and state.ahead[0][0] == token else None
        return Place(state.matcher, (*state.taken, token), ahead or None)

    def propose(self, state: Place) -> list[Candidate]:
        if state.ahead is None:
            state.ahead = self._ahead(state)
        return state.ahead[:1]

    def _ahead(self, state: Place) -> list[Candidate]:
        if state.taken:
            taken, state.taken, state.matcher = state.taken, (), state.matcher.deep_copy()
            if state.matcher.try_consume_tokens(list(taken)) < len(taken):  # nothing of the grammar
                state.taken = taken
                return []
        if forced := state.matcher.compute_ff_tokens():
            return [(token, 0) for token in forced]
        if state.matcher.is_stopped():
            return [(self._tokenizer.eos_token, 0)]
        return [(token, 1) for token in self._tokenizer.tokenize_bytes(state.matcher.compute_ff_bytes())]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._matcher.try_consume_tokens(path.tokens)

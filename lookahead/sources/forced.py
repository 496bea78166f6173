"""What a grammar forces: tokens that no text of it can do without at a place."""

from collections.abc import Sequence
from typing import Any

from jacobi import Path, Successors, TokenTree
from lookahead.sources.base import Candidate


class GrammarPlace:
    """A place in a draft, by tokens ``taken`` since the ``matcher``'s; what may follow is ``ahead``, once asked."""

    __slots__ = ("ahead", "matcher", "taken")

    def __init__(self, matcher: Any, taken: tuple[int, ...] = (), ahead: list[Candidate] | None = None) -> None:
        self.matcher, self.taken, self.ahead = matcher, taken, ahead


class ForcedSource:
    """Candidates that a grammar leaves no choice about, at the keys of objects for example; and which of other sources'
    candidates it allows::

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
        self._asked = self.root()

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Nothing: the grammar is one of what is written."""

    def root(self) -> GrammarPlace:
        return GrammarPlace(self._matcher)

    def step(self, state: GrammarPlace, token: int) -> GrammarPlace:
        ahead = state.ahead[1:] if state.ahead and state.ahead[0] == (token, 0) else None
        return GrammarPlace(state.matcher, (*state.taken, token), ahead or None)

    def propose(self, state: GrammarPlace) -> list[Candidate]:
        if state.ahead is None:
            state.ahead = self._ahead(state)
        self._asked = state
        return state.ahead[:1]

    def allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that may follow where it was asked last."""
        state = self._asked
        if state.taken:  # what was forced on the way here goes on, or nothing of the grammar does
            only = [candidate[0] for candidate in (state.ahead or ())[:1]]
        elif state.matcher.is_stopped():
            only = self._tokenizer.eos_tokens
        else:
            return [candidate for candidate in candidates if state.matcher.validate_tokens(candidate[:1])]
        return [candidate for candidate in candidates if candidate[0] in only]

    def _ahead(self, state: GrammarPlace) -> list[Candidate]:
        if state.taken:
            taken, state.taken, state.matcher = state.taken, (), state.matcher.deep_copy()
            if state.matcher.try_consume_tokens(list(taken)) < len(taken):  # nothing of the grammar
                state.taken = taken
                return []
        if forced := state.matcher.compute_ff_tokens():
            return [(token, 0) for token in forced]
        if state.matcher.is_stopped():
            ends = self._tokenizer.eos_tokens
            return [(token, int(len(ends) > 1)) for token in ends]
        return [(token, 1) for token in self._tokenizer.tokenize_bytes(state.matcher.compute_ff_bytes())]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._matcher.try_consume_tokens(path.tokens)

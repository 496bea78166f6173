"""Texts that the caller expects the model to repeat, wholly or in parts: the old version of a file that is edited, a
document that is quoted, the likely answer (the ``prediction`` of OpenAI's interface)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead.sources.successor_table import BEFORE
from lookahead.sources.suffix import SuffixAutomaton, SuffixSource

References = tuple[tuple[int, ...], ...]

_CERTAIN = 3  # tokens of the prompt's end that a reference must hold for the text to begin in its middle
_LOOKS_BACK = 64  # tokens of the prompt that are looked for in a reference
_PRIORS = (0.50, 0.75, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985)  # by match length, as in SuffixSource


def references_of(given: Any) -> References:
    """Token ids of reference texts as tuples; a LookaheadError for anything but sequences of whole numbers from 0."""
    expected = "a sequence of texts, each a sequence of token ids or a 1-D integer tensor"
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise LookaheadError(f"references must be {expected}: got {given!r:.80}.")
    texts = [text.tolist() if hasattr(text, "tolist") else text for text in given]
    for text in texts:
        tokens = text if isinstance(text, list | tuple) else [None]
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise LookaheadError(f"references must be {expected}: got a text of {text!r:.80}. Tokenize it first.")
    return tuple(tuple(text) for text in texts if text)


@lru_cache(maxsize=8)
def _automaton(references: References) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in references:
        automaton.append(BEFORE)
        for token in text:
            automaton.append(token)
    return automaton


class ReferenceSource(SuffixSource):
    """Candidates from where the text stands in a reference: at its beginning first, then after the longest match.

    ::

        reference   def add(a, b): return a + b
        text        def add(a, b): "sum"            no match: nothing is drafted
                    ... return                      matches again: a, +, b

    A reference is read, never written: what the text itself repeats is the suffix source's. Its kinds are those of
    :class:`.SuffixSource`, with priors that trust a match more.
    """

    name = "reference"
    priors = tuple(prior * rank * mixed for prior in _PRIORS for rank in (1.0, 0.25, 0.12) for mixed in (1.0, 0.85))

    def __init__(self, references: References) -> None:
        self._automaton = _automaton(references)
        self._at = (0, 0)

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """Stand where the prompt's end occurs in a reference, if it does, or else before the first token of all."""
        state, length = 0, 0
        for token in prompt[-_LOOKS_BACK:]:
            state, length = self._automaton.step(state, length, token)
        self._at = (state, length) if length >= _CERTAIN else self._automaton.step(0, 0, BEFORE)

    def root(self) -> tuple[int, int]:
        return self._at

    def propose(self, state: tuple[int, int]) -> list[tuple[int, int]]:
        return [(token, kind) for token, kind in super().propose(state) if token != BEFORE]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        for token in path.tokens:
            self._at = self._automaton.step(*self._at, token)

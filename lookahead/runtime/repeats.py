"""How much of a text repeats, counted on paper: what a look-up would have drafted rightly, without any draft."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf

_SINGLES, _PASSES, _TOKENS = 4, 6, 150  # of a test: passes over one token, over several, tokens of the latter


class Repeats:
    """Expects each token to be what last followed the two before it; ``prompts`` are told, and not counted::

        text      a b c d | a b c d a     c, d and the second a are expected: 3 tokens, the last 3 in a run
        expected  . . . . | . . c d a

    Attributes:
        tokens: written tokens that were expected, of the sequence with the fewest.
        in_a_row: the same, of those without a break up to the last one written.
    """

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        self.tokens = 0
        self.in_a_row = 0
        self._known: list[dict[tuple[int, int], int]] = []
        self._last: list[tuple[int, int]] = []
        for prompt in prompts:
            self._known.append(dict(zip(pairwise(prompt), prompt[2:], strict=False)))
            before, last = (-1, -1, *prompt)[-2:]
            self._last.append((before, last))
        self._counts, self._runs = [0] * len(self._last), [0] * len(self._last)

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Sequence ``row`` has written these."""
        known, last = self._known[row], self._last[row]
        for token in tokens:
            right = known.get(last) == token
            self._counts[row] += right
            self._runs[row] = self._runs[row] + 1 if right else 0
            known[last] = token
            last = last[1], token
        self._last[row] = last
        self.tokens, self.in_a_row = min(self._counts), min(self._runs)


class PaidTest:
    """A test of a model's drafts, run once drafts would have saved more time than it takes; None = it needs none.

    Attributes:
        prompt_ms: what the prompt's pass took, which stands for what several tokens cost.
        single_ms: the same of the fastest pass over one token.
    """

    def __init__(self, run: Callable[[], str | None] | None, prompt_tokens: int) -> None:
        self.prompt_ms, self.single_ms = 0.0, inf
        self._run = run
        self._fails = False
        self._prompts = max(_PASSES, _TOKENS / max(1, prompt_tokens))

    def allows(self, repeated: int) -> bool:
        """Whether drafts are known to be right, now that so many tokens would have been drafted rightly."""
        price_ms = self._prompts * self.prompt_ms + _SINGLES * self.single_ms
        if self._run is not None and repeated * self.single_ms > price_ms:
            self._fails, self._run = self._run() is not None, None
        return self._run is None and not self._fails

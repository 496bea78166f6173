"""Continuations of the longest context that the text has seen before: a suffix automaton over prompt and output."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

from jacobi import Path, Successors, TokenTree
from lookahead.sources.base import RANKS

# Contexts told which continuation is the newest, from the longest one down: repetitive text has as many as tokens.
_REFRESHED = 16


class SuffixAutomaton:
    """The smallest automaton that knows every substring of a growing text (Blumer et al., Theor. Comp. Sci. 40, 1985).
    A state stands for all substrings that end at the same places; its link leads to the longest shorter suffix that
    ends at more of them. Appending a token takes amortised constant time, and so does stepping along a path."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # transitions of each state, the newest continuation last
        self._link: list[int] = [-1]
        self._length: list[int] = [0]  # of each state's longest substring
        self._last = 0

    def append(self, token: int) -> None:
        following, link, length = self._next, self._link, self._length
        state, new = self._last, len(length)
        self._last = new
        length.append(length[state] + 1)
        following.append({})
        link.append(0)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state < 0:
            return
        old = following[state][token]
        if length[state] + 1 == length[old]:
            link[new] = old
        else:
            clone = len(length)
            length.append(length[state] + 1)
            following.append(dict(following[old]))
            link.append(link[old])
            link[old] = link[new] = clone
            shorter = state
            while shorter >= 0 and following[shorter].get(token) == old:
                following[shorter][token] = clone
                shorter = link[shorter]
        for _ in range(_REFRESHED):
            seen = following[state]
            seen[token] = seen.pop(token)  # an item that is put back is the newest
            state = link[state]
            if state < 0:
                return

    def root(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that also occurs earlier in it; (0, 0): none."""
        return self.shorter(self._last)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Lengthen a context by ``token``: state and length of its longest suffix that occurs in the text."""
        following = self._next
        while token not in following[state]:
            if state == 0:
                return 0, 0
            state = self._link[state]
            matched = self._length[state]
        return following[state][token], matched + 1

    def continuations(self, state: int) -> dict[int, int]:
        """The tokens that have followed a state's substrings, oldest first, as keys; not to be changed."""
        return self._next[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """State and length of the next shorter context, which has more occurrences; (0, 0) is the empty one."""
        state = self._link[state]
        return (state, self._length[state]) if state > 0 else (0, 0)


_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 24)  # match lengths at which the next estimate begins
_PRIORS = (0.30, 0.45, 0.50, 0.55, 0.70, 0.75, 0.80, 0.88, 0.90, 0.93, 0.95)  # by match length
_MOST = 4  # candidates below one node
_KIND_OF_LENGTH = tuple(2 * RANKS * (bisect_right(_LENGTHS, length) - 1) for length in range(_LENGTHS[-1] + 1))


class SuffixSource:
    """Candidates from the longest match in prompt and output, newest continuation first, then from a shorter match.

    ::

        text  a b c a b d a b      longest match of the end that occurs earlier: "a b"
                                   candidates: d (newest), c; then what else followed "b" alone

    A candidate's kind is its match length, its rank, and whether its context has had other continuations. The first
    candidates are what prompt lookup copies, with the longest match in place of a fixed n-gram.
    """

    name = "suffix"
    priors = tuple(prior * rank * mixed for prior in _PRIORS for rank in (1.0, 0.25, 0.12) for mixed in (1.0, 0.75))

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._unread: list[int] = []  # tokens written since anything was drafted; while drafts rest, they cost nothing

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self._unread.extend(prompt)

    def root(self) -> tuple[int, int]:
        for token in self._unread:
            self._automaton.append(token)
        self._unread.clear()
        return self._automaton.root()

    def step(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        return self._automaton.step(state[0], state[1], token)

    def propose(self, state: tuple[int, int]) -> list[tuple[int, int]]:
        at, matched = state
        if not matched:
            return []
        automaton = self._automaton
        tokens = automaton.continuations(at)
        kind = _KIND_OF_LENGTH[min(matched, _LENGTHS[-1])]
        if len(tokens) == 1:
            found = [(token, kind) for token in tokens]
        else:
            newest = islice(reversed(tokens), _MOST)
            found = [(token, kind + 2 * min(rank, RANKS - 1) + 1) for rank, token in enumerate(newest)]
            if len(found) == _MOST:
                return found
        at, matched = automaton.shorter(at)
        if matched:
            kind = 1 + _KIND_OF_LENGTH[min(matched, _LENGTHS[-1])]
            for token in islice(reversed(automaton.continuations(at)), _MOST):
                if token not in tokens and len(found) < _MOST:
                    found.append((token, kind + 2 * min(len(found), RANKS - 1)))
        return found

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._unread.extend(path.tokens)

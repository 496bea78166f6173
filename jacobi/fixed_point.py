"""Jacobi decoding: a block of unknown tokens that is iterated until it no longer changes.

Greedy decoding of m tokens is the triangular system ``y_i = argmax p(. | x, y_<i)``, iterated from a guess (Santilli et
al., ACL 2023, section 3; Song et al., ICML 2021). The block is one branch of the tree: what verification accepts of it
has become fixed, and the iterate beyond, shifted by one, is the next draft.

Models that were trained for consistency (CLLM, Kou et al., arXiv 2403.00835) converge in a few passes. For them there
are a second block behind the first, and further branches from rejected tails (Jacobi Forcing, arXiv 2512.14681).
"""

import operator
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Literal, get_args

from jacobi.drafter import Successors
from jacobi.errors import LookaheadError
from jacobi.tree import TokenTree
from jacobi.verify import Path

JacobiMode = Literal["jacobi", "gauss-seidel", "hybrid", "sliding"]


class RejectedTails:
    """The last ``count`` states of a block before its present one (Jacobi Forcing's rejection recycling). What a state
    says may be right at other places than its own::

        the text goes on     a b c d e
        a state says         x a b c d      one place late: nothing of it is accepted, and the next token is a
        candidate            b c d +        from behind the first a, filled up with the present state's tokens
    """

    def __init__(self, count: int) -> None:
        self._present: list[int] = []
        self._past: deque[list[int]] = deque(maxlen=count)

    def keep(self, state: list[int]) -> None:
        """Take in the tokens that the model put out for a block, as far as they are not fixed yet."""
        if self._present:
            self._past.appendleft(self._present)
        self._present = list(state)

    def candidates(self, root: int, block: Sequence[int]) -> list[list[int]]:
        """What else may follow ``root`` in place of ``block``: equally many tokens, newest first."""
        found = []
        for state in self._past:
            if root in state:
                tail = state[state.index(root) + 1 :][: len(block)]
                found.append([*tail, *block[len(tail) :]])
        return found


@dataclass(eq=False)
class JacobiDrafter:
    """One sequence's Jacobi block.

    Modes (the names of Santilli et al., section 3.2, and one of ours):
        ``jacobi``: one block; it shrinks as tokens become fixed, and a new one starts when it is used up.
        ``gauss-seidel``: blocks of ``block_size`` from left to right, each left when all of it is fixed.
        ``hybrid``: Gauss-Seidel that drafts nothing past an end token, and nothing where less than a block fits.
        ``sliding``: after k tokens become fixed the block moves by k and its right edge is refilled.

    For models trained for consistency (Jacobi Forcing, section 4), blocks of n = 4 with ``blocks=2`` and ``tails``::

        root -+- a -- b -+- c -- d     the block in use; a second one stands behind it once
              |          +- d -- e     a share ``spawn_ratio`` of the first is fixed
              +- b -- c                rejected states from behind the root's token on, as further branches

    Nothing is drafted past an end token that the model itself has put out.

    Args:
        block_size: tokens in a block; None = all that is still to be written (only for ``jacobi``).
        guess: gives n tokens for new positions of the block.
        text: the sequence's tokens; every decided token is appended, so that ``guess`` may draw from it.
        keep_trajectory: record every iterate that was fed to the model in ``trajectory``.
        blocks: most blocks at a time, the one in use included; a sliding block has none behind it.
        spawn_ratio: the share of the last block that has to be settled before another one is set behind it: fixed
            tokens of the block in use, of one behind it those at its beginning that the last pass has not changed.
        tails: how many rejected states are kept, each of which may give a branch; 0 where there may be only one.
    """

    mode: JacobiMode
    block_size: int | None
    guess: Callable[[int], list[int]]
    end_tokens: frozenset[int] = frozenset()
    text: list[int] | None = None
    keep_trajectory: bool = False
    blocks: int = 1
    spawn_ratio: float = 0.85
    tails: int = 0

    def __post_init__(self) -> None:
        mode, size, blocks = self.mode, self.block_size, self.blocks
        if mode not in get_args(JacobiMode):
            raise LookaheadError(f"Unknown Jacobi mode {mode!r}: expected one of {', '.join(get_args(JacobiMode))}.")
        if size is not None and size < 1:
            raise LookaheadError(f"A Jacobi block has at least one token: got block_size={size}.")
        if size is None and mode != "jacobi":
            raise LookaheadError(f"Jacobi mode {mode!r} needs a block_size: got None. Pass a whole number from 1 up.")
        if blocks < 1 or self.tails < 0:
            raise LookaheadError(f"Expected blocks >= 1 and tails >= 0: got blocks={blocks}, tails={self.tails}.")
        if blocks > 1 and (mode == "sliding" or size is None):
            why = "a sliding block has no end" if mode == "sliding" else "a block without a block_size takes all room"
            raise LookaheadError(f"blocks={blocks}, but {why}: pass another mode and a block_size, or blocks=1.")
        if not 0 < self.spawn_ratio <= 1:
            raise LookaheadError(f"spawn_ratio is a share of a block, above 0 and at most 1: got {self.spawn_ratio}.")
        self.trajectory: list[list[int]] | None = [] if self.keep_trajectory else None
        self._text = [] if self.text is None else self.text
        self._rejected = RejectedTails(self.tails)
        self._root = 0
        self._block: list[int] = []  # of all blocks, what is not fixed
        self._told = 0  # its first places, which hold what the model put out; the others hold guesses
        self._unchanged = 0
        self._lines = [[0]]  # nodes of each branch of the tree, the iterate's first

    def draft(self, room: int) -> TokenTree:
        """The current iterate as one branch below the root, and rejected tails as others."""
        size = room if self.block_size is None else self.block_size
        if self.mode == "hybrid" and not self._block and room < size:
            size = 0
        new = self._new_places(size)
        self._block += self.guess(new) if new > 0 else []
        del self._block[room:]
        fed = self._until_end(self._block)
        if self.trajectory is not None:
            self.trajectory.append(list(fed))
        others = map(self._until_end, self._rejected.candidates(self._root, self._block))
        tree = TokenTree(self._root)
        self._lines = [tree.path(tree.extend(0, tokens)) for tokens in (fed, *others)]
        return tree

    def _new_places(self, size: int) -> int:
        left = len(self._block)
        if self.mode == "sliding" or not left:
            return size - left
        settled = size - left if left <= size else self._unchanged
        return size if left <= (self.blocks - 1) * size and settled >= self.spawn_ratio * size else 0

    def _until_end(self, tokens: list[int]) -> list[int]:
        judged = tokens if self.mode == "hybrid" else tokens[: self._told]
        end = next((place for place, token in enumerate(judged) if token in self.end_tokens), None)
        return tokens if end is None else tokens[: end + 1]

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """One Jacobi iteration: tokens become the argmax at those before them, and fixed ones leave the block."""
        fixed, before = len(path.tokens), self._block
        line = next(nodes for nodes in self._lines if path.nodes[-1] in nodes)
        # Node j of a branch holds token j-1 of the block; its argmax is the new token j. Tokens that were not fed (past
        # an end token) stay, and a sliding block gains the one beyond its old right edge.
        state = [greedy[node] for node in line[fixed:]]
        iterate = [*state, *before[len(line) :]]
        self._block = iterate if self.mode == "sliding" else iterate[: max(0, len(before) - fixed)]
        self._told = max(len(line), self._told) - fixed
        if self.blocks > 2 and self.block_size is not None:
            pairs = zip(self._block[-self.block_size :], before[-self.block_size :], strict=False)
            self._unchanged = sum(accumulate((new == old for new, old in pairs), operator.mul))
        self._rejected.keep(self._block[: len(state)])
        self._root = path.tokens[-1]
        self._text += path.tokens


def guesser(
    kind: Literal["text", "tail", "pad"] | Sequence[int], text: list[int], vocab_size: int, pad: int, rng: random.Random
) -> Callable[[int], list[int]]:
    """Make the function that gives n tokens for new positions of a block.

    ``"text"`` draws from the ``text`` so far, which may grow (where it is empty, from the whole vocabulary), ``"tail"``
    copies its end, ``"pad"`` repeats the pad token; a sequence of token ids is used in order, and then again. Any other
    word and an empty sequence are a LookaheadError.
    """
    if (isinstance(kind, str) and kind not in ("text", "tail", "pad")) or not kind:
        raise LookaheadError(f"An initial guess is 'text', 'tail', 'pad' or a list of token ids: got {kind!r}.")
    if kind == "text":
        return lambda n: rng.choices(text, k=n) if text else [rng.randrange(vocab_size) for _ in range(n)]
    if kind == "tail":
        return lambda n: (text[-n:] * (n // max(1, len(text[-n:])) + 1))[:n] if text and n else [pad] * n
    if kind == "pad":
        return lambda n: [pad] * n
    endless = cycle(list(kind))
    return lambda n: list(islice(endless, n))

"""Jacobi decoding: a block of unknown tokens that is iterated until it no longer changes.

Greedy decoding of m tokens is the triangular system ``y_i = argmax p(. | x, y_<i)``, iterated from a guess (Santilli et
al., ACL 2023, section 3; Song et al., ICML 2021). The block is one branch of the tree: what verification accepts of it
has become fixed, and the iterate beyond, shifted by one, is the next draft.
"""

import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Literal, get_args

from jacobi.drafter import Successors
from jacobi.errors import LookaheadError
from jacobi.tree import TokenTree
from jacobi.verify import Path

JacobiMode = Literal["jacobi", "gauss-seidel", "hybrid", "sliding"]


class JacobiDrafter:
    """One sequence's Jacobi block.

    Modes (the names of Santilli et al., section 3.2, and one of ours):
        ``jacobi``: one block; it shrinks as tokens become fixed, and a new one starts when it is used up.
        ``gauss-seidel``: blocks of ``block_size`` from left to right, each left when all of it is fixed.
        ``hybrid``: Gauss-Seidel that drafts nothing past an end token, and nothing where less than a block fits.
        ``sliding``: after k tokens become fixed the block moves by k and its right edge is refilled.

    Args:
        block_size: tokens in a block; None = all that is still to be written (only for ``jacobi``).
        guess: gives n tokens for new positions of the block.
        text: the sequence's tokens; every decided token is appended, so that ``guess`` may draw from it.
        keep_trajectory: record every iterate that was fed to the model in ``trajectory``.
    """

    def __init__(
        self,
        mode: JacobiMode,
        block_size: int | None,
        guess: Callable[[int], list[int]],
        end_tokens: frozenset[int] = frozenset(),
        text: list[int] | None = None,
        keep_trajectory: bool = False,
    ) -> None:
        if mode not in get_args(JacobiMode):
            raise LookaheadError(f"Unknown Jacobi mode {mode!r}: expected one of {', '.join(get_args(JacobiMode))}.")
        if block_size is not None and block_size < 1:
            raise LookaheadError(f"A Jacobi block has at least one token: got block_size={block_size}.")
        if block_size is None and mode != "jacobi":
            raise LookaheadError(f"Jacobi mode {mode!r} needs a block_size: got None. Pass a whole number from 1 up.")
        self.mode, self.block_size = mode, block_size
        self.trajectory: list[list[int]] | None = [] if keep_trajectory else None
        self._guess, self._end_tokens = guess, end_tokens
        self._text = [] if text is None else text
        self._root = 0
        self._block: list[int] = []

    def draft(self, room: int) -> TokenTree:
        """The current iterate as one branch below the root."""
        size = room if self.block_size is None else self.block_size
        if self.mode == "hybrid" and not self._block and room < size:
            size = 0
        if self.mode == "sliding" or not self._block:
            self._block += self._guess(size - len(self._block)) if size > len(self._block) else []
        del self._block[room:]
        fed = self._block
        if self.mode == "hybrid":
            end = next((i for i, token in enumerate(fed) if token in self._end_tokens), None)
            fed = fed if end is None else fed[: end + 1]
        if self.trajectory is not None:
            self.trajectory.append(list(fed))
        return TokenTree.chain(self._root, fed)

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """One Jacobi iteration: tokens become the argmax at those before them, and fixed ones leave the block."""
        fixed = len(path.tokens)
        size = len(self._block)
        # Node j of the tree holds token j-1 of the block; its argmax is the new token j. Tokens that were not fed (past
        # an end token) stay, and a sliding block gains the one beyond its old right edge.
        iterate = [*greedy[fixed : len(tree)], *self._block[len(tree) :]]
        self._block = iterate if self.mode == "sliding" else iterate[: max(0, size - fixed)]
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

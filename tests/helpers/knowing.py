"""A strategy that knows what plain decoding writes, so that trees are followed deep down in any model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from helpers.models import run
from torch import Tensor

from jacobi import Drafter, Path, Successors, TokenTree
from lookahead.draft.context import RowContext
from lookahead.strategies.base import Strategy


class KnownDrafter:
    """Drafts what the row is going to say, to a depth of its choice, among branches of nonsense or before some."""

    def __init__(self, text: Sequence[int], row: RowContext) -> None:
        self._text = list(text)
        self._row = row
        self._rng = random.Random(row.index)
        self._written = 0
        self._root = 0

    def draft(self, room: int) -> TokenTree:
        right = self._text[self._written : self._written + min(room, self._rng.choice([0, 1, 2, 4, 7]))]
        if self._row.chain:
            wrong = [self._rng.randrange(self._row.vocab_size) for _ in range(self._rng.choice([0, 1, 3]))]
            return TokenTree.chain(self._root, (right + wrong)[:room])
        paths: list[list[int]] = []
        for depth in range(len(right) + 1):
            wrong = [self._rng.randrange(self._row.vocab_size) for _ in range(self._rng.choice([0, 1, 3]))]
            paths.append((right[:depth] + wrong)[:room])
        self._rng.shuffle(paths)  # slots are in another order than the text
        return TokenTree.from_paths(self._root, [*paths, right])

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        self._written += len(path.tokens)
        self._root = path.tokens[-1]


@dataclass(frozen=True, kw_only=True)
class Known(Strategy):
    """Knows each row's text in advance, so that trees are followed deep down in models that say nothing twice."""

    name: ClassVar[str] = "known"
    texts: tuple[tuple[int, ...], ...] = ()

    def drafter(self, row: RowContext) -> Drafter:
        return KnownDrafter(self.texts[row.index], row)


def known(model: Any, inputs: dict[str, Any], **settings: Any) -> Known:
    """A strategy that knows what plain decoding writes."""
    return knowing(run(model, inputs, **settings)[0], inputs["input_ids"].shape[1])


def knowing(text: Tensor, start: int) -> Known:
    """A strategy that knows ``text`` ``[batch, token]``, of which the first ``start`` tokens are given."""
    return Known(texts=tuple(tuple(row) for row in text[:, start:].tolist()))

"""Groups that share passes: each writes what it would write alone, and is told of its own trees only."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from helpers.toy import ToyModel, hashed, plain
from torch import Tensor

from jacobi import GreedyVerifier, JacobiDrafter, Path, Scores, Successors, TokenTree
from jacobi.loop import RowGroup, Stepper

NEXT, PROMPTS = hashed(6, 5, 2), [[1], [2, 3], [4, 1, 2], [3]]


class Launching(ToyModel):
    """Brings what is looked for along, and the best next tokens of every node."""

    def launch(self, trees: Sequence[TokenTree], look: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[], Scores]:
        scores, best = self.forward(trees), max(tree.top_k for tree in trees)
        values, tokens = scores.logits.topk(best)
        told = [Successors(ids.numpy(), each.numpy()) for ids, each in zip(tokens, values, strict=True)]
        broken = frozenset((row, 0) for row in range(len(trees)))
        beside = tuple(each.numpy() for each in look(scores.logits))
        return lambda: Scores(scores.logits, scores.greedy, broken, told, beside)


class Watching(GreedyVerifier):
    """Looks for so many tensors, and compares what it gets with its own trees."""

    def __init__(self, batch: int, count: int, looks: int, top_k: int) -> None:
        super().__init__(batch, count)
        self.looks, self.top_k, self.seen = looks, top_k, torch.zeros(0)

    def look(self, trees: Sequence[TokenTree], logits: Tensor) -> tuple[Tensor, ...]:
        self.seen = logits.clone()
        return tuple((logits.argmax(-1) + at).int() for at in range(self.looks))

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        rows, width = len(trees), max(map(len, trees))
        assert scores.logits.shape[:2] == (rows, width) and [*map(len, scores.greedy)] == [width] * rows
        if len(self.seen):
            assert torch.equal(scores.logits, self.seen)
            expected = [self.seen.argmax(-1).numpy() + at for at in range(self.looks)]
            assert len(scores.beside) == self.looks and all(map(np.array_equal, scores.beside, expected))
            assert scores.broken == {(row, 0) for row in range(rows)}
            shapes = {each.tokens.shape for each in scores.successors or ()}
            assert shapes == ({(width, self.top_k)} if self.top_k else set())
        return super().decide(trees, scores)


class Asking(JacobiDrafter):
    def draft(self, room: int) -> TokenTree:
        tree = super().draft(room)
        tree.top_k = self.blocks - 1  # as good a number as any
        return tree


def asking(block: int, top_k: int) -> Asking:
    return Asking("jacobi", block, lambda size: [4] * size, blocks=1 + top_k)


def test_each_group_writes_what_it_writes_alone() -> None:
    model, counts = Launching(NEXT, PROMPTS), (20, 20, 9, 14)
    verifiers = [Watching(2, 20, 2, 3), Watching(1, 9, 0, 0), Watching(1, 14, 1, 5)]
    drafters = [[asking(5, 1), asking(2, 3)], [asking(1, 0)], [asking(7, 5)]]
    groups = [RowGroup(each, verifier) for each, verifier in zip(drafters, verifiers, strict=True)]
    asides: list[int] = []
    passes = Stepper(model, groups, lambda: asides.append(0))
    scores, places = model.prefill(), (slice(0, 2), slice(2, 3), slice(3, 4))
    parts = [Scores(scores.logits[rows], scores.greedy[rows]) for rows in places]
    steps = [passes.settle(groups, parts, 0.0, 3.0, first=True)]
    assert steps[0].forward_ms == 3.0
    while not all(verifier.done for verifier in verifiers):
        steps.append(passes.step())
        assert steps[-1].trees == [tree for group in groups for tree in group.trees]
        assert steps[-1].paths == [path for group in groups for path in group.paths]
    written = [row for verifier in verifiers for row in verifier.tokens]
    assert written == [plain(NEXT, prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    assert len(asides) == len(steps) < max(counts), "drafts were accepted"

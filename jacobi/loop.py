"""The loop. Every strategy, plain decoding included, is this loop with another drafter. What is accepted is decided
completely before anything is committed, learnt or yielded to observers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from jacobi.drafter import Drafter, Successors
from jacobi.errors import LookaheadError
from jacobi.tree import TokenTree
from jacobi.verify import Path, walk


@dataclass(slots=True)
class Scores:
    """What one pass says: ``logits`` ``[batch, node, vocab]`` of a batch's trees, smaller ones padded at the end.

    ``greedy`` is their argmax as lists ``[batch][node]``, the pass's one transfer to the host; ``broken`` has the (row,
    node) whose logits hold NaN; ``successors``, if asked for, are of every node (prefill: of the prompt's last tokens).
    ``beside`` is what the verifier's ``look`` made of the logits, if the model takes it along.
    """

    logits: Tensor
    greedy: list[list[int]]
    broken: frozenset[tuple[int, int]] = frozenset()
    successors: list[Successors] | None = None
    beside: tuple[np.ndarray, ...] = ()


@dataclass(slots=True)
class Step:
    """One forward pass: what was drafted and what was kept, for each sequence."""

    trees: list[TokenTree]
    paths: list[Path]
    draft_ms: float
    forward_ms: float
    verify_ms: float
    keep_ms: float


class Model(Protocol):
    """A model with a KV cache that can score trees and keep chosen nodes of them."""

    def prefill(self) -> Scores:
        """Run the prompt; scores for its last token, ``[batch, 1, vocab]``."""

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of one tree a sequence, in one pass. The KV cache stays as it is."""

    def keep(self, paths: Sequence[Path]) -> None:
        """Append the visited nodes of the last pass to the KV cache, and drop the others."""


@runtime_checkable
class AsynchronousModel(Model, Protocol):
    """A model on a device that works by itself."""

    def launch(self, trees: Sequence[TokenTree], look: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[], Scores]:
        """Like ``forward``, but do not wait for the device: what is returned does. ``look`` makes of the logits what
        is to come with the scores."""


class Verifier(Protocol):
    """Decides what is accepted, token by token, stopping rules included."""

    def look(self, trees: Sequence[TokenTree], logits: Tensor) -> tuple[Tensor, ...]:
        """What is to be brought to the host together with the scores, computed on the device: int32, of any shapes."""

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        """The path kept of each tree; an empty one where a sequence does not advance."""

    def room(self) -> list[int]:
        """How deep each sequence's next tree may be."""

    @property
    def done(self) -> bool:
        """No pass is needed any more."""


def solve(
    model: Model, drafters: Sequence[Drafter], verifier: Verifier, aside: Callable[[], None] = lambda: None
) -> Iterator[Step]:
    """Decode a batch, one sequence a drafter; yields one :class:`Step` a forward pass, the prefill first.

    The prefill's tree is a root alone, for the prompt's last token; its token id means nothing. ``aside`` is called
    whenever there is time for what no draft waits for: once the prompt's token is known, before anything is learnt from
    the prompt, and once the device has been given the next pass.
    """

    asynchronous = model if isinstance(model, AsynchronousModel) else None

    def launch(trees: Sequence[TokenTree]) -> Callable[[], Scores]:
        if asynchronous is not None:
            return asynchronous.launch(trees, partial(verifier.look, trees))
        return partial(model.forward, trees)

    trees = [TokenTree(0) for _ in drafters]
    draft_ms, begin = 0.0, perf_counter()
    scores, forward_ms = model.prefill(), since_ms(begin)
    first = True
    while True:
        begin = perf_counter()
        paths = verifier.decide(trees, scores)
        verify_ms, begin = since_ms(begin), perf_counter()
        model.keep(paths)
        keep_ms = since_ms(begin)
        if first:
            first = False
            aside()
        begin = perf_counter()
        successors: Sequence[Successors | None] = scores.successors or [None] * len(trees)
        for drafter, tree, greedy, path, best in zip(drafters, trees, scores.greedy, paths, successors, strict=True):
            if path.tokens:
                drafter.learn(tree, greedy, path, best)
        yield Step(trees, paths, draft_ms, forward_ms, verify_ms, keep_ms + since_ms(begin))
        if verifier.done:
            return
        begin = perf_counter()
        trees = [drafter.draft(room) for drafter, room in zip(drafters, verifier.room(), strict=True)]
        draft_ms, begin = since_ms(begin), perf_counter()
        wait = launch(trees)
        launch_ms = since_ms(begin)
        aside()
        begin = perf_counter()
        scores = wait()
        forward_ms = launch_ms + since_ms(begin)


def since_ms(begin: float) -> float:
    """Milliseconds since a time of ``perf_counter``."""
    return 1e3 * (perf_counter() - begin)


class GreedyVerifier:
    """Greedy acceptance, stopped by length or by an end token, which is written; all that a torch-only caller needs."""

    def __init__(self, batch: int, max_new_tokens: int, end_tokens: frozenset[int] = frozenset()) -> None:
        if max_new_tokens < 1:
            raise LookaheadError(f"max_new_tokens must be at least 1: got {max_new_tokens}.")
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self._finished = [False] * batch
        self._max_new_tokens, self._end_tokens = max_new_tokens, end_tokens

    @property
    def done(self) -> bool:
        """Every sequence has ended."""
        return all(self._finished)

    def room(self) -> list[int]:
        """Tokens that may still follow the one that the root decides."""
        return [max(0, self._max_new_tokens - len(row) - 1) for row in self.tokens]

    def look(self, trees: Sequence[TokenTree], logits: Tensor) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        """Follow the argmax down the tree of each unfinished sequence."""
        paths = [Path() for _ in trees]
        for row, (tree, greedy) in enumerate(zip(trees, scores.greedy, strict=True)):
            if not self._finished[row]:
                paths[row] = walk(tree, greedy.__getitem__, partial(self._write, row))
        return paths

    def _write(self, row: int, token: int) -> bool:
        written = self.tokens[row]
        written.append(token)
        self._finished[row] = token in self._end_tokens or len(written) >= self._max_new_tokens
        return self._finished[row]

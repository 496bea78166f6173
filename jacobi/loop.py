"""The loop. Every strategy, plain decoding and served requests included, is this loop with other drafters and groups.
What is accepted is decided completely before anything is committed, learnt or yielded to observers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from time import perf_counter
from typing import Generic, Protocol, TypeVar, runtime_checkable

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


class RowGroup:
    """Sequences that one verifier decides, each with a drafter: all of a call, or one of many that share passes.

    Attributes:
        trees: one a sequence, of the pass under way; of the prompt's the root alone.
        paths: what was kept of them.
    """

    def __init__(self, drafters: Sequence[Drafter], verifier: Verifier) -> None:
        self.drafters, self.verifier = drafters, verifier
        self.trees = [TokenTree(0) for _ in drafters]
        self.paths = [Path() for _ in drafters]

    def draft(self) -> None:
        """Grow the next trees."""
        rooms = self.verifier.room()
        self.trees = [drafter.draft(room) for drafter, room in zip(self.drafters, rooms, strict=True)]

    def learn(self, scores: Scores) -> None:
        """Let drafters take in what became of their trees."""
        successors: Sequence[Successors | None] = scores.successors or [None] * len(self.trees)
        rows = zip(self.drafters, self.trees, scores.greedy, self.paths, successors, strict=True)
        for drafter, tree, greedy, path, best in rows:
            if path.tokens:
                drafter.learn(tree, greedy, path, best)


AnyGroup = TypeVar("AnyGroup", bound=RowGroup)


def decide_each(groups: Sequence[RowGroup], parts: Sequence[Scores]) -> None:
    """Let one group after the other write, each by its own part of a pass."""
    for group, scores in zip(groups, parts, strict=True):
        group.paths = group.verifier.decide(group.trees, scores)


class Stepper(Generic[AnyGroup]):
    """Stepper over ``groups`` that share passes, and may come and go between two. Each is told of its own trees::

        trees of a pass     a a a | b | c c        groups of 3, 1 and 2 sequences

    Args:
        aside: is called whenever there is time for what no draft waits for: once a prompt's token is known, before
            anything is learnt from the prompt, and once the device has been given the next pass.
        decide: lets groups write; several may do so in one computation.
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[AnyGroup],
        aside: Callable[[], None] = lambda: None,
        decide: Callable[[Sequence[AnyGroup], Sequence[Scores]], None] = decide_each,
    ) -> None:
        self.groups = groups
        self._model, self._aside, self._decide = model, aside, decide
        self._asynchronous = model if isinstance(model, AsynchronousModel) else None

    def prefill(self) -> Step:
        """Run the prompt of the only group. Its trees are roots alone, whose token ids mean nothing."""
        begin = perf_counter()
        scores = self._model.prefill()
        return self.settle(self.groups, [scores], 0.0, since_ms(begin), first=True)

    def step(self) -> Step:
        """Draft, one forward over all trees, decide, keep, learn."""
        groups, begin = list(self.groups), perf_counter()
        for group in groups:
            group.draft()
        trees = [tree for group in groups for tree in group.trees]
        draft_ms, begin = since_ms(begin), perf_counter()
        counts: list[int] = []  # of what is looked for in each group's logits
        wait: Callable[[], Scores] = partial(self._model.forward, trees)
        if self._asynchronous is not None:
            wait = self._asynchronous.launch(trees, partial(_looked, groups, counts))
        launch_ms = since_ms(begin)
        self._aside()
        begin = perf_counter()
        parts = _parts(wait(), groups, counts)
        return self.settle(groups, parts, draft_ms, launch_ms + since_ms(begin))

    def settle(
        self,
        groups: Sequence[AnyGroup],
        parts: Sequence[Scores],
        draft_ms: float,
        forward_ms: float,
        *,
        first: bool = False,
        kept: bool = False,
    ) -> Step:
        """Decide, keep and learn by what a pass said to each group. It was their ``first``, the prompt's, or all of it
        is ``kept`` already, where other passes have read the prompts of groups that join."""
        begin = perf_counter()
        self._decide(groups, parts)
        trees = [tree for group in groups for tree in group.trees]
        paths = [path for group in groups for path in group.paths]
        verify_ms, begin = since_ms(begin), perf_counter()
        if not kept:
            self._model.keep(paths)
        keep_ms = since_ms(begin)
        if first:
            self._aside()
        begin = perf_counter()
        for group, scores in zip(groups, parts, strict=True):
            group.learn(scores)
        return Step(trees, paths, draft_ms, forward_ms, verify_ms, keep_ms + since_ms(begin))


def _rows(groups: Sequence[RowGroup]) -> list[tuple[slice, int]]:
    """Where each group's trees lie in a pass: its rows, and the nodes of the widest one."""
    stops = accumulate(len(group.trees) for group in groups)
    pairs = zip(groups, stops, strict=True)
    return [(slice(stop - len(group.trees), stop), max(map(len, group.trees))) for group, stop in pairs]


def _looked(groups: Sequence[RowGroup], counts: list[int], logits: Tensor) -> tuple[Tensor, ...]:
    """What all groups look for in the logits of a pass, and ``counts`` of how much each."""
    if len(groups) == 1:
        return groups[0].verifier.look(groups[0].trees, logits)
    found: list[Tensor] = []
    for group, (rows, width) in zip(groups, _rows(groups), strict=True):
        own = group.verifier.look(group.trees, logits[rows, :width])
        counts.append(len(own))
        found += own
    return tuple(found)


def _parts(scores: Scores, groups: Sequence[RowGroup], counts: Sequence[int]) -> list[Scores]:
    """What a pass says of the trees of each group."""
    if len(groups) == 1:
        return [scores]
    parts, beside = list[Scores](), iter(scores.beside)
    for group, (rows, width), count in zip(groups, _rows(groups), counts or [0] * len(groups), strict=True):
        broken = {(row - rows.start, node) for row, node in scores.broken if rows.start <= row < rows.stop}
        greedy = [line[:width] for line in scores.greedy[rows]]
        top_k, best = max(tree.top_k for tree in group.trees), None
        if scores.successors is not None and top_k:
            told = scores.successors[rows]
            best = [Successors(each.tokens[:width, :top_k], each.logits[:width, :top_k]) for each in told]
        own = tuple(islice(beside, count))
        parts.append(Scores(scores.logits[rows, :width], greedy, frozenset(broken), best, own))
    return parts


def solve(
    model: Model, drafters: Sequence[Drafter], verifier: Verifier, aside: Callable[[], None] = lambda: None
) -> Iterator[Step]:
    """Decode one group, a sequence for each drafter; yields one :class:`Step` a forward pass, the prefill first.
    ``aside`` is that of :class:`Stepper`."""
    passes = Stepper(model, [RowGroup(drafters, verifier)], aside)
    yield passes.prefill()
    while not verifier.done:
        yield passes.step()


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

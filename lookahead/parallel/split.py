"""Lookahead parallelism: every rank has the whole model, and scores a part of each tree (arXiv 2402.02057, section 4).

A tree is split by branches; what several branches share is scored by each rank that has one of them::

    root -+- a -- b            rank 0    root -- a -- b
          +- a -- c                       + ------ c          balanced by nodes: 4 and 3
          +- d -- e            rank 1    root -- d -- e

Ranks tell each other what the model would write at each node, and walk the whole tree alike. An accepted node is in the
KV caches of those ranks that have scored it; the others feed its token again, before the root of their next part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from jacobi import LookaheadError, Path, Scores, Successors, TokenTree
from lookahead._per_model import PerModel
from lookahead.parallel.messages import Messages
from lookahead.parallel.tensor import TensorParallel
from lookahead.runtime.scores import fetch
from lookahead.runtime.tree import TreeModel
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier

Choices = Callable[[Sequence[TokenTree], Tensor, Sequence[int]], Tensor | None]


def split(tree: TokenTree, parts: int) -> list[list[int]]:
    """The nodes of each part of a tree, in rising order, ancestors included. Neighbouring branches stay together, and
    the largest part is as small as that allows; parts may be the root alone."""
    leaves, waiting = list[int](), [0]  # leaves from left to right
    while waiting:
        node = waiting.pop()
        below = list(tree.children[node].values())
        waiting += below[::-1]
        leaves += [] if below else [node]
    low, high = max(len(tree.path(leaf)) for leaf in leaves), len(tree)
    while low < high:
        most = (low + high) // 2
        if len(_filled(tree, leaves, most)) <= parts:
            high = most
        else:
            low = most + 1
    found = [sorted(nodes) for nodes in _filled(tree, leaves, high)]
    return found + [[0] for _ in range(parts - len(found))]


def _filled(tree: TokenTree, leaves: Sequence[int], most: int) -> list[set[int]]:
    """Parts of up to ``most`` nodes, filled one after the other."""
    parts: list[set[int]] = [set()]
    for leaf in leaves:
        branch = set(tree.path(leaf))
        if len(parts[-1] | branch) > most:
            parts.append(set())
        parts[-1] |= branch
    return parts


class SplitModel:
    """One rank's view of passes over trees that all ranks share (a :class:`jacobi.Model`). Its own view, ``model``, is
    given its parts, and messages have ``size`` numbers. ``choices`` gives what is chosen at all nodes of some trees,
    int32 ``[batch, node, 2]``, from logits; None where that is the argmax."""

    def __init__(self, model: TreeModel, messages: Messages, size: int) -> None:
        self._model, self._messages, self._size = model, messages, size
        self.choices: Choices | None = None
        self.hidden = model.hidden
        rows = range(model.forward_pass.batch)
        self._owed: list[list[int]] = [[] for _ in rows]  # accepted tokens that this rank's cache lacks
        self._parts: list[dict[int, int]] = [{0: 0} for _ in rows]  # by node, where it was fed, behind what was owed

    def prefill(self) -> Scores:
        """The whole prompt, on every rank."""
        return self._model.prefill()

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score this rank's parts, and hear what the others say of theirs."""
        splits = [split(tree, self._messages.size) for tree in trees]
        mine = [parts[self._messages.rank] for parts in splits]
        parts = [_part(*each) for each in zip(trees, mine, self._owed, strict=True)]
        self._parts = [places for _, places in parts]
        scores = self._model.forward([fed for fed, _ in parts])
        content = self._said(trees, splits, scores)
        flat = torch.zeros(self._size, dtype=torch.int64)
        flat[: content.size] = torch.from_numpy(content.reshape(-1))
        heard = self._messages.exchange(flat)[: content.size].numpy().reshape(content.shape)
        return self._scores(trees, scores.logits, heard)

    def _said(self, trees: Sequence[TokenTree], splits: Sequence[Sequence[list[int]]], scores: Scores) -> np.ndarray:
        """Message of this rank, int64 ``[row, node of the widest tree, 2 + best]``: of nodes that no earlier rank has
        the argmax and whether it is broken, the choice and whether it is finite, the best next tokens with logits."""
        rank, width = self._messages.rank, max(map(len, trees))
        best = min(max(tree.top_k for tree in trees), self._size // (len(trees) * width) - 2)
        content = np.zeros((len(trees), width, 2 + max(0, best)), np.int64)
        chosen = self._chosen(trees, [parts[rank] for parts in splits], scores)
        for row, parts in enumerate(splits):
            own = [place for place, node in enumerate(parts[rank]) if not any(node in part for part in parts[:rank])]
            nodes = [parts[rank][place] for place in own]
            places = [self._parts[row][node] for node in nodes]
            content[row, nodes, 0] = [2 * scores.greedy[row][at] + ((row, at) in scores.broken) for at in places]
            if chosen is not None:
                picked = chosen[row, own].astype(np.int64)
                content[row, nodes, 1] = 2 * picked[:, 0] + (picked[:, 1] if picked.shape[1] > 1 else 1)
            if best > 0 and scores.successors is not None:
                found = scores.successors[row]
                bits = np.ascontiguousarray(found.logits[places, :best], np.float32).view(np.uint32).astype(np.int64)
                content[row, nodes, 2 : 2 + bits.shape[1]] = found.tokens[places, :best].astype(np.int64) << 32 | bits
        return content

    def _chosen(self, trees: Sequence[TokenTree], mine: Sequence[Sequence[int]], scores: Scores) -> np.ndarray | None:
        if self.choices is None:
            return None
        parts = [_part(tree, nodes)[0] for tree, nodes in zip(trees, mine, strict=True)]
        width = max(map(len, mine))
        at = [[self._parts[row][node] for node in nodes] + [0] * (width - len(nodes)) for row, nodes in enumerate(mine)]
        rows = torch.arange(len(at))[:, None]
        depths = [max(tree.depths) for tree in trees]
        chosen = self.choices(parts, scores.logits[rows, torch.tensor(at)], depths)
        return None if chosen is None else fetch(chosen)

    def _scores(self, trees: Sequence[TokenTree], logits: Tensor, heard: np.ndarray) -> Scores:
        best, chosen, packed = heard[:, :, 0], heard[:, :, 1], heard[:, :, 2:]
        broken = frozenset((int(row), int(node)) for row, node in np.argwhere(best & 1))
        scores = Scores(logits, (best >> 1).tolist(), broken)
        if self.choices is not None:
            scores.beside = (np.stack([chosen >> 1, chosen & 1], axis=2).astype(np.int32),)
        if packed.size:
            tokens = (packed >> 32).astype(np.int32)
            values = (packed & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
            each = [(row, len(tree)) for row, tree in enumerate(trees)]
            scores.successors = [Successors(tokens[row, :count], values[row, :count]) for row, count in each]
        return scores

    def keep(self, paths: Sequence[Path]) -> None:
        """Keep what this rank has of each row's path; the rest is owed."""
        kept = []
        for row, path in enumerate(paths):
            known = [node for node in path.nodes if node in self._parts[row]]
            again = range(self._parts[row][0] if path.nodes else 0)
            kept.append(Path([*again, *(self._parts[row][node] for node in known)], []))
            if path.nodes:
                # Each visited node but the root holds the token that was decided before it.
                self._owed[row] = path.tokens[len(known) - 1 : -1]
        self._model.keep(kept)

    def store(self, cache: Any) -> None:
        """Leave the whole KV cache in ``cache``."""
        if any(self._owed):
            trees = [TokenTree.chain(owed[0], owed[1:]) if owed else TokenTree(0) for owed in self._owed]
            self._model.forward(trees)
            self._model.keep([Path(list(range(len(owed))), owed) for owed in self._owed])
        self._model.store(cache)

    def room(self) -> list[int] | None:
        """Largest depth of each sequence's tree; None = no limit."""
        limits = self._model.room()
        return limits and [max(0, most - len(owed)) for most, owed in zip(limits, self._owed, strict=True)]

    def holds(self, row: int) -> bool:
        return False


def _part(tree: TokenTree, nodes: Sequence[int], before: Sequence[int] = ()) -> tuple[TokenTree, dict[int, int]]:
    """Some nodes of a tree, behind the tokens ``before`` its root, and where each of them is."""
    head, places = [*before, tree.tokens[0]], {0: len(before)}
    part = TokenTree.chain(head[0], head[1:])
    part.top_k = tree.top_k
    for node in nodes[1:]:
        places[node] = part.add(places[tree.parents[node]], tree.tokens[node])
    return part, places


def refusal(why: str) -> LookaheadError:
    return LookaheadError(f"Lookahead(parallel='lookahead') cannot be used here: {why}. Leave it out.")


_times: PerModel[dict[Any, Any]] = PerModel(dict)


class Replicas(TensorParallel):
    """One call's ranks, all of torch.distributed's default group: as in tensor parallelism rank 0 drafts, but each rank
    scores its part of a tree by itself. Two messages of one shape a pass: trees, and what was found at their nodes."""

    _tells_top_k = True

    def __init__(self, model: Any, sequences: Sequences) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise refusal("torch.distributed is not initialised, as it is under torchrun after init_process_group")
        super().__init__(model, sequences, dist.group.WORLD)
        self._model = model
        self._split: SplitModel | None = None

    def times(self, kept: dict[Any, Any]) -> dict[Any, Any]:
        """Passes over parts have curves of their own."""
        return _times.of(self._model)

    def around(self, model: TreeModel) -> SplitModel:
        """The model whose passes the ranks share."""
        self._split = SplitModel(model, self.messages, self._size)
        return self._split

    def asks(self, verifier: Verifier) -> None:
        assert self._split is not None
        why = verifier.why_not_ahead()
        if why is not None:
            raise refusal(why)
        self._split.choices = verifier.choices if verifier.chooses else None

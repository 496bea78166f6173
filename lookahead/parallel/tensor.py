"""Tensor parallelism: every rank holds a part of each weight, so all of them must run the same passes.

The trees are rank 0's, which alone asks sources, plans by its clock and learns. The others are told its trees, and
verify and keep them as it does: logits are gathered whole on every rank, and noise is drawn from one generator's state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from jacobi import Drafter, Path, Successors, TokenTree
from lookahead._per_model import PerModel
from lookahead.models.traits import tensor_parallel_group
from lookahead.parallel.messages import Messages, RankError, message_group
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier

_MOST_NODES = 4096  # of one sequence's tree

_groups: PerModel[Any] = PerModel(lambda: None)


class TensorParallel:
    """One call's trees, told by rank 0 to all ranks: one message a pass, ``[rows * (2 + 2 * nodes) + 1]``."""

    _tells_top_k = False  # rank 0 alone learns, and sees all nodes

    def __init__(self, model: Any, sequences: Sequences, ranks: Any = None) -> None:
        group = _groups.take(model) or message_group(ranks or tensor_parallel_group(model))
        _groups.put(model, group)
        self.messages = Messages(group)
        self.leads = self.messages.rank == 0  # this rank decides
        self._sequences = sequences
        sequences.stay = True
        self._each = 2 + 2 * _MOST_NODES
        self._size = 1 + sequences.batch * self._each
        self._trees: list[TokenTree] = []
        self._seen = [0] * sequences.batch

    def times(self, kept: dict[Any, Any]) -> dict[Any, Any]:
        """Where latency curves of these passes are kept, beside those of the model's other passes."""
        return kept

    def around(self, model: Any) -> Any:
        """Model that runs the passes, around the rank's own view of it."""
        return model

    def asks(self, verifier: Verifier) -> None:
        """Tell what runs the passes who verifies them."""

    @contextmanager
    def call(self, drafters: Sequence[Drafter], what: dict[str, Any], device: torch.device) -> Iterator[list[Drafter]]:
        """Around the passes: agree on the call and on the noise before, and on the text behind. Gives what drafts in
        place of the call's own drafters, which only rank 0 asks."""
        self.messages.agree(what)
        self.messages.share_generators(device)
        with self.messages.failing(self._size):
            yield [_TreeOfRankZero(self, row, drafter) for row, drafter in enumerate(drafters)]
            self._exchange()

    def tree(self, row: int, drafter: Drafter, room: int) -> TokenTree:
        """One row's next tree. The message goes when the last row of rank 0 has one; the others wait at their first."""
        if self.leads:
            self._trees = [*self._trees[:row], drafter.draft(room)]
            if len(self._trees) == self._sequences.batch:
                self._tell()
        elif row == 0:
            self._hear()
        return self._trees[row]

    def _exchange(self, content: Sequence[int] = ()) -> Tensor:
        """Rank 0's content, once all ranks have compared what they have written."""
        for row, written in enumerate(self._sequences.written):
            self.messages.note(written[self._seen[row] :])
            self._seen[row] = len(written)
        told = torch.tensor(content) if content else torch.zeros(self._size, dtype=torch.int64)
        return self.messages.exchange(told)

    def _tell(self) -> None:
        content = [int(self._sequences.in_step)]
        for tree in self._trees:
            if len(tree) > _MOST_NODES:
                raise RankError(f"A tree has {len(tree)} nodes: at most {_MOST_NODES} can be told to other ranks.")
            fill = [0] * (_MOST_NODES - len(tree))
            content += [len(tree), tree.top_k, *tree.tokens, *fill, *tree.parents, *fill]
        self._exchange(content)

    def _hear(self) -> None:
        content = self._exchange().tolist()
        self._sequences.in_step = bool(content[0])
        self._trees = []
        for row in range(self._sequences.batch):
            start = 1 + row * self._each
            count = content[start]
            tokens, parents = content[start + 2 :], content[start + 2 + _MOST_NODES :]
            tree = TokenTree.from_parents(tokens[:count], parents[:count])
            tree.top_k = content[start + 1] if self._tells_top_k else 0
            self._trees.append(tree)


class _TreeOfRankZero:
    """A sequence's drafter on every rank (a :class:`jacobi.Drafter`)."""

    def __init__(self, ranks: TensorParallel, row: int, drafter: Drafter) -> None:
        self._ranks, self._row, self._drafter = ranks, row, drafter

    def draft(self, room: int) -> TokenTree:
        return self._ranks.tree(self._row, self._drafter, room)

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        if self._ranks.leads:
            self._drafter.learn(tree, greedy, path, successors)

r"""The best trees, given how often each head's candidates are right (Cai et al., arXiv 2401.10774, section 2.3.3).

``a_k(i)`` is the share of tokens that head k's candidate of rank i predicts. Taking heads as independent, a node is
accepted with the product of the a along its path, its *value*; the sum of all values is the number of drafted tokens
that a pass is expected to keep::

    a_0 = 0.6, 0.2           0.6        0.2      the best tree of 3 nodes
    a_1 = 0.5, 0.1          /   \      /         keeps 0.6 + 0.3 + 0.2 = 1.1
                          0.3   0.06  0.1        tokens a pass

No child is worth more than its parent, so the most valuable candidates, one by one, are the best tree of every size.
"""

import json
import math
from dataclasses import dataclass
from heapq import heappop, heappush
from os import PathLike
from typing import Any, Self

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.heads.medusa.choices import MAX_NODES, TREE_FORMAT, TREE_KIND, ChoiceTree, read_tree


@dataclass(frozen=True)
class HeadAccuracies:
    """The table a: how often each candidate of each head was right.

    A LookaheadError if it is empty or ragged, a share is not from 0 to 1, or a head's shares sum to more than 1.
    """

    accuracies: tuple[tuple[float, ...], ...]  # shares [head][rank]; the same number of ranks for every head
    samples: tuple[int, ...]  # [head], how many tokens each share is of

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracies", tuple(tuple(map(float, row)) for row in self.accuracies))
        object.__setattr__(self, "samples", tuple(self.samples))
        widths = {len(row) for row in self.accuracies}
        if len(widths) != 1 or 0 in widths:
            raise LookaheadError(
                f"The accuracies have {sorted(widths)} ranks a head: expected at least one head, and the same number "
                "of ranks, at least 1, for every head."
            )
        if len(self.samples) != len(self.accuracies):
            told = f"There are samples for {len(self.samples)} heads and accuracies for {len(self.accuracies)}"
            raise LookaheadError(f"{told}: expected one number a head.")
        for head, row in enumerate(self.accuracies):
            for rank, share in enumerate(row):
                if not 0.0 <= share <= 1.0:
                    raise LookaheadError(f"The accuracy of rank {rank} of head {head} is {share}: expected 0 to 1.")
            if sum(row) > 1.0 + 1e-6:
                raise LookaheadError(
                    f"The accuracies of head {head} sum to {sum(row):.4g}: expected at most 1, as one candidate at "
                    "most is right. Give each rank's own share, not the share up to it."
                )

    def top(self, count: int) -> tuple[float, ...]:
        """For each head, how often one of its ``count`` best candidates was right."""
        return tuple(sum(row[:count]) for row in self.accuracies)


@dataclass(frozen=True, kw_only=True)
class CalibratedTree:
    """A tree with the table that it was grown from; :func:`lookahead.medusa.choices_from` takes it, or its file."""

    choices: ChoiceTree
    accuracies: HeadAccuracies
    model: str | None = None  # like the next, a name or folder, for people who read the file
    heads: str | None = None

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Those of ``choices``."""
        return self.choices.paths

    @property
    def expected_length(self) -> float:
        """Drafted tokens that a pass is expected to keep."""
        return expected_length(self.accuracies, self.choices)

    def to_dict(self) -> dict[str, Any]:
        """The content of the tree's file, as plain data."""
        return {
            "format": TREE_FORMAT,
            "kind": TREE_KIND,
            "paths": [list(path) for path in self.paths],
            "accuracies": [list(row) for row in self.accuracies.accuracies],
            "samples": list(self.accuracies.samples),
            "expected_length": self.expected_length,
            "model": self.model,
            "heads": self.heads,
        }

    def save(self, file: str | PathLike[str]) -> None:
        """Write the tree to a JSON file, whole or not at all; a LookaheadError if that fails."""
        try:
            write_text(str(file), json.dumps(self.to_dict()) + "\n")
        except OSError as error:
            raise LookaheadError(f"The tree cannot be written to {file}: {error}.") from error

    @classmethod
    def load(cls, file: str | PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; a LookaheadError if it is something else, or damaged."""
        choices, document = read_tree(file)
        try:
            table = HeadAccuracies(document["accuracies"], document["samples"])
            names = {field: document.get(field) for field in ("model", "heads")}
            tree = cls(choices=choices, accuracies=table, **names)
            expected_length(table, choices)
        except (KeyError, TypeError, ValueError) as error:  # a LookaheadError is a ValueError
            raise LookaheadError(f"The tree file {file} has no valid table of accuracies: {error}.") from error
        return tree


def expected_length(accuracies: HeadAccuracies, choices: ChoiceTree) -> float:
    """How many drafted tokens a pass is expected to keep; a LookaheadError if the table lacks a path's head or rank."""
    table = accuracies.accuracies
    values: dict[tuple[int, ...], float] = {(): 1.0}
    for path in choices.paths:
        if len(path) > len(table) or path[-1] >= len(table[0]):
            raise LookaheadError(
                f"Path {list(path)} is not covered: expected at most {len(table)} ranks, one a head, each below "
                f"{len(table[0])}. Calibrate with more heads or ranks."
            )
        values[path] = values[path[:-1]] * table[len(path) - 1][path[-1]]
    return math.fsum(values[path] for path in choices.paths)


def grow_tree(accuracies: HeadAccuracies, nodes: int) -> ChoiceTree:
    """The tree of at most ``nodes`` nodes, its root not counted, with the greatest expected length.

    What counts is how often a rank was right, not the rank. Candidates that were never right are left out, so the tree
    may be smaller than asked for. A LookaheadError if ``nodes`` is not 1 to 4096, or the first head was never right.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise LookaheadError(f"A tree cannot have {nodes!r} nodes: expected 1 to {MAX_NODES}, the root left out.")
    table = accuracies.accuracies
    orders = [sorted((rank for rank, share in enumerate(row) if share), key=lambda rank: -row[rank]) for row in table]
    if not orders[0]:
        raise LookaheadError(
            f"No candidate of the first head was right in {accuracies.samples[0]} samples, so no tree is worth a node. "
            "Train the heads further, or calibrate with more ranks or prompts."
        )
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = []

    def offer(parent: tuple[int, ...], index: int, value: float) -> None:
        depth = len(parent)
        if depth < len(table) and index < len(orders[depth]):
            rank = orders[depth][index]
            heappush(heap, (-value * table[depth][rank], depth, (*parent, rank), index, value))

    paths: list[tuple[int, ...]] = []
    offer((), 0, 1.0)
    while heap and len(paths) < nodes:
        negative, _, path, index, above = heappop(heap)
        paths.append(path)
        offer(path[:-1], index + 1, above)
        offer(path, 0, -negative)
    return ChoiceTree(tuple(paths))

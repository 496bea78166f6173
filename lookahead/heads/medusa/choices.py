r"""Which candidates of the heads a pass tries: ``medusa_choices`` in all their forms.

A choice is a path of ranks: the candidate of that rank of head 0, below it one of head 1, and so on; rank 0 is a head's
best (Cai et al., arXiv 2401.10774, section 2.1.2). The root, the model's own next token, is not written down::

    [[0], [0, 0], [1]]      root - 1st of head 0 - 1st of head 1
                                 \ 2nd of head 0
"""

import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError, TokenTree, branch_mask
from lookahead.heads.storage import read_json

MAX_NODES = 4096  # of a tree, without its root
TREE_FORMAT = 1  # of the file of a calibrated tree
TREE_KIND = "lookahead-medusa-tree"

_FORMS = (
    "expected a preset's name, paths like [[0], [0, 0], [1]], candidates for each head like [10, 7, 3], or a "
    "calibrated tree"
)


@dataclass(frozen=True)
class ChoiceTree:
    """A tree of candidates, given by its paths in any order; missing prefixes are added, so leaves alone will do.

    ``paths`` are then sorted by length and by rank: path number i is node i + 1 of :meth:`token_tree`. A LookaheadError
    if there are none, one is empty or given twice, a rank is no natural number, or there are more than 4096 nodes.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        given = [_path(path) for path in self.paths]
        if not given:
            raise LookaheadError("The choices are empty: expected at least one path, for example [[0]].")
        path, times = Counter(given).most_common(1)[0]
        if times > 1:
            raise LookaheadError(f"Path {list(path)} is given {times} times: expected every path once.")
        longest = max(given, key=len)
        if len(longest) > MAX_NODES:
            raise LookaheadError(f"A path has {len(longest)} ranks: expected at most {MAX_NODES}, one a head.")
        closed = {path[:length] for path in given for length in range(1, len(path) + 1)}
        if len(closed) > MAX_NODES:
            raise LookaheadError(f"The tree has {len(closed)} nodes: expected at most {MAX_NODES}. Leave paths out.")
        object.__setattr__(self, "paths", tuple(sorted(closed, key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        """The length of the longest path, which is the number of heads in use."""
        return len(self.paths[-1])

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of nodes at each depth, from 1 on."""
        counts = Counter(map(len, self.paths))
        return tuple(counts[depth] for depth in range(1, self.depth + 1))

    @property
    def candidates(self) -> tuple[int, ...]:
        """How many candidates of each head are needed: its highest rank, plus 1."""
        return tuple(1 + max(path[depth] for path in self.paths if len(path) > depth) for depth in range(self.depth))

    def token_tree(self) -> TokenTree:
        """The tree with ranks as tokens: node 0 is the root, node i + 1 is path number i."""
        return TokenTree.from_paths(0, self.paths)

    def check(self, num_heads: int, vocab_size: int) -> None:
        """Raise a LookaheadError if a path is deeper than there are heads, or a rank is beyond the vocabulary."""
        deepest = self.paths[-1]
        if len(deepest) > num_heads:
            raise LookaheadError(
                f"Path {list(deepest)} is {len(deepest)} deep, and there are {num_heads} heads: expected at most one "
                "rank for each head. Shorten the paths, or use more heads."
            )
        self.check_ranks(vocab_size, f"the vocabulary has {vocab_size} tokens")

    def check_ranks(self, count: int, why: str) -> None:
        """Raise a LookaheadError if a rank is not below ``count``."""
        for path in self.paths:
            if path[-1] >= count:
                expected = f"expected ranks from 0 to {count - 1}"
                raise LookaheadError(f"Path {list(path)} asks for rank {path[-1]}, and {why}: {expected}.")


@lru_cache
def presets() -> dict[str, list[list[int]]]:
    """The published trees by name, each of 63 nodes and the root; not to be changed."""
    return json.loads((Path(__file__).parent / "presets.json").read_text("utf-8"))


def choices_from(value: Any) -> ChoiceTree:
    """Read a tree in any of its forms.

    - a preset's name;
    - paths like ``[[0], [0, 0], [1]]``, whose prefixes may be left out;
    - the number of candidates at each depth like ``[10, 7, 3]``, of which all combinations are taken;
    - a calibrated tree: the object, the content of its file, or the file's name.

    Raises:
        LookaheadError: none of these, an unknown name, a file that cannot be read, or a tree that is not valid.
    """
    if isinstance(value, ChoiceTree):
        return value
    if isinstance(value, str | PathLike):
        return _named(value)
    if isinstance(value, Mapping):
        return _from_document(value, "The calibrated tree")
    if hasattr(value, "paths"):
        return ChoiceTree(tuple(map(tuple, value.paths)))
    value = _plain(value)
    if not isinstance(value, Iterable):
        raise LookaheadError(f"Choices cannot be {value!r}: {_FORMS}.")
    items = list(value)
    numbers = [item for item in items if not _is_path(item)]
    if len(numbers) == len(items) and items:
        return _dense(items)
    if numbers:
        raise LookaheadError(f"The choices mix paths with {numbers[0]!r}: {_FORMS}.")
    return ChoiceTree(tuple(items))


def read_tree(file: str | PathLike[str]) -> tuple[ChoiceTree, dict[str, Any]]:
    """A calibrated tree of a file, and all that the file holds; a LookaheadError if it is something else."""
    document = read_json(Path(file).expanduser(), f"The tree file {file}")
    return _from_document(document, f"The tree file {file}"), document


def buffers(choices: Any, topk: int = 10, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tree as FasterDecoding/Medusa's ``generate_medusa_buffers`` gives it, for ``topk`` candidates of each head.

    Nodes are numbered by length and then by rank, the root first. In the table of candidates the root has index 0, and
    the candidate of rank i of head k (from 0) has index ``1 + k * topk + i``. The choices ``[[0], [0, 0], [1]]`` with
    ``topk=10`` give::

        tree_indices         [0, 1, 2, 11]
        medusa_position_ids  [0, 1, 1, 2]
        retrieve_indices     [[0, 1, 3], [0, 2, -1]]
        medusa_attn_mask     [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]

    Returns:
        ``tree_indices``: the index of each node in the table, int64 ``[node]``.
        ``medusa_position_ids``: the depth of each node, int64 ``[node]``.
        ``retrieve_indices``: the nodes from the root to each leaf, int64 ``[leaf, depth + 1]``, the last leaf first,
        shorter rows padded with -1.
        ``medusa_attn_mask``: 1 where the row's node sees the column's, else 0, float32 ``[1, 1, node, node]``.

    Raises:
        LookaheadError: the choices are not valid, or ``topk`` does not cover their ranks.
    """
    tree = choices_from(choices)
    if not _natural(topk):
        raise LookaheadError(f"buffers(topk=) cannot be {topk!r}: expected an integer from 1 on.")
    tree.check_ranks(topk, f"topk is {topk}")
    nodes = tree.token_tree()
    indices = [0] + [1 + topk * (len(path) - 1) + path[-1] for path in tree.paths]
    leaves = [node for node in range(len(nodes) - 1, 0, -1) if not nodes.children[node]]
    routes = [nodes.path(leaf) for leaf in leaves]
    padded = [route + [-1] * (tree.depth + 1 - len(route)) for route in routes]
    return {
        "tree_indices": torch.tensor(indices, device=device),
        "medusa_position_ids": torch.tensor(nodes.depths, device=device),
        "retrieve_indices": torch.tensor(padded, device=device),
        "medusa_attn_mask": branch_mask(nodes.parents)[None, None].to(device, torch.float32),
    }


def _named(name: str | PathLike[str]) -> ChoiceTree:
    if isinstance(name, str):
        if name in presets():
            return ChoiceTree(tuple(map(tuple, presets()[name])))
        if not name.endswith(".json") and not Path(name).expanduser().is_file():
            told = f"expected one of {', '.join(presets())}, or the file of a calibrated tree."
            raise LookaheadError(f"There is no preset and no file {name!r}: {told}")
    return read_tree(name)[0]


def _from_document(document: Mapping[str, Any], name: str) -> ChoiceTree:
    for field, expected in (("kind", TREE_KIND), ("format", TREE_FORMAT)):
        if (found := document.get(field)) != expected or isinstance(found, bool):
            raise LookaheadError(
                f"{name} has {field} {found!r}: expected {expected!r}. Make it again with `lookahead tree`."
            )
    paths = document.get("paths")
    if not isinstance(paths, list | tuple):
        raise LookaheadError(f"{name} has no paths: expected a list of lists of ranks, got {paths!r}.")
    try:
        return ChoiceTree(tuple(paths))
    except LookaheadError as error:
        raise LookaheadError(f"{name} is not valid. {error}") from error


def _dense(counts: Sequence[Any]) -> ChoiceTree:
    nodes, width = 0, 1
    for depth, count in enumerate(counts, start=1):
        if not _natural(count):
            raise LookaheadError(
                f"The choices {list(counts)} ask for {count!r} candidates: expected an integer from 1 on for each head."
            )
        width *= int(count)
        nodes += width
        if nodes > MAX_NODES:
            raise LookaheadError(
                f"The choices {list(counts)} have {nodes} nodes down to depth {depth}: expected at most {MAX_NODES} in "
                "all. Take fewer candidates, or name the paths."
            )
    return ChoiceTree(tuple(product(*(range(int(count)) for count in counts))))


def _path(path: Any) -> tuple[int, ...]:
    path = _plain(path)
    if not _is_path(path):
        raise LookaheadError(f"A path cannot be {path!r}: expected ranks like [0, 2], one a head.")
    ranks = list(path)
    if not ranks:
        raise LookaheadError("A path is empty: expected ranks like [0, 2]; the root is there without a path.")
    if bad := [rank for rank in ranks if _natural(rank) is None]:
        raise LookaheadError(f"Path {ranks} has rank {bad[0]!r}: expected integers from 0 on, 0 is the best.")
    return tuple(_natural(rank) or 0 for rank in ranks)


def _is_path(value: Any) -> bool:
    return isinstance(_plain(value), Iterable) and not isinstance(value, str | bytes | Mapping)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _natural(value: Any) -> int | None:
    """An integer from 0 on; None for anything else."""
    try:
        number = operator.index(_plain(value))
    except TypeError:
        return None
    return number if number >= 0 and not isinstance(value, bool) else None

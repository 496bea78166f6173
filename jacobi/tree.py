"""Token trees, and the one rule of who sees whom that every strategy shares.

A draft is a tree of tokens under a root, the last token that is already decided. One forward pass scores every node,
and a node sees exactly what it would see in plain decoding: the text so far, its ancestors and itself.

The papers' drafts are trees: the lookahead window (Fu et al., arXiv 2402.02057, section 3) is a *comb*, its guesses a
*trie*, a Jacobi block (Santilli et al., ACL 2023) a *chain*, Medusa's candidates (Cai et al., arXiv 2401.10774) paths.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from jacobi.errors import LookaheadError


class TokenTree:
    """A growing tree of drafted tokens; node 0 is the root, and a parent always comes before its children.

    Equal siblings are one node: growing a path that is partly there only adds what is new, so a shared prefix is
    scored once. The paths ``the cat sat`` and ``the dog`` under the root ``<s>``::

        <s> - the - cat - sat        node      0    1    2    3    4
               |                     tokens   <s>  the  cat  sat  dog
               + - dog               parents  -1    0    1    2    1
                                     depths    0    1    2    3    2

    Attributes:
        tokens, parents, depths: as drawn; a node's position is the root's position plus its depth.
        children: for each node, its children by token id, in the order in which they were added.
        top_k: how many of the model's best next tokens the drafter wants to know at every node; 0 = none.
        drawn_from: for a node, the probabilities, by token, from which its children were drawn, one after the other and
            each at most once (see :func:`jacobi.reject`). None = no child was drawn by chance.
    """

    __slots__ = ("children", "depths", "drawn_from", "parents", "tokens", "top_k")

    def __init__(self, root: int) -> None:
        self.tokens: list[int] = [root]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.children: list[dict[int, int]] = [{}]
        self.top_k = 0
        self.drawn_from: dict[int, Mapping[int, float]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TokenTree(tokens={self.tokens}, parents={self.parents})"

    def add(self, parent: int, token: int) -> int:
        """Return the child of node ``parent`` that holds ``token``, made if it is not there yet."""
        siblings = self.children[parent]
        node = siblings.get(token)
        if node is None:
            node = siblings[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.children.append({})
        return node

    def extend(self, node: int, tokens: Iterable[int]) -> int:
        """Grow the chain ``tokens`` below ``node`` and return its last node."""
        for token in tokens:
            node = self.add(node, token)
        return node

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` nodes, from 1 up."""
        for node in range(len(self.tokens) - 1, count - 1, -1):
            del self.children[self.parents[node]][self.tokens[node]]
        del self.tokens[count:], self.parents[count:], self.depths[count:], self.children[count:]
        if self.drawn_from is not None:
            self.drawn_from = {node: drawn for node, drawn in self.drawn_from.items() if node < count}

    def grow_comb(self, levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """Grow the lookahead window below the root and return its nodes, W a level; level 0 has the root in front.

        Level 0 is a spine of W-1 tokens. A tooth hangs from each of its W nodes, of which the root is the first: column
        i of level l >= 1 sits at depth l+i, below column i of level l-1.
        """
        cells = [self.path(self.extend(0, levels[0]))]
        for level in levels[1:]:
            cells.append([self.add(above, token) for above, token in zip(cells[-1], level, strict=False)])
        return cells

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def mask(self) -> Tensor:
        """Which node sees which: bool ``[node, node]``, row = the one that looks (see :func:`branch_mask`)."""
        return branch_mask(self.parents)

    @classmethod
    def chain(cls, root: int, tokens: Iterable[int]) -> "TokenTree":
        """A single branch, as a Jacobi block is."""
        return cls.from_paths(root, [tokens])

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Iterable[int]]) -> "TokenTree":
        """The trie of ``paths``, each a sequence of token ids below the root."""
        tree = cls(root)
        for path in paths:
            tree.extend(0, path)
        return tree

    @classmethod
    def from_parents(cls, tokens: Sequence[int], parents: Sequence[int]) -> "TokenTree":
        """A tree from its two arrays; equal siblings are merged.

        A LookaheadError if the arrays differ in length or are empty, or a parent does not come before its child.
        """
        if len(tokens) != len(parents) or not tokens:
            raise LookaheadError(
                f"A tree needs one parent for each token: got {len(tokens)} tokens and {len(parents)} parents."
            )
        if parents[0] != -1:
            raise LookaheadError(f"Node 0 is the root and has parent -1: got {parents[0]}.")
        tree = cls(tokens[0])
        nodes = [0]
        for index in range(1, len(tokens)):
            if not 0 <= parents[index] < index:
                raise LookaheadError(
                    f"A parent comes before its child: node {index} names parent {parents[index]}. Sort by depth."
                )
            nodes.append(tree.add(nodes[parents[index]], tokens[index]))
        return tree


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """What each node sees, as bits of one integer: ``[-1, 0, 0, 1]`` gives ``[0b0001, 0b0011, 0b0101, 0b1011]``."""
    seen: list[int] = []  # 70 nodes cost about 15 microseconds
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | (1 << node))
    return seen


def branch_mask(parents: Sequence[int]) -> Tensor:
    """Which node sees which: bool ``[node, node]``; ``[a, b]`` is True if b is a itself or an ancestor of a.

    Branches do not see each other, as neither is above the other. The tree drawn at :class:`TokenTree` gives::

              <s> the cat sat dog
        <s>    T   F   F   F   F
        the    T   T   F   F   F
        cat    T   T   T   F   F
        sat    T   T   T   T   F
        dog    T   T   F   F   T
    """
    count = len(parents)
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(seen.to_bytes(width, "little") for seen in ancestor_bits(parents)), np.uint8)
    bits = np.unpackbits(packed.reshape(count, width), axis=1, count=count, bitorder="little")
    return torch.from_numpy(bits.astype(bool))

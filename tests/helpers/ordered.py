"""Passes over random trees, as attention in the order of the text is given them."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from jacobi import TokenTree
from lookahead.runtime.ordered_attention import attend

LOWEST = torch.finfo(torch.bfloat16).min
DTYPES = torch.bfloat16, torch.float16


class Pass:
    """A pass over one tree a sequence: states of all slots, what is hidden, and where each sequence lies."""

    def __init__(
        self, trees: list[TokenTree], lengths: list[int], pads: list[int], heads: Any, dtype: Any = torch.bfloat16
    ) -> None:
        many, key_heads, channels = heads
        self.trees, self.lengths, self.pads, self.heads = trees, lengths, pads, heads
        self.scale = channels**-0.5
        self.base, self.width = max(lengths), max(map(len, trees))
        slots = self.base + self.width
        self.query = torch.randn(len(trees), many, self.width, channels).to(dtype)
        self.key, self.value = (torch.randn(len(trees), key_heads, slots, channels).to(dtype) for _ in range(2))
        self.mask = torch.full((len(trees), 1, self.width, slots), torch.finfo(dtype).min, dtype=dtype)
        self.sequences = torch.zeros(len(trees), 7 + self.width, dtype=torch.int32)
        for row, (tree, length, pad) in enumerate(zip(trees, lengths, pads, strict=True)):
            self.sequences[row, :3] = torch.tensor([pad, length, self.base])
            self.sequences[row, 5:7] = torch.tensor([0, 1])  # plain decoding has each by itself
            self.sequences[row, 7 : 7 + len(tree)] = torch.tensor(tree.depths)
            self.mask[row, :, :, pad:length] = 0
            for node in range(self.width):
                self.mask[row, 0, node, self.base + node] = 0
                for above in self.path(row, node) if node < len(tree) else []:
                    self.mask[row, 0, node, self.base + above] = 0

    def path(self, row: int, node: int) -> list[int]:
        found = [node]
        while (parent := self.trees[row].parents[found[-1]]) >= 0:
            found.append(parent)
        return found[::-1]

    def ours(self) -> Tensor:
        return attend(self.query, self.key, self.value, self.mask, self.sequences, self.scale)

    def text(self, row: int, node: int, states: Tensor) -> Tensor:
        """The states of a node's text alone, ``[1, head, slot, channel]``."""
        pad, length = self.pads[row], self.lengths[row]
        nodes = [self.base + above for above in self.path(row, node)]
        return torch.cat([states[row : row + 1, :, pad:length], states[row : row + 1][:, :, nodes]], 2)


@st.composite
def passes(draw: Callable[..., Any]) -> Pass:
    torch.manual_seed(draw(st.integers(0, 1000)))
    trees, lengths, pads = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 12)))]
        trees.append(TokenTree.from_parents(list(range(len(parents))), parents))
        pads.append(draw(st.integers(0, 3)))
        lengths.append(pads[-1] + draw(st.integers(1, 140)))
    groups, key_heads = draw(st.sampled_from([(1, 1), (1, 3), (3, 3), (7, 2), (16, 1)]))
    heads = groups * key_heads, key_heads, draw(st.sampled_from([8, 24, 64]))
    return Pass(trees, lengths, pads, heads, draw(st.sampled_from(DTYPES)))

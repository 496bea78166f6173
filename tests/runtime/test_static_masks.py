"""Sizes and masks of passes whose shapes do not change."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import tiny_model
from helpers.views import rules_of
from torch import Tensor

from jacobi import TokenTree
from lookahead.runtime.cuda_graphs.executor import bucket_of, span_of
from lookahead.runtime.masks import MaskBuffer, StaticPlaces, ancestor_words, static_masks, tree_masks

pytestmark = pytest.mark.usefixtures("augmented")


def test_buckets() -> None:
    """Few sizes, never smaller than what is asked for, and 1 for plain decoding."""
    assert [bucket_of(n) for n in (1, 2, 8, 9, 33, 64, 65, 128, 129, 192, 193)] == [
        1, 8, 8, 16, 64, 64, 128, 128, 192, 192, 256,
    ]  # fmt: skip
    for nodes in range(1, 600):
        assert nodes <= bucket_of(nodes) < nodes + 64
        assert bucket_of(bucket_of(nodes)) == bucket_of(nodes)


def test_spans() -> None:
    """Powers of two and one and a half of them."""
    assert [span_of(n) for n in (1, 256, 257, 384, 385, 512, 513, 768, 1025)] == [
        256, 256, 384, 384, 512, 512, 768, 768, 1536,
    ]  # fmt: skip
    assert all(slots <= span_of(slots) <= max(256, 1.5 * slots) for slots in range(1, 5000))


@pytest.mark.parametrize("nodes", [1, 7, 63, 64, 65, 130])
def test_ancestor_words(nodes: int) -> None:
    """Bit by bit what the branch mask says, past the sign bit and past one word."""
    rng = random.Random(nodes)
    tree = TokenTree(0)
    while len(tree) < nodes:
        tree.add(rng.randrange(max(0, len(tree) - 5), len(tree)), rng.randrange(1000))
    words = torch.from_numpy(ancestor_words(tree.parents, 3).copy())
    bits = (words[..., None] >> torch.arange(64)) & 1
    assert torch.equal(bits.flatten(1)[:, :nodes].bool(), tree.mask())
    assert not bits.flatten(1)[:, nodes:].any()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4_flat"])
def test_masks(name: str) -> None:
    """The same as the dynamic path's, and nothing to be seen anywhere else."""
    rng = random.Random(0)
    rules = rules_of(tiny_model(name))
    for _ in range(10):
        trees = []
        for _row in range(3):
            tree = TokenTree(0)
            for _node in range(rng.randint(0, 12)):
                tree.add(rng.randrange(len(tree)), rng.randrange(1000))
            trees.append(tree)
        padding = [rng.choice([0, 3]) for _ in trees]
        lengths = [pad + rng.randint(1, 20) for pad in padding]
        base, width = max(lengths), max(map(len, trees))
        starts = torch.tensor(lengths)[:, None] - torch.tensor(padding)[:, None]
        depths = torch.zeros((3, 16), dtype=torch.long)
        ancestors = torch.from_numpy(ancestor_words([-1] * 16, 1).copy()).repeat(3, 1, 1)
        for row, tree in enumerate(trees):
            depths[row, : len(tree)] = torch.tensor(tree.depths)
            ancestors[row, : len(tree)] = torch.from_numpy(ancestor_words(tree.parents, 1).copy())
        columns = torch.arange(64)
        history = (columns >= torch.tensor(padding)[:, None]) & (columns < torch.tensor(lengths)[:, None])

        def coordinates(
            _: Any, depths: Tensor = depths, starts: Tensor = starts, padding: Any = padding, base: int = base
        ) -> Any:
            nodes = (starts + depths)[:, :width]  # noqa: B023
            return nodes, torch.cat([torch.arange(base) - torch.tensor(padding)[:, None], nodes], dim=1)

        buffer = MaskBuffer(3, torch.float32, torch.device("cpu"))
        expected = tree_masks(rules, trees, base, history[:, :base].numpy(), coordinates, buffer)
        places = StaticPlaces(
            ancestors,
            base + torch.arange(16),
            depths,
            torch.tensor(lengths),
            torch.tensor(padding),
            columns >= torch.tensor(padding)[:, None],
            columns,
            torch.arange(64),
        )
        masks = static_masks(rules, places, torch.empty((3, 1, 16, 64)))
        if not isinstance(masks, dict):
            masks, expected = {None: masks}, {None: expected}
        assert set(masks) == set(expected)
        for kind, mask in masks.items():
            assert mask.shape == (3, 1, 16, 64)
            for row, tree in enumerate(trees):
                nodes = len(tree)
                assert torch.equal(mask[row, 0, :nodes, : base + width], expected[kind][row, 0, :nodes])
                assert (mask[row, 0, :, base + 16 :] < 0).all()
                # What fills up a bucket sees itself, so that no kernel divides nothing by nothing.
                assert torch.equal(mask[row, 0, nodes:, base : base + 16] == 0, torch.eye(16, dtype=torch.bool)[nodes:])


class Elsewhere(MaskBuffer):
    """A mask on a device with memory of its own."""

    def _allocate(self, nodes: int, slots: int) -> None:
        super()._allocate(nodes, slots)
        self._mask = self._mask.clone()


@pytest.mark.parametrize("kind", [MaskBuffer, Elsewhere])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_buffer(batch: int, kind: type[MaskBuffer]) -> None:
    """Over many passes of changing widths, the same as a mask that is made anew for each."""
    rng, rules = random.Random(batch), rules_of(tiny_model("llama"))
    device = torch.device("cpu")
    buffer = kind(batch, torch.float32, device)
    lengths = [rng.randint(1, 9) for _ in range(batch)]
    visible = np.zeros((batch, 2000), bool)
    for row, length in enumerate(lengths):
        visible[row, rng.randrange(length) : length] = True
    for _ in range(120):
        trees = [TokenTree(0) for _ in range(batch)]
        for tree in trees:
            for _node in range(rng.choice([0, 2, 9, 30])):
                tree.add(rng.randrange(len(tree)), rng.randrange(1000))
        base = max(lengths)
        history = visible[:, :base]
        fresh = tree_masks(rules, trees, base, history, no_places, MaskBuffer(batch, torch.float32, device))
        kept = tree_masks(rules, trees, base, history, no_places, buffer, min(lengths))
        assert torch.equal(kept, fresh)
        for row in range(batch):
            written = rng.choice([0, 1, 4])
            visible[row, lengths[row] : lengths[row] + written] = True
            lengths[row] += written


def no_places(trees: Any) -> Any:
    """Where nodes and slots are, which a causal model does not ask."""
    pytest.fail("not asked")

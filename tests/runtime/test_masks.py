"""A fused pass's masks against a loop that asks every rule in words; sizes and masks of passes whose shapes stay."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import tiny_model
from helpers.views import rules_of
from torch import Tensor

from jacobi import TokenTree
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.cuda_graphs.buffers import StaticBuffers, bucket_of, span_of
from lookahead.runtime.masks import MaskBuffer, ancestor_words, tree_masks

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


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    """Any tree of this size: chains, stars and everything between."""
    tree = TokenTree(0)
    while len(tree) < nodes:
        tree.add(rng.randrange(max(0, len(tree) - 4), len(tree)), rng.randrange(1000))
    return tree


@pytest.mark.parametrize("nodes", [1, 7, 63, 64, 65, 130])
def test_ancestor_words(nodes: int) -> None:
    """Bit by bit what the branch mask says, past the sign bit and past one word."""
    tree = random_tree(random.Random(nodes), nodes)
    words = torch.from_numpy(ancestor_words(tree.parents, 3).copy())
    bits = (words[..., None] >> torch.arange(64)) & 1
    assert torch.equal(bits.flatten(1)[:, :nodes].bool(), tree.mask())
    assert not bits.flatten(1)[:, nodes:].any()


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
        trees = [random_tree(rng, rng.choice([1, 3, 10, 31])) for _ in range(batch)]
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


class Rows:
    """A batch in the middle of a decode: how many slots of each row are padding, history, and not yet anything."""

    def __init__(self, rng: random.Random, batch: int) -> None:
        self.padding = [rng.choice([0, 0, 3, 7]) for _ in range(batch)]
        self.lengths = [padding + rng.randint(1, 14) for padding in self.padding]
        self.base = max(self.lengths)
        self.trees = [random_tree(rng, rng.randint(1, 9)) for _ in range(batch)]
        self.width = max(map(len, self.trees))

    def history(self) -> np.ndarray:
        """bool [batch, base]: slots that hold a real token."""
        slots = np.arange(self.base)
        return (slots >= np.array(self.padding)[:, None]) & (slots < np.array(self.lengths)[:, None])

    def place(self, row: int, node: int) -> int:
        """Where a node comes in its row's text, the first real token being 0."""
        return self.lengths[row] - self.padding[row] + self.trees[row].depths[node]

    def coordinates(self, trees: Any) -> tuple[Tensor, Tensor]:
        """Places of nodes and slots, as the model's view of a batch gives them."""
        assert list(trees) == self.trees
        nodes = torch.zeros(len(trees), self.width, dtype=torch.long)
        for row, tree in enumerate(self.trees):
            nodes[row, : len(tree)] = torch.tensor([self.place(row, node) for node in range(len(tree))])
        slots = torch.arange(self.base) - torch.tensor(self.padding)[:, None]
        return nodes, torch.cat([slots, nodes], dim=1)

    def expected(self, kind: str, size: int) -> Tensor:
        """The mask as bool [batch, node, slot], one question at a time."""
        mask = torch.zeros(len(self.trees), self.width, self.base + self.width, dtype=torch.bool)
        for row, tree in enumerate(self.trees):
            for node in range(len(tree)):
                here = self.place(row, node)
                for slot in range(self.padding[row], self.lengths[row]):
                    mask[row, node, slot] = self.allowed(kind, size, here, slot - self.padding[row])
                above = node
                while above >= 0:
                    there = self.place(row, above)
                    mask[row, node, self.base + above] = self.allowed(kind, size, here, there)
                    above = tree.parents[above]
        return mask

    @staticmethod
    def allowed(kind: str, size: int, here: int, there: int) -> bool:
        """Whether a token may look from one place of its text to an earlier one."""
        if kind == "sliding_attention":
            return here - there < size
        if kind == "chunked_attention":
            return here // size == there // size
        return True


def one_row(dtype: torch.dtype = torch.float32) -> MaskBuffer:
    return MaskBuffer(1, dtype, torch.device("cpu"))


def seen(mask: Tensor, rows: Rows) -> Tensor:
    """Which slots an additive mask shows, for real nodes only."""
    assert mask.shape == (len(rows.trees), 1, rows.width, rows.base + rows.width)
    values = set(mask.unique().tolist())
    assert values <= {0.0, torch.finfo(mask.dtype).min}
    shown = mask[:, 0] == 0
    for row, tree in enumerate(rows.trees):
        # A row of nothing but -inf is NaN in some kernels, so a padding node sees something: itself.
        assert torch.equal(shown[row, len(tree) :, rows.base :], torch.eye(rows.width, dtype=torch.bool)[len(tree) :])
        shown[row, len(tree) :] = False
    return shown


CASES = [
    ("llama", {None: ("full_attention", 0)}),
    ("gpt2", {None: ("full_attention", 0)}),
    ("mistral", {None: ("sliding_attention", 6)}),
    ("phi3", {None: ("sliding_attention", 6)}),
    ("qwen2_mixed", {"full_attention": ("full_attention", 0), "sliding_attention": ("sliding_attention", 6)}),
    ("gemma3", {"full_attention": ("full_attention", 0), "sliding_attention": ("sliding_attention", 6)}),
    ("gpt_oss", {"full_attention": ("full_attention", 0), "sliding_attention": ("sliding_attention", 6)}),
    ("llama4", {"full_attention": ("full_attention", 0), "chunked_attention": ("chunked_attention", 8)}),
]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("name", "kinds"), CASES, ids=[name for name, _ in CASES])
def test_against_the_loop(name: str, kinds: dict[str | None, tuple[str, int]], batch: int) -> None:
    """Full, sliding and chunked layers; padded and ragged rows; trees of different sizes."""
    rules = rules_of(tiny_model(name))
    for seed in range(15):
        rows = Rows(random.Random(seed), batch)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            buffer = MaskBuffer(batch, dtype, torch.device("cpu"))
            masks = tree_masks(rules, rows.trees, rows.base, rows.history(), rows.coordinates, buffer)
            masks = masks if isinstance(masks, dict) else {None: masks}
            assert set(masks) == set(kinds)
            for kind, mask in masks.items():
                assert mask.dtype is dtype
                expected = rows.expected(*kinds[kind])
                assert torch.equal(seen(mask, rows), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4_flat"])
def test_static_masks(name: str) -> None:
    """The same as the dynamic path's, and nothing to be seen anywhere else."""
    rules = rules_of(tiny_model(name))
    for seed in range(10):
        rows = Rows(random.Random(seed), 3)
        buffer = MaskBuffer(3, torch.float32, torch.device("cpu"))
        expected = tree_masks(rules, rows.trees, rows.base, rows.history(), rows.coordinates, buffer)
        static = StaticBuffers(3, torch.float32, torch.device("cpu"))
        static.reserve(Extent(0, 0, 64), at_once=True)
        static.padding.copy_(torch.tensor(rows.padding))
        static.shown[:] = torch.arange(64) >= torch.tensor(rows.padding)[:, None]
        inputs = static.inputs_of(16)
        inputs.send(rows.trees, [0] * 3, rows.lengths, rows.base, [[] for _ in rows.trees])
        masks = static.masks(rules, inputs, rows.base + inputs.counting, static.mask_of(16, 64))
        if not isinstance(masks, dict):
            masks, expected = {None: masks}, {None: expected}
        assert set(masks) == set(expected)
        for kind, mask in masks.items():
            assert mask.shape == (3, 1, 16, 64)
            for row, tree in enumerate(rows.trees):
                nodes = len(tree)
                assert torch.equal(mask[row, 0, :nodes, : rows.base + rows.width], expected[kind][row, 0, :nodes])
                assert (mask[row, 0, :, rows.base + 16 :] < 0).all()
                # What fills up a bucket sees itself, so that no kernel divides nothing by nothing.
                own = mask[row, 0, nodes:, rows.base : rows.base + 16]
                assert torch.equal(own == 0, torch.eye(16, dtype=torch.bool)[nodes:])


def test_no_history_mask() -> None:
    """Without padding every slot below the base is history."""
    tree = TokenTree.from_paths(5, [[1, 2], [3]])
    masks = tree_masks(
        rules_of(tiny_model("llama")), [tree], 2, None, lambda trees: pytest.fail("not asked"), one_row()
    )
    drawn = ["".join("T" if value == 0 else "." for value in line) for line in masks[0, 0].tolist()]
    assert drawn == [
        "TTT...",  # the root
        "TTTT..",  # 1
        "TTTTT.",  # 1 2
        "TTT..T",  # 3
    ]


def test_rules_are_not_asked_about_texts_that_every_layer_sees_whole() -> None:
    """Up to the window's length all kinds of layers see the same, in masks that a tracer can tell apart."""
    rules, trees = rules_of(tiny_model("gemma3")), [TokenTree.from_paths(5, [[1, 2], [3]])]
    whole = tree_masks(rules, trees, 2, None, lambda trees: pytest.fail("asked"), one_row(), window=6)
    assert torch.equal(whole["full_attention"], whole["sliding_attention"])
    assert whole["full_attention"] is not whole["sliding_attention"]
    places = torch.tensor([[2, 3, 4, 3]]), torch.tensor([[0, 1, 2, 3, 4, 3]])
    asked = tree_masks(rules, trees, 2, None, lambda trees: places, one_row(), window=5)
    assert torch.equal(asked["sliding_attention"], whole["sliding_attention"])


@pytest.mark.parametrize("base", [0, 1, 77, 1000, 4097])
def test_rows_of_buffered_masks_are_aligned(base: int) -> None:
    """Kernels read several numbers at once, and would copy masks in which they cannot."""
    buffer = MaskBuffer(2, torch.bfloat16, torch.device("cpu"))
    for width in (1, 7, 40):
        mask = buffer.write([TokenTree.chain(0, range(width - 1))] * 2, base, None, base)
        assert mask.shape == (2, 1, width, base + width)
        assert not any(stride % 64 for stride in mask.stride()[:3])

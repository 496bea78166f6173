"""The key/value history against a reference that keeps Python lists."""

import random
from typing import Any

import pytest
import torch
from helpers.models import same_caches
from helpers.refusals import refuses
from torch import Tensor
from transformers import DynamicCache, MistralConfig, StaticCache

from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.cache.tree import TreeCache
from lookahead.support.call import check_cache

# Heads and channels of keys and of values in each layer; latent attention has different ones.
EQUAL = [((2, 4), (2, 4))] * 3
LATENT = [((3, 4), (3, 2)), ((3, 4), (3, 2)), ((1, 5), (2, 4))]


def tree_cache(n_layers: int, capacity: int = 0) -> TreeCache:
    """An empty cache, whose buffers begin with about so many slots."""
    cache = TreeCache([None] * n_layers, n_layers)
    cache.reserve(Extent(capacity, 0))
    return cache


class Reference:
    """Every row's history as a list of slots, each with all layers' keys and values."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in range(batch)]

    def keep(self, states: list[tuple[Tensor, Tensor]], chosen: list[list[int]]) -> None:
        """Append the chosen nodes of a pass, given as [batch, head, node, channel] for each layer."""
        for row, nodes in enumerate(chosen):
            for node in nodes:
                self.rows[row].append([(keys[row, :, node], values[row, :, node]) for keys, values in states])


def new_states(shapes: Any, batch: int, nodes: int, rng: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values [batch, head, node, channel] for every layer."""
    return [
        (
            torch.randn(batch, key[0], nodes, key[1], generator=rng),
            torch.randn(batch, value[0], nodes, value[1], generator=rng),
        )
        for key, value in shapes
    ]


def feed(cache: Any, states: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What a model does with a pass."""
    return [cache.update(keys, values, index) for index, (keys, values) in enumerate(states)]


def after_prompt(shapes: Any, batch: int, length: int, rng: torch.Generator, capacity: int) -> Any:
    """A cache whose prompt has been run and kept, and its reference."""
    cache, reference = tree_cache(len(shapes), capacity), Reference(batch)
    states = new_states(shapes, batch, length, rng)
    feed(cache, states)
    cache.consolidate()
    assert cache.base == length - 1, "the prompt's last token counts as the first pass's only node"
    cache.keep([[0]] * batch)
    reference.keep(states, [list(range(length))] * batch)
    return cache, reference


def check(cache: TreeCache, reference: Reference, returned: list[tuple[Tensor, Tensor]], base: int) -> None:
    """Every row's history is what a model was given back, slot by slot."""
    for row, slots in enumerate(reference.rows):
        for index, (keys, values) in enumerate(returned):
            for slot, layers in enumerate(slots):
                assert slot < base
                assert torch.equal(keys[row, :, slot], layers[index][0])
                assert torch.equal(values[row, :, slot], layers[index][1])


@pytest.mark.parametrize("shapes", [EQUAL, LATENT], ids=["equal", "latent"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("capacity", [0, 70, 1000])
def test_passes(shapes: Any, batch: int, capacity: int) -> None:
    """Trees of any size, rows that keep any of their nodes or none, and buffers that grow on the way."""
    rng, choose = torch.Generator().manual_seed(batch), random.Random(capacity + batch)
    cache, reference = after_prompt(shapes, batch, 5, rng, capacity)
    for _ in range(40):
        nodes = choose.randint(1, 20)
        base = cache.base
        assert cache.get_seq_length() == base == max(cache.lengths)
        states = new_states(shapes, batch, nodes, rng)
        returned = feed(cache, states)
        for (keys, values), (fed_keys, fed_values) in zip(returned, states, strict=True):
            assert keys.shape[2] == values.shape[2] == base + nodes
            assert torch.equal(keys[:, :, base:], fed_keys)
            assert torch.equal(values[:, :, base:], fed_values)
        check(cache, reference, returned, base)
        chosen = []
        for _row in range(batch):
            count = choose.choice([0, 1, 1, 2, 5]) if batch > 1 else choose.randint(1, 5)
            below = sorted(choose.sample(range(1, nodes), min(count, nodes) - 1)) if count > 1 and nodes > 1 else []
            chosen.append([0, *below] if count else [])
        cache.keep(chosen)
        reference.keep(states, chosen)
        assert cache.lengths == [len(row) for row in reference.rows]


def test_no_key_value_cache() -> None:
    """A model that fills no layer cannot be followed."""
    refuses("fills no key/value cache", tree_cache(2).consolidate)


def new_cache(kind: str) -> Any:
    """An empty cache of two layers that stores key/value heads [2, 4]."""
    config = MistralConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=5
    )
    if kind == "bare":
        return DynamicCache()
    if kind == "full":
        config.sliding_window = None
    if kind == "mixed":
        config.layer_types = ["full_attention", "sliding_attention"]
    if kind == "static":
        config.sliding_window = None
        return StaticCache(config=config, max_cache_len=60)
    return DynamicCache(config=config)


KINDS = ["bare", "full", "sliding", "mixed", "static"]
TWO = [((2, 4), (2, 4))] * 2


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 20])
@pytest.mark.parametrize("new", [0, 1, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_load_and_store(kind: str, length: int, new: int) -> None:
    """A history goes on where another cache left it, and comes back as that cache itself would have it."""
    rng = torch.Generator().manual_seed(length)
    states, more = new_states(TWO, 2, length, rng), new_states(TWO, 2, 1 + new, rng)
    given, expected = new_cache(kind), new_cache(kind)
    for cache in (given, expected):
        feed(cache, states)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in given.layers]

    tree = tree_cache(2)
    tree.load(given)
    assert tree.get_seq_length() == length
    feed(tree, [(keys[:, :, :1], values[:, :, :1]) for keys, values in more])
    tree.consolidate()
    tree.keep([[0], [0]])
    if new:
        feed(tree, [(keys[:, :, 1:], values[:, :, 1:]) for keys, values in more])
        tree.keep([list(range(new))] * 2)
    for layer, (keys, values) in zip(given.layers, held, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)

    tree.store(given)
    for index in range(1 + new):
        feed(expected, [(keys[:, :, index : index + 1], values[:, :, index : index + 1]) for keys, values in more])
    same_caches(given, expected, 0.0)
    # What was stored is the cache's own: it goes on like any other, and the buffer can be thrown away.
    following = new_states(TWO, 2, 1, rng)
    tree.keep([[], []])
    feed(tree, new_states(TWO, 2, 3, rng))
    for (keys, values), (expected_keys, expected_values) in zip(
        feed(given, following), feed(expected, following), strict=True
    ):
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)


def test_what_cannot_be_told_of_a_cache_is_not_compared() -> None:
    """And what is none of transformers' caches is refused."""
    known: Any = {"n_layers": 2, "batch": 2, "heads": None, "channels": None, "slots": 0}
    cache = new_cache("full")
    feed(cache, new_states(TWO, 2, 7, torch.Generator()))
    check_cache(cache, **known)
    refuses("A tuple cannot keep chosen slots", check_cache, ((torch.zeros(1), torch.zeros(1)),), **known)

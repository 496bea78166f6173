"""What every source promises."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, Successors, TokenTree
from lookahead.sources import PoolSource, RecyclingSource, Source, SuccessorTable, SuffixSource
from lookahead.sources.recycling import BEST

SOURCES: dict[str, Callable[[], Source]] = {
    "suffix": SuffixSource,
    "recycling": lambda: RecyclingSource(SuccessorTable(64)),
    "pool": PoolSource,
}


def random_tree(rng: random.Random, root: int, nodes: int, vocab: int) -> TokenTree:
    tree = TokenTree(root)
    for _ in range(nodes):
        tree.add(rng.randrange(len(tree)), rng.randrange(vocab))
    return tree


def random_path(rng: random.Random, tree: TokenTree, vocab: int) -> Path:
    node, path = 0, Path()
    while True:
        path.nodes.append(node)
        token = rng.choice([*tree.children[node], rng.randrange(vocab)])
        path.tokens.append(token)
        if token not in tree.children[node]:
            return path
        node = tree.children[node][token]


def random_successors(rng: random.Random, count: int, vocab: int) -> Successors:
    tokens = [rng.sample(range(vocab), min(vocab, BEST)) for _ in range(count)]
    logits = [sorted((rng.uniform(-9.0, 9.0) for _ in line), reverse=True) for line in tokens]
    return Successors(np.array(tokens, np.int32), np.array(logits, np.float32))


@pytest.mark.parametrize("name", SOURCES)
@examples(40)
@given(prompt=st.lists(st.integers(0, 3), max_size=20), seed=st.integers(0, 10**6), gathered=st.booleans())
def test_every_source_keeps_its_promises(name: str, prompt: list[int], seed: int, gathered: bool) -> None:
    """Distinct candidates, kinds that have priors, states that a step leaves alone, and a start without a prompt."""
    rng, vocab, source = seeded(seed), 4, SOURCES[name]()
    assert source.name == name
    assert all(0.0 < prior < 1.0 for prior in source.priors)
    source.start(prompt, random_successors(rng, rng.randrange(1, 5), vocab) if gathered else None)
    root = prompt[-1] if prompt else 0
    for _ in range(8):
        states: list[Any] = [source.root()]
        for _ in range(10):
            state = rng.choice(states)
            kept = copy.deepcopy(state)
            offered = source.propose(state)
            assert len({token for token, _ in offered}) == len(offered)
            assert all(0 <= token < vocab for token, _ in offered)
            assert all(type(kind) is int and 0 <= kind < len(source.priors) for _, kind in offered)
            states.append(source.step(state, rng.randrange(vocab)))
            assert state == kept
            assert list(source.propose(state)) == list(offered), "looking around changes no answer"
        tree = random_tree(rng, root, rng.randrange(6), vocab)
        path = random_path(rng, tree, vocab)
        source.learn(tree, path, random_successors(rng, len(tree), vocab) if gathered else None)
        root = path.tokens[-1]

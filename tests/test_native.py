"""What is built in C does what its twins in Python do."""

import logging
import os
import random
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafting import TableSource
from helpers.marks import built
from helpers.models import counting_model, prompts, same_as_plain, tiny_model
from helpers.native import either
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

import lookahead
from jacobi import Successors
from lookahead import Lookahead, _native
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.best_first import BestFirstTree
from lookahead.draft.pass_costs import Cut, least_slopes
from lookahead.sources import SuccessorTable
from lookahead.sources.recycling import RecyclingSource

PRIORS = (0.9, 0.6, 0.3, 0.1)


def test_make_builds_it_where_there_is_a_compiler() -> None:
    compiler, header = shutil.which(os.environ.get("CC", "cc")), Path(sysconfig.get_paths()["include"], "Python.h")
    made = Path(sys.prefix, "installed").exists()  # by make
    assert _native.speedups is not None or not (made and compiler and header.exists())


def test_a_missing_c_part_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first call that drafts, and not by those that decode plainly."""
    monkeypatch.setattr(logging.getLogger("lookahead"), "disabled", False)  # as programs may leave it that set up logs
    model = tiny_model("llama")
    lookahead.augment_all()
    monkeypatch.setattr(_native, "speedups", None)
    _native.warn_if_missing.cache_clear()
    model.generate(**prompts(1), max_new_tokens=4)
    assert "C part" not in caplog.text
    for _ in range(2):
        model.generate(**prompts(1), max_new_tokens=4, use_lookahead=True)
    assert caplog.text.count("Lookahead's C part is missing") == 1
    assert "pip install -v" in caplog.text
    _native.warn_if_missing.cache_clear()


@built
@examples(300)
@given(st.integers(0, 1 << 30))
def test_trees_are_the_same(seed: int) -> None:
    """Nodes, values, what was offered and asked, to the last bit."""
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    tables: list[dict[tuple[int, ...], list[tuple[int, int]]]] = [{}, {}]
    for _ in range(rng.randrange(1, 60)):
        above, table = rng.choice(paths), rng.choice(tables)
        tokens = rng.sample(range(9), rng.randrange(1, 6))
        table[above] = [(token, rng.randrange(4)) for token in tokens]
        paths += [(*above, token) for token in tokens]
    count = rng.randrange(1, 70)
    times = list(np.cumsum([rng.random() * rng.choice([0.0, 0.3]) for _ in range(count)]) + 1.0)
    settings: dict[str, Any] = {
        "floor": rng.choice([0.0, 0.05]),
        "gain": rng.choice([1.0, 1.1]),
        "ask_ms": rng.choice([0.0, 0.01]),
        "beside_ms": rng.choice([0.0, 0.2]),
        "cut": rng.choice([None, Cut(0.1, 0.02)]),
    }
    chain, room = rng.random() < 0.2, rng.randrange(8)

    def grow() -> tuple[Any, ...]:
        sources = [TableSource(name, table, PRIORS) for name, table in zip("ab", tables, strict=True)]
        trees = BestFirstTree(sources, Acceptance(sources), chain)
        tree, values = trees.grow(7, room, list(map(float, times)), least_slopes(times), **settings)
        return (
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.children,
            values,
            trees.asks,
            trees.sources_of(tree),
            trees.asked,
        )

    in_c, python = either(grow)
    assert in_c == python


@built
@examples(100)
@given(st.integers(0, 1 << 30))
def test_rows_are_found_the_same(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([3, 100, 50_000])
    table = SuccessorTable(1 << rng.randrange(12), vocab)

    def context() -> tuple[int, int, int]:
        return rng.randrange(-1, vocab), rng.randrange(-1, vocab), rng.randrange(vocab)

    for _ in range(12):
        root, count = context(), rng.choice([1, 17, 64, 65, 200])
        parents = [-1, *(rng.randrange(node) for node in range(1, count))]
        tokens = [root[2], *(rng.randrange(vocab) for _ in range(1, count))]
        said = Successors(np.array([[rng.randrange(vocab)]] * count, np.int32), np.zeros((count, 1), np.float32))
        table.put(root, parents, tokens, said)
    for each in [context() for _ in range(30)]:
        in_c, python = either(lambda each=each: RecyclingSource(table).propose((each, 0)))
        assert in_c == python


@built
def test_what_is_wrong_is_said() -> None:
    speedups, table = _native.speedups, SuccessorTable()
    table.put((1, 2, 3), [-1], [3], Successors(np.array([[4, 5]], np.int32), np.array([[1.0, 0.0]], np.float32)))
    at = table.rows, table.written
    settings = (1.0, 0, 1.0, 0.0), 2, (0.5, 2.0, 2.7, 3.3, 0.4, 50.0), np.array([0.1, 0.2]).data, 8, 0
    with pytest.raises(TypeError, match="6 arguments"):
        speedups.heard(table.rows)
    with pytest.raises(TypeError, match="three tokens"):
        speedups.heard(settings, *at, (1, 2), None, [])
    with pytest.raises(ValueError, match="a list, and less than 10 rows"):
        speedups.heard(settings, *at, (1, 2, 3), None, ())
    with pytest.raises(ValueError, match="expected entries"):
        speedups.heard(settings, (*table.rows[:2], np.zeros((9, 2), np.int32), table.rows[3]), 1, (1, 2, 3), None, [])
    with pytest.raises(ValueError, match="a row of the table"):
        speedups.heard(settings, *at, (1, 2, 9), None, [(-1, 1.0)])
    assert speedups.heard(settings, *at, (1, 2, 3), None, [])
    lines, values, ids = np.zeros((2, 9), np.float32), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int32)
    speedups.best_of(lines, values, ids)
    shared = np.zeros((2, 9), np.float32)
    for wrong, error in (
        ((lines.astype(np.float64), values, ids), "lines: expected 2 axes of 'f'"),
        ((lines, values[0], ids), "values: expected 2 axes of 'f', 4 bytes each; got 1"),
        ((lines, values, ids[:, ::2]), "ids: expected"),
        ((lines.astype(np.float16), values, ids), "got 2 of 'e'"),
        ((lines[:1], values, ids), "of each of 1 lines"),
        ((lines[:, :2], values, ids), "from 1 to 2 entries"),
        ((shared, shared[:, :3], ids), "lines and values share memory"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            speedups.best_of(*wrong)


@built
@pytest.mark.parametrize("wrong", [[(1, 9)], [(1, -1)], [7], [("a", 0)]], ids=str)
def test_candidates_that_are_none(wrong: list[Any]) -> None:
    """Sources of the caller's own are checked before; nothing breaks if one of ours is wrong."""
    source = TableSource("a", {(): wrong}, PRIORS)
    with pytest.raises((TypeError, IndexError)):
        BestFirstTree([source], Acceptance([source])).grow(7, 3, [1.0] * 4, [0.0] * 4)


@built
def test_errors_of_a_source_come_through() -> None:
    class Failing(TableSource):
        def propose(self, state: Any) -> Any:
            if state:
                raise KeyError("no candidates")
            return super().propose(state)

    source = Failing("a", {(): [(1, 0), (2, 0)]}, PRIORS)
    with pytest.raises(KeyError, match="no candidates"):
        BestFirstTree([source], Acceptance([source])).grow(7, 3, [1.0] * 4, [0.0] * 4)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "top_p": 0.9, "top_k": 0}], ids=str)
def test_texts_without_it(settings: dict[str, Any]) -> None:
    """A machine without a compiler writes plain decoding's text, too, from as good drafts. No two logits are equal,
    because torch leaves open which of such is found first."""
    counting = counting_model(sharpness=6.0)
    weight = counting.get_output_embeddings().weight.data
    weight += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    for model in (counting, tiny_model("llama")):

        def passes(model: Any = model) -> int:
            same_as_plain(model, prompts(2), Lookahead(nodes=12), max_new_tokens=30, **settings)
            torch.manual_seed(0)
            strategy = Lookahead(nodes=12, seed=0)  # which forgets what earlier calls learnt
            told = {"lookahead_strategy": strategy, "return_dict_in_generate": True, "max_new_tokens": 30}
            return int(model.generate(**prompts(1), **told, **settings).stats.steps)

        in_c, python = either(passes)
        assert in_c == python

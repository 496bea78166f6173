"""What calls remember of a model, and when it is forgotten."""

import copy
from pathlib import Path as FilePath
from typing import Any

import pytest
from helpers.automatic import FLAT, NAMES, STEEP, USUAL, drafted, memory_of, nodes_of
from helpers.models import VOCAB, fresh_model, prompts, run

from lookahead import Lookahead, tuning
from lookahead.draft import memory
from lookahead.draft.context import RowContext
from lookahead.draft.latency import StepTimes
from lookahead.tuning import describe

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(("batch", "sample"), [(1, True), (3, False)])
@pytest.mark.parametrize("curve", [FLAT, USUAL, STEEP], ids=["flat", "usual", "steep"])
def test_a_seed_and_a_curve_repeat_the_passes(batch: int, sample: bool, curve: StepTimes) -> None:
    """In a process that has decoded other things in between."""
    model, strategy = fresh_model("llama"), Lookahead(seed=5, tuning=curve, sources=NAMES, stats="detailed")
    before = curve.to_dict()
    first = drafted(model, strategy, batch, do_sample=sample)
    drafted(model, Lookahead(), batch)
    second = drafted(model, strategy, batch, do_sample=sample)
    assert nodes_of(first) == nodes_of(second)
    assert [record["tokens"] for record in first.passes] == [record["tokens"] for record in second.passes]
    assert first.sources == second.sources
    assert curve.to_dict() == before, "the caller's curve stays as it is"


def rows_of(model: Any) -> int:
    """How many rows were ever written."""
    table = memory_of(model).table
    return table.written - 2 * table.capacity


def test_calls_remember() -> None:
    """The second call on the same prompt knows the text: no token of it is new to the successor table."""
    model, strategy = fresh_model("llama"), Lookahead(sources=("recycling",), nodes=8)
    first, second = drafted(model, strategy), drafted(model, strategy)
    assert second.steps < first.steps
    assert rows_of(model) > 0
    memory.exchange(model)
    assert drafted(model, strategy).steps == first.steps
    memory.exchange(model)
    memory.exchange(model)


@pytest.mark.parametrize("strategy", [Lookahead(remember=False), Lookahead(seed=3), Lookahead(window_size=5)])
def test_calls_that_leave_no_draft_memory(strategy: Lookahead) -> None:
    model = fresh_model("llama")
    drafted(model, strategy)
    kept = memory_of(model)
    assert rows_of(model) == 0 and not kept.acceptances
    drafted(model, Lookahead())
    rows, rates = rows_of(model), copy.deepcopy(next(iter(memory_of(model).acceptances.values())).weights)
    drafted(model, strategy, do_sample=True)
    assert memory_of(model) is kept
    assert rows_of(model) == rows and next(iter(kept.acceptances.values())).weights == rates
    assert not strategy.remembers and Lookahead().remembers


def test_ways_of_choosing_have_estimates_of_their_own_and_not_too_many() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead(), max_new_tokens=3)
    drafted(model, Lookahead(), max_new_tokens=3, do_sample=True)
    drafted(model, Lookahead(sources=("suffix",)), max_new_tokens=3)
    assert len(memory_of(model).acceptances) == 3
    for top_k in range(2, 22):
        drafted(model, Lookahead(), max_new_tokens=2, do_sample=True, top_k=top_k)
    assert len(memory_of(model).acceptances) == 16


def test_the_models_copy_has_no_memory_of_it() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead())
    assert memory._memories.take(copy.deepcopy(model)) is None
    assert not any("lookahead" in name for name in vars(model))


def test_an_error_brings_the_memory_back() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead())
    kept = memory_of(model)

    def broken(row: RowContext) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(model, prompts(1), use_lookahead=True, lookahead_strategy=Lookahead(sources=(broken,)), max_new_tokens=5)
    assert memory_of(model) is kept


def test_concurrent_calls_do_not_share() -> None:
    model = fresh_model("llama")
    with memory.borrowed(model, VOCAB, True) as first, memory.borrowed(model, VOCAB, True) as second:
        assert first is not second
        assert first.table is not second.table and first.times is not second.times
    with memory.borrowed(model, VOCAB, True) as third:
        assert third in (first, second)
    with memory.borrowed(model, VOCAB, False) as fourth:
        assert fourth.table is not third.table and not fourth.acceptances
        assert fourth.times is third.times, "step times are the machine's"


def test_step_times_are_learnt_and_shared() -> None:
    model = fresh_model("llama")
    drafted(model, Lookahead(seed=1))
    (times,) = memory_of(model).times.values()
    assert times.knows_single or times._mean
    drafted(model, Lookahead(seed=1), 3)
    assert len(memory_of(model).times) == 2
    drafted(model, Lookahead(tuning=FLAT))
    assert len(memory_of(model).times) == 2


def test_a_saved_curve_is_used(tmp_path: FilePath, curves: FilePath) -> None:
    """From the cache folder, and from a file."""
    model = fresh_model("llama")
    STEEP.save(tuning.cache_file(describe(model)))
    assert drafted(model, Lookahead(), max_new_tokens=12).drafted == 0
    file = tmp_path / "flat.json"
    FLAT.save(file)
    for tuned in (file, str(file)):
        strategy = Lookahead(tuning=tuned, sources=("recycling",), seed=0)
        assert drafted(model, strategy, max_new_tokens=30).drafted > 20

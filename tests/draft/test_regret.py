"""The planner on a virtual clock: what it loses against the best fixed number of nodes, and against plain decoding."""

import pytest
from helpers.marks import few
from helpers.regret import BATCHES, FIXED, MACHINES, Machine, automatic, fixed, knots, ms_per_token

from lookahead.draft.latency import StepTimes
from lookahead.draft.pass_costs import PassCosts


def losses(machine: Machine, kind: str, batch: int = 1, sizes: tuple[int, ...] = FIXED) -> tuple[float, float]:
    """Time per token of twelve calls, of the best fixed size's and of plain decoding's, less 1."""
    every = {nodes: ms_per_token(machine, fixed(kind, batch, 0, nodes)) for nodes in sizes}
    ours = ms_per_token(machine, automatic(machine, kind, batch))
    return ours / min(every.values()) - 1.0, ours / every[0] - 1.0


@pytest.mark.parametrize("kind", ["looping", "code", "prose", "hot", "random"])
@pytest.mark.parametrize("name", few(["flat", "steep", "steps", "bumpy"], "steep", "bumpy"))
def test_automatic_is_near_the_best_fixed_size(name: str, kind: str) -> None:
    against_best, against_plain = losses(MACHINES[name](), kind)
    assert against_best <= 0.07
    assert against_plain <= 0.02


@pytest.mark.parametrize(("kind", "most"), [("looping", 0.07), ("code", 0.0), ("prose", 0.02), ("hot", 0.02)])
def test_a_curve_that_falls(kind: str, most: float) -> None:
    """Where a few nodes take longer than many, that is found out."""
    against_best, against_plain = losses(MACHINES["falling"](), kind)
    assert against_best <= most
    assert against_plain <= 0.02


@pytest.mark.parametrize("kind", ["code", "prose", "hot", "random"])
def test_where_nothing_pays_little_is_lost(kind: str) -> None:
    assert losses(MACHINES["dear"](), kind, sizes=(0, 2))[1] <= 0.02


@pytest.mark.parametrize(("kind", "most"), [("looping", 0.12), ("code", 0.14), ("hot", 0.02), ("random", 0.02)])
def test_a_batch(kind: str, most: float) -> None:
    """Where drafts pay little and by chance, as in code, they are not found to pay in every call."""
    batch, machine = BATCHES["4"]
    against_best, against_plain = losses(machine(), kind, batch, (0, 2, 4, 8))
    assert against_best <= most
    assert against_plain <= 0.02


@pytest.mark.parametrize(("kind", "most"), [("looping", -0.2), ("code", 0.02), ("random", 0.02)])
def test_a_batch_whose_passes_over_two_nodes_are_slow(kind: str, most: float) -> None:
    """Only wide trees pay there, and they are tried."""
    batch, machine = BATCHES["4, recurrent"]
    assert losses(machine(), kind, batch, (0,))[1] <= most


@pytest.mark.parametrize("kind", ["code", "hot"])
def test_a_large_batch_loses_little(kind: str) -> None:
    batch, machine = BATCHES["16"]
    assert losses(machine(), kind, batch, (0, 2))[1] <= 0.015


def test_passes_that_warm_up_teach_nothing() -> None:
    """A replay takes 5 ms; before it, passes took 25, 200 and 30."""
    machine, times = Machine(knots(t1=5.0, t128=9.0), warms_up=True, noise=0.0, drift=0.0, touch=1.0), StepTimes()
    costs = PassCosts(times, machine, None, 8, 1)
    for passed in range(8):
        costs.open(64)
        costs.observe(1, machine.run(1, 64, apart=False), 0.0, 1.0)
        assert times.knows_single == (passed > 2)
    assert costs.timed_ms < 100.0

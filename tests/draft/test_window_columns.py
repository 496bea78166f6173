"""How many columns of the window a pass carries, and which size pays best for a batch."""

from collections.abc import Sequence

import pytest
from helpers.automatic import FLAT, Limits
from helpers.drafting import TableSource

from lookahead.draft.acceptance import Acceptance
from lookahead.draft.latency import NODES
from lookahead.draft.planner import Planner
from lookahead.draft.tree_worth import TreeWorth, WindowColumns, shared_width
from lookahead.sources.jacobi_window import window_nodes


def worth(*trees: Sequence[float]) -> TreeWorth:
    """What is known after passes with one tree each."""
    known = TreeWorth(Acceptance([TableSource("one", {})]))
    for values in trees:
        known.learn(values, len(values))
    return known


def test_columns_come_where_nodes_cost_nothing_and_have_to_prove_themselves() -> None:
    columns = WindowColumns(worth(), alone=False)
    columns.choose(1, [1.0] * 200, 100)
    assert columns.count == 16
    for passed in range(2, 17):
        columns.learn(columns.count, 0)
        columns.choose(passed, [1.0 + 0.1 * size for size in range(200)], 100)
        assert columns.count == 16, "a first choice stands for 16 passes"
    columns.choose(17, [1.0] * 200, 100)
    assert columns.count == 0, "they have brought nothing"


def test_columns_are_not_bought_at_a_price() -> None:
    columns = WindowColumns(worth(), alone=False)
    columns.choose(1, [1.0 + 0.01 * size for size in range(200)], 100)
    assert columns.count == 0


def test_a_dip_of_the_curve_buys_no_columns() -> None:
    """It may be chance, and if it is none, other candidates could have its nodes."""
    columns = WindowColumns(worth(*[[0.5, 0.4, 0.3, 0.2]] * 40), alone=False)
    columns.choose(1, [*[1.0] * 8, *[0.8] * 200], 100)
    assert columns.count == 0


@pytest.mark.parametrize("nodes", [1, 7, 8, 40])
def test_alone_a_window_takes_half_of_a_fixed_number(nodes: int) -> None:
    columns = WindowColumns(worth(), alone=True)
    columns.choose_of(nodes, 1)
    assert window_nodes(columns.count) <= max(nodes // 2, min(nodes, window_nodes(1)))


def test_a_fixed_number_goes_to_whom_it_brings_more() -> None:
    for values, expected in (([0.9] * 40, 0), ([0.0] * 40, 8)):
        columns = WindowColumns(worth(values), alone=False)
        columns.choose_of(40, 1)
        assert columns.count == 0, "nothing is known in the first pass"
        columns.choose_of(40, 17)
        assert columns.count == expected


def test_worth_is_smoothed_and_fades_where_there_was_room() -> None:
    known = worth([1.0, 0.5])
    assert known.expected(1) == 1.0 and known.expected(9) == 1.5
    known.learn([0.5], 2)
    assert known.expected(1) == pytest.approx(0.95)
    assert known.expected(2) == pytest.approx(0.95 + 0.45)


GOOD, BAD = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.02] * 6
COSTS = [1.0 + 0.2 * nodes for nodes in range(8)]


def test_trees_of_a_batch_are_as_wide_as_pays_for_all() -> None:
    assert shared_width([], COSTS, 1.0) == 1
    assert shared_width([([], 4)] * 3, COSTS, 1.0) == 1, "no candidate"
    assert shared_width([(GOOD, 4)] * 3, COSTS, 1.0) == 6
    assert shared_width([(BAD, 4)] * 3, COSTS, 1.0) == 1
    assert shared_width([(GOOD, 4)] * 3, [1.0, 3.0, 5.0], 1.0) == 1


def test_rows_that_are_ahead_count_less() -> None:
    """A batch is done when its slowest row is: what others gain shortens little."""
    assert shared_width([(GOOD, 4), (BAD, 30), (BAD, 30)], COSTS, 1.0) > 3
    assert shared_width([(GOOD, 30), (BAD, 4), (BAD, 4)], COSTS, 1.0) == 1


def test_the_same_tokens_count_more_where_all_rows_write_them() -> None:
    costs = [1.0, 1.3, 1.6, 1.9, 2.2]
    assert shared_width([([1.0] * 4, 4), ([], 4), ([], 4), ([], 4)], costs, 1.0) == 1
    assert shared_width([([1.0], 4)] * 4, costs, 1.0) == 2


def test_long_leaps_of_all_rows_count_in_full() -> None:
    """Twice as many tokens in less than twice the time are worth it, however many they are already."""
    costs = [1.0 + 0.5 * nodes for nodes in range(8)]
    assert shared_width([([1.0] * 7, 4)] * 4, costs, 1.0) == 8


def test_larger_batches_ask_for_more() -> None:
    """The more rows, the more likely is one that has no luck."""
    costs = [1.0, 1.4]
    assert shared_width([([0.6], 4)] * 2, costs, 1.0) == 2
    assert shared_width([([0.6], 4)] * 64, costs, 1.0) == 1


def test_trees_of_a_batch_have_one_of_the_curves_sizes() -> None:
    """Every further size would have kernels of its own to be made."""
    flat = [1.0 + 0.001 * nodes for nodes in range(64)]
    for count in range(1, 20):
        width = shared_width([([0.9] * count, 4)] * 3, flat, 1.0)
        assert width == max(size for size in NODES if size <= count + 1)


@pytest.mark.parametrize(("batch", "nodes", "expected"), [(1, None, True), (4, None, False), (4, 64, True)])
def test_a_batch_has_no_window_but_where_it_was_asked_for(batch: int, nodes: int | None, expected: bool) -> None:
    acceptance = Acceptance([TableSource("table", {})])
    planner = Planner(
        FLAT.as_frozen(), acceptance, limits=Limits(), batch=batch, most_nodes=64, nodes=nodes, window=True
    )
    seen = set()
    for passed in range(80):
        planner.open(20 + passed)
        seen.add(planner.columns)
        planner.learn([0.5] * 4, [], planner.columns, False)
    assert (max(seen) > 0) == expected

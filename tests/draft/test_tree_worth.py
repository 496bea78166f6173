"""Which size of the trees pays best for a batch."""

from lookahead.draft.latency import NODES
from lookahead.draft.planner import shared_width

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

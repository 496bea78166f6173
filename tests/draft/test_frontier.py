"""Batch sources: the same trees as one by one, in fewer questions, and told what to forget."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from helpers.automatic import FLAT, Oracle, drafted
from helpers.drafting import TableSource
from helpers.models import counting_model, tiny_model
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, Successors, TokenTree
from lookahead import Lookahead
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.best_first import BestFirstTree
from lookahead.draft.context import RowContext
from lookahead.draft.pass_costs import least_slopes
from lookahead.sources.base import CheckedSource, is_batch

pytestmark = pytest.mark.usefixtures("augmented")

Table = dict[tuple[int, ...], list[tuple[int, int]]]


class BatchTable(TableSource):
    """The table source's batched twin; notes what it is asked for together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.levels: list[list[tuple[int, ...]]] = []

    def expand(self, states: Sequence[tuple[int, ...]]) -> list[list[tuple[int, int]]]:
        self.levels.append(list(states))
        return [self.table.get(state, []) for state in states]

    def rollback(self, path: Path) -> None:
        pass


@st.composite
def tables(draw: st.DrawFn, most: int = 20) -> Table:
    table: Table = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, most))):
        above = paths[draw(st.integers(0, len(paths) - 1))]
        siblings = table.setdefault(above, [])
        siblings.append((len(siblings), draw(st.integers(0, 3))))
        paths.append((*above, len(siblings) - 1))
    return table


PRIORS = (0.8, 0.5, 0.3, 0.1)


@examples(150)
@given(tables(), tables(), st.integers(0, 15), st.integers(0, 5), st.floats(0.0, 0.4), st.booleans(), st.booleans())
def test_trees_are_those_of_the_twin(
    table: Table, other: Table, nodes: int, room: int, slope: float, chain: bool, second: bool
) -> None:
    """Beside another source too, which may be a batch source or not."""
    twins = [BatchTable, BatchTable if second else TableSource]
    kinds: list[list[type[TableSource]]] = [[TableSource, TableSource], twins]
    times = [1.0 + slope * count for count in range(1 + nodes)]
    grown = []
    for one, two in kinds:
        sources = [one("one", table, PRIORS), two("two", other, PRIORS)]
        trees = BestFirstTree(sources, Acceptance(sources), chain)
        tree, values = trees.grow(7, room, times, least_slopes(times))
        assert not any(source.asked for source in sources if is_batch(source)), "one by one"
        grown.append((tree.tokens, tree.parents, values, trees.asked))
    assert grown[0] == grown[1]


def test_a_level_is_asked_for_at_once() -> None:
    """The root, its children together, and theirs together, who all wait when the first of them is taken."""
    table: Table = {(): [(1, 0), (2, 1), (3, 1)], (1,): [(4, 0), (5, 1)], (2,): [(6, 0)], (1, 4): [(7, 0)]}
    source = BatchTable("one", table, (0.6, 0.55))
    trees = BestFirstTree([source], Acceptance([source]))
    tree, _ = trees.grow(9, 9, [1.0] * 20, [0.0] * 20)
    assert len(tree) == 8
    assert source.levels[0] == [()]
    assert set(source.levels[1]) == {(1,), (2,), (3,)}
    assert set(source.levels[2]) == {(1, 4), (1, 5), (2, 6)}
    assert source.levels[3:] == [[(1, 4, 7)]]
    asked = [state for states in source.levels for state in states]
    assert len(asked) == len(set(asked)), "nobody twice"
    assert len(source.levels) < len(asked)


def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    table: Table = {(): [(token, 0) for token in range(9)]}
    source = BatchTable("one", table, (0.5,))
    BestFirstTree([source], Acceptance([source])).grow(9, 9, [1.0] * 4, [0.0] * 4)
    assert source.levels[0] == [()]
    assert all(len(states) <= 3 for states in source.levels)


CHAIN: Table = {(1,) * depth: [(1, 0)] for depth in range(12)}


def asked_of(levels: Table, times: Sequence[float], ask_ms: float, other: Table | None = None) -> list[list[Any]]:
    """What a batch source of this price, three in four of whose candidates are right, is asked for one tree; the
    candidates of another source are right nine times in ten."""
    source = BatchTable("dear", levels, (0.75, 0.1))
    source.ask_ms = ask_ms  # type: ignore[attr-defined]
    sources = [source, TableSource("free", other or {}, (0.9,))]
    BestFirstTree(sources, Acceptance(sources)).grow(9, 99, times, least_slopes(times))
    return source.levels


@pytest.mark.parametrize("dip", [0.0, 0.3])
def test_levels_are_asked_for_as_far_as_they_pay(dip: float) -> None:
    """Also where a larger pass was seen to take less than a smaller one."""
    times = [10.0 + 0.1 * size - dip * (size > 3) for size in range(30)]
    depths = [len(asked_of(CHAIN, times, ask_ms)) for ask_ms in (0.01, 1.0, 4.0, 12.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 8
    assert 1 < depths[2] < 6
    assert depths[3] == 1, "the root, about which nothing is known"


def test_little_is_asked_where_others_know() -> None:
    times = [10.0 + 0.1 * size for size in range(30)]
    alone, beside = asked_of(CHAIN, times, 2.0), asked_of(CHAIN, times, 2.0, CHAIN)
    assert len(beside) < len(alone)


def test_nodes_that_promise_little_are_not_asked_about_in_passing() -> None:
    times = [10.0] * 12 + [11.0]
    levels: Table = {(): [(1, 0), *((token, 1) for token in range(2, 10))], (1,): [(1, 0)]}
    assert len(asked_of(levels, times, 0.001)[1]) == 9
    assert asked_of(levels, times, 3.0)[1] == [(1,)]


class Counter(Oracle):
    """Keeps what a draft model would keep of its nodes."""

    name = "counter"
    made: ClassVar[list["Counter"]] = []

    def __init__(self, row: RowContext) -> None:
        super().__init__(row)
        self.events: list[str] = []
        self.paths: list[Path] = []
        self.made.append(self)

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        super().start(prompt, successors)
        self.events.append("start")

    def propose(self, state: int) -> list[tuple[int, int]]:
        raise AssertionError("a batch source is asked for levels")

    def expand(self, states: Sequence[int]) -> list[list[tuple[int, int, float]]]:
        return [[(state % 7 + 1, 0, 0.75)] for state in states]

    def rollback(self, path: Path) -> None:
        self.events.append("rollback")
        self.paths.append(path)

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.events.append("learn")
        assert path is self.paths[-1]
        super().learn(tree, path, successors)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("others", [(), ("recycling", "suffix")])
def test_every_pass_is_followed_by_one_rollback(batch: int, others: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(Counter, "made", [])
    strategy = Lookahead(sources=(Counter, *others), tuning=FLAT, seed=0)
    stats = drafted(counting_model(), strategy, batch)
    assert stats.mean_acceptance_length > 3
    assert len(Counter.made) == batch
    for source in Counter.made:
        assert source.events[0] == "start"
        assert source.events[1:] == ["rollback", "learn"] * (len(source.events) // 2)
        written = [token for path in source.paths for token in path.tokens]
        assert len(written) <= 36
    assert max(len(source.paths) for source in Counter.made) == stats.steps


def test_a_batch_source_leaves_the_text_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(Counter, "made", [])
    for batch in (1, 3):
        drafted(tiny_model("llama"), Lookahead(sources=(Counter, "suffix"), tuning=FLAT), batch, do_sample=True)


class TestChecked:
    """Batch sources of the caller's own."""

    def checked(self, expanded: Any) -> CheckedSource:
        source = BatchTable("odd", {}, (0.5,))
        source.expand = lambda states: expanded  # type: ignore[method-assign]
        return CheckedSource(source, 50)

    def test_is_a_batch_source(self) -> None:
        assert is_batch(CheckedSource(BatchTable("one", {}), 50))  # type: ignore[arg-type]
        assert not is_batch(CheckedSource(TableSource("one", {}), 50))  # type: ignore[arg-type]

    def test_needs_a_rollback(self) -> None:
        class Half(TableSource):
            def expand(self, states: Sequence[Any]) -> list[list[tuple[int, int]]]:
                return [[] for _ in states]

        refuses("Half is no source of candidates: it has no rollback", CheckedSource, Half("half", {}), 50)

    @pytest.mark.parametrize(
        ("expanded", "message"),
        [
            ([[]], r"Source 'odd' expanded 2 states to \[\[\]\]: expected candidates for each"),
            (None, "expanded 2 states to None"),
            ([[], [(1, 5)]], "of kind 5: its priors know 0 to 0"),
            ([[(50, 0)], []], "proposed token 50: expected 0 to 49"),
            ([[], 3], "proposed 3: expected pairs"),
            ([[(1, 0), (2, 0, 0.5)], []], "for all of them a third item"),
            ([[(1, 0, 1.5)], []], "the probability that the source gives"),
            ([[(1, 0, 0.5, 7)], []], "the probability that the source gives"),
        ],
    )
    def test_what_it_expands_to(self, expanded: Any, message: str) -> None:
        refuses(message, self.checked(expanded).expand, [(), (1,)])

    def test_probabilities_are_passed_on(self) -> None:
        assert self.checked([[(1, 0, 0.25)]]).expand([()]) == [[(1, 0, 0.25)]]


def test_probabilities_change_no_tree() -> None:
    table: Table = {(): [(1, 0), (2, 1)], (1,): [(3, 0)]}
    given: Any = {path: [(*candidate, 0.5) for candidate in candidates] for path, candidates in table.items()}
    trees = []
    for each in (table, given):
        source = CheckedSource(TableSource("one", each, (0.6, 0.3)), 50)
        trees.append(BestFirstTree([source], Acceptance([source])).grow(9, 9, [1.0] * 9, [0.0] * 9))
    assert trees[0][0].tokens == trees[1][0].tokens and trees[0][1] == trees[1][1]
    assert trees[1][0].drawn_from is None, "the draft is deterministic"

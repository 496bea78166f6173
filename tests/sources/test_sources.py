"""Sources of candidates: what they propose, against brute force, and what all of them promise."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.toy import examples, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import LEVELS, LookaheadError, Path, Successors, TokenTree
from lookahead.sources import (
    PoolSource,
    RecyclingSource,
    Source,
    SuccessorTable,
    SuffixAutomaton,
    SuffixSource,
    WindowSource,
)
from lookahead.sources.jacobi_window import window_nodes
from lookahead.sources.ngram_pool import NGRAM_SIZE
from lookahead.sources.recycling import BEST

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=40))


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where in ``text`` each occurrence of ``part`` ends."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def longest_suffix(text: Sequence[int], context: Sequence[int]) -> int:
    """Length of the longest suffix of ``context`` that occurs in ``text``."""
    return max(size for size in range(len(context) + 1) if occurrences(text, context[len(context) - size :]))


def repeated_suffix(text: Sequence[int]) -> int:
    """Length of the longest suffix that also occurs earlier."""
    return max(
        (size for size in range(len(text)) if len(occurrences(text, text[len(text) - size :])) > 1 or not size),
        default=0,
    )


def followers(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """What followed ``context``, newest first."""
    return list(dict.fromkeys(text[end] for end in reversed(occurrences(text, context)) if end < len(text)))


# --- the suffix automaton ----------------------------------------------------------------------------------------


@examples(120)
@given(TEXTS)
def test_automaton_knows_the_longest_match_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    assert automaton.root() == (0, 0)
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        seen = text[:end]
        state, matched = automaton.root()
        assert matched == repeated_suffix(seen)
        while matched:
            context = seen[end - matched :]
            assert set(automaton.continuations(state)) == set(followers(seen, context))
            count = len(occurrences(seen, context))
            state, matched = automaton.shorter(state)
            assert len(occurrences(seen, seen[end - matched :])) > count, "a shorter context occurs more often"
        assert state == 0


@examples(80)
@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=15)))
def test_newest_continuation_comes_last_in_every_context(text: list[int]) -> None:
    """Texts so short that all contexts of a token are told."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        seen = text[:end]
        state, matched = automaton.root()
        while True:
            context = seen[end - matched :] if matched else []
            assert list(automaton.continuations(state))[::-1] == followers(seen, context)
            if not matched:
                break
            state, matched = automaton.shorter(state)


def test_newest_continuation_in_a_text_of_one_token() -> None:
    """Here a token has as many contexts as there are tokens, of which the longest are told."""
    automaton, text = SuffixAutomaton(), [1] * 100 + [2] + [1] * 50 + [3] + [1] * 40
    for token in text:
        automaton.append(token)
    state, matched = automaton.root()
    assert matched == 40
    for _ in range(16):
        newest = followers(text, text[len(text) - matched :])[0]
        assert next(reversed(automaton.continuations(state))) == newest
        state, matched = automaton.shorter(state)


@examples(120)
@given(TEXTS, st.data())
def test_step_gives_the_longest_suffix_that_occurs(text: list[int], data: st.DataObject) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    state, matched = automaton.root()
    context = text[len(text) - matched :]
    for token in data.draw(st.lists(st.integers(0, 4), max_size=12)):
        before = copy.deepcopy(automaton.__dict__)
        state, matched = automaton.step(state, matched, token)
        assert automaton.__dict__ == before, "a step reads only"
        context = [*context, token]
        assert matched == longest_suffix(text, context)
        found = context[len(context) - matched :]
        assert set(automaton.continuations(state)) == set(followers(text, found))


@examples(40)
@given(st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=300)))
def test_automaton_is_linear(text: list[int]) -> None:
    """At most 2n states and 3n transitions, whatever the text (Blumer et al., 1985)."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    states = len(automaton._length)
    assert states <= max(1, 2 * len(text))
    assert sum(map(len, automaton._next)) <= 3 * len(text) + 1
    assert len(automaton._next) == len(automaton._link) == states


def test_appending_is_amortised() -> None:
    """States and transitions stay within a few for each token, in texts that repeat most."""
    for text in ([1] * 3000, [1, 2] * 1500, [random.Random(0).randrange(2) for _ in range(3000)]):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        assert len(automaton._length) <= 2 * len(text)


# --- the suffix source -------------------------------------------------------------------------------------------


def suffix_source(text: Sequence[int]) -> SuffixSource:
    source = SuffixSource()
    source.start(text, None)
    return source


def tokens_of(candidates: Sequence[tuple[int, int]]) -> list[int]:
    return [token for token, _ in candidates]


def test_suffix_candidates_by_hand() -> None:
    """``1 2`` was followed by 3, then by 4; ``2`` alone also by 5, before either."""
    source = suffix_source([9, 2, 5, 1, 2, 3, 1, 2, 4, 1, 2])
    state = source.root()
    assert state[1] == 2
    assert tokens_of(source.propose(state)) == [4, 3, 5]
    after = source.step(state, 4)
    assert after[1] == 3
    assert tokens_of(source.propose(after)) == [1], "what followed 1 2 4, and nothing else ever followed 4"
    elsewhere = source.step(state, 5)
    assert elsewhere[1] == 2, "2 5 is the longest that was seen"
    assert tokens_of(source.propose(elsewhere)) == [1]
    assert source.propose(source.step(state, 7)) == [], "a token that was never seen"


def test_suffix_kinds_tell_length_rank_and_rivals() -> None:
    alone = suffix_source([1, 2, 3, 4, 1, 2, 3]).propose((suffix_source([1, 2, 3, 4, 1, 2, 3])).root())
    assert tokens_of(alone) == [4]
    source = suffix_source([1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 3])
    mixed = source.propose(source.root())
    assert tokens_of(mixed) == [4, 5]
    kinds = [kind for _, kind in [*alone, *mixed]]
    assert len(set(kinds)) == 3
    assert alone[0][1] // 6 == mixed[0][1] // 6, "the same match length"
    assert source.priors[alone[0][1]] > source.priors[mixed[0][1]] > source.priors[mixed[1][1]]


def test_suffix_copies_as_prompt_lookup_does() -> None:
    passage = [3, 1, 4, 1, 5, 9, 2, 6]
    source = suffix_source([*passage, 8, *passage[:2]])
    state, copied = source.root(), []
    for _ in range(6):
        token = tokens_of(source.propose(state))[0]
        copied.append(token)
        state = source.step(state, token)
    assert copied == passage[2:]


def test_suffix_learns_what_was_written() -> None:
    source = suffix_source([])
    assert source.propose(source.root()) == []
    for token in (1, 2, 1):
        source.learn(TokenTree(0), Path([0], [token]), None)
    assert tokens_of(source.propose(source.root())) == [2]


# --- recycling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1])
def test_table_holds_at_least_one_row(capacity: int) -> None:
    with pytest.raises(LookaheadError, match="at least one row"):
        SuccessorTable(capacity)


@examples(60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 200), st.integers(0, 99))
def test_table_is_bounded(capacity: int, tokens: int, count: int, seed: int) -> None:
    """Two generations of ``capacity`` rows for each of three lengths of context, at any time."""
    table, rng = SuccessorTable(capacity), seeded(seed)
    for _ in range(count):
        table.put((rng.randrange(tokens), rng.randrange(tokens), rng.randrange(tokens)), [1], [0])
        assert len(table) <= 6 * capacity
        for generation in (*table._young, *table._old):
            assert len(generation) <= capacity


@examples(60)
@given(st.integers(2, 12), st.integers(0, 99))
def test_rows_outlive_newer_ones(capacity: int, seed: int) -> None:
    """However full the young generation is, a row is there until ``capacity - 1`` newer ones are."""
    table, fresh = SuccessorTable(capacity), iter(range(1000, 5000))

    def other() -> None:
        table.put((next(fresh), next(fresh), next(fresh)), [1], [0])

    for _ in range(seed % (2 * capacity)):
        other()
    table.put((1, 2, 3), [7], [0])
    for _ in range(capacity - 1):
        other()
        assert table.get((1, 2, 3)) == (3, ([7], [0]))


@pytest.mark.parametrize("before", range(4))
def test_a_row_outlives_as_many_newer_ones_as_documented(before: int) -> None:
    """Rows outlive at least ``capacity`` newer ones, wherever in their generation they were written."""
    table = SuccessorTable(4)
    for token in range(before):
        table.put((token, token, token), [1], [0])
    table.put((1, 2, 3), [7], [0])
    for token in range(10, 14):
        table.put((token, token, token), [1], [0])
    assert table.get((1, 2, 3)) is not None


def test_rows_of_the_longest_known_context_win() -> None:
    table = SuccessorTable()
    table.put((1, 2, 3), [10], [0])
    table.put((9, 2, 3), [11], [0])
    table.put((8, 8, 3), [12], [0])
    assert table.get((1, 2, 3)) == (3, ([10], [0]))
    assert table.get((9, 2, 3)) == (3, ([11], [0]))
    assert table.get((7, 2, 3)) == (2, ([11], [0])), "the newest row of two tokens"
    assert table.get((7, 7, 3)) == (1, ([12], [0])), "the newest row of one"
    assert table.get((7, 7, 7)) is None


def test_an_old_row_of_a_longer_context_wins_over_a_young_shorter_one() -> None:
    table = SuccessorTable(2)
    table.put((1, 2, 3), [10], [0])
    table.put((4, 4, 4), [11], [0])  # the young generation is full and becomes the old one
    table.put((9, 2, 3), [12], [0])
    assert table.get((1, 2, 3)) == (3, ([10], [0]))
    assert table.get((7, 2, 3)) == (2, ([12], [0]))


def successors(*lines: Sequence[int]) -> Successors:
    return Successors([list(line) for line in lines], [list(range(len(line))) for line in lines])


def test_recycling_reads_the_prompts_end() -> None:
    """What the model said at the last prompt tokens is known under their contexts."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3, 4], successors([20, 21], [30, 31], [40, 41]))
    assert tokens_of(source.propose(source.root())) == [40, 41]
    assert tokens_of(source.propose((1, 2, 3))) == [30, 31]
    assert tokens_of(source.propose((7, 1, 2))) == [20, 21]
    assert source.propose((7, 7, 1)) == []


def test_recycling_takes_more_prompt_rows_than_there_are_tokens() -> None:
    """A row with padding: the first rows stand for pads."""
    source = RecyclingSource(SuccessorTable())
    source.start([5], successors([1], [2], [3], [4]))
    assert tokens_of(source.propose(source.root())) == [4]
    assert len(source._table) == 3


def test_recycling_learns_off_the_path() -> None:
    """Nodes that were not kept are learnt as well, under the context of their branch."""
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    tree = TokenTree.from_parents([3, 4, 5, 6], [-1, 0, 0, 2])  # 3 -> 4, 3 -> 5 -> 6
    source.learn(tree, Path([0, 1], [4, 9]), successors([4], [9], [60], [70]))
    assert source.root() == (3, 4, 9)
    assert tokens_of(source.propose((2, 3, 5))) == [60]
    assert tokens_of(source.propose((3, 5, 6))) == [70]
    assert tokens_of(source.propose((1, 2, 3))) == [4]
    assert tokens_of(source.propose((0, 0, 6))) == [70]


def test_recycling_kinds_tell_context_rank_and_level() -> None:
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0], [4]), Successors([[4, 5, 6, 7]], [[2, 3, 7, 7]]))
    full = source.propose((1, 2, 3))
    longest = 2 * BEST * LEVELS
    assert full == [(4, longest + 2), (5, longest + 8 + 3), (6, longest + 16 + 7), (7, longest + 24 + 7)]
    assert [kind for _, kind in source.propose((0, 2, 3))] == [kind - BEST * LEVELS for _, kind in full]
    assert [kind for _, kind in source.propose((0, 0, 3))] == [kind - 2 * BEST * LEVELS for _, kind in full]


def test_recycling_without_successors_only_moves_on() -> None:
    source = RecyclingSource(SuccessorTable())
    source.start([1, 2, 3], None)
    source.learn(TokenTree(3), Path([0, 1], [4, 5]), None)
    assert source.root() == (3, 4, 5)
    assert len(source._table) == 0


def test_rows_share_a_table() -> None:
    table = SuccessorTable()
    first, second = RecyclingSource(table), RecyclingSource(table)
    first.start([1, 2, 3], successors([8, 9]))
    second.start([1, 2, 3], None)
    assert tokens_of(second.propose(second.root())) == [8, 9]


# --- pool and window ---------------------------------------------------------------------------------------------


def pool_source(text: Sequence[int]) -> PoolSource:
    source = PoolSource()
    source.start(text, None)
    return source


def test_pool_proposes_ngrams_of_the_text() -> None:
    source = pool_source([1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1])
    state = source.root()
    assert tokens_of(source.propose(state)) == [2]
    state = source.step(state, 2)
    assert source.propose(state) == [(6, 3), (3, 4)], "the newest n-gram first; one token into it"
    state = source.step(state, 6)
    assert source.propose(state) == [(7, 6)]
    state = source.step(state, 7)
    assert source.propose(state) == [(8, 9)]
    state = source.step(state, 8)
    assert source.propose(state) == [], "the n-gram ends here, and no other starts with 8"
    again = source.step(source.root(), 5)
    assert tokens_of(source.propose(again)) == [1], "no n-gram goes on with 5, but one starts at it"


def test_pool_goes_on_where_an_ngram_ends() -> None:
    source = pool_source([1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    state, path = source.root(), []
    for _ in range(7):
        token = tokens_of(source.propose(state))[0]
        path.append(token)
        state = source.step(state, token)
    assert path == [2, 3, 4, 5, 6, 7, 8]


def test_pool_learns_the_output() -> None:
    source = pool_source([])
    source.learn(TokenTree(0), Path([0], [1]), None)
    source.learn(TokenTree(1), Path([0, 1, 2, 3], [2, 3, 4, 5]), None)
    assert len(source.pool) == 1
    source.learn(TokenTree(5), Path([0], [1]), None)
    assert tokens_of(source.propose(source.root())) == [2]
    assert list(source.pool.get(1)) == [(2, 3, 4, 5)]


def window_source(text: Sequence[int] = (1, 2, 3), vocab: int = 9, seed: int = 0) -> WindowSource:
    source = WindowSource(seeded(seed), vocab)
    source.start(text, None)
    return source


def grown(source: WindowSource, columns: int, room: int, root: int = 3) -> TokenTree:
    tree = TokenTree(root)
    source.grow(tree, columns, room)
    return tree


def following(tree: TokenTree, vocab: int = 9) -> Successors:
    """A model that counts: what it says next at every node."""
    return Successors([[(token + 1) % vocab] for token in tree.tokens], [[0]] * len(tree))


def written(tree: TokenTree, vocab: int = 9) -> Path:
    return Path([0], [(tree.tokens[0] + 1) % vocab])


def decode_window(source: WindowSource, columns: Sequence[int], room: int = 50, root: int = 3) -> list[TokenTree]:
    trees = []
    for count in columns:
        tree = grown(source, count, room, root)
        trees.append(tree)
        path = written(tree)
        source.learn(tree, path, following(tree))
        root = path.tokens[-1]
    return trees


def test_window_feeds_the_pool_and_the_pool_its_candidates() -> None:
    """After the warm-up every pass finishes one n-gram a column, which a counting model soon makes right."""
    source = window_source()
    decode_window(source, [6] * 12)
    assert len(source.pool) > 6
    root = source._text[-1]
    state, path = source.root(), []
    for _ in range(4):
        token = tokens_of(source.propose(state))[0]
        path.append(token)
        state = source.step(state, token)
    assert path == [(root + 1 + offset) % 9 for offset in range(4)]


def test_window_does_not_learn_from_prompt_or_output() -> None:
    source = window_source([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(source.pool) == 0
    for token in range(8):
        source.learn(TokenTree(token), Path([0], [token]), None)
    assert len(source.pool) == 0


def test_window_of_no_columns_adds_nothing() -> None:
    source = window_source()
    assert len(grown(source, 0, 50)) == 1
    decode_window(source, [4, 4, 4])
    assert len(grown(source, 0, 50)) == 1
    assert source._window is None, "it stops"
    assert len(grown(source, 4, 50)) > 1, "and starts again"


@pytest.mark.parametrize("room", range(4))
def test_window_stops_where_no_room_is_left(room: int) -> None:
    source = window_source()
    decode_window(source, [4, 4, 4])
    assert len(grown(source, 4, room)) == 1
    assert source._window is None


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=25),
    st.booleans(),
    st.integers(0, 9),
)
def test_window_fits_whatever_columns_and_room(plan: list[tuple[int, int]], empty: bool, seed: int) -> None:
    """No node deeper than the room, tokens of the vocabulary only, the newest level has a node for each column."""
    source, root = window_source([] if empty else [1, 2, 3], seed=seed), 3
    for columns, room in plan:
        tree = grown(source, columns, room, root)
        assert max(tree.depths) <= room
        assert all(0 <= token < 9 for token in tree.tokens)
        assert (len(tree) > 1) == (columns > 0 and room >= NGRAM_SIZE - 1)
        path = written(tree)
        source.learn(tree, path, following(tree))
        root = path.tokens[-1]


def test_window_grows_and_shrinks() -> None:
    source = window_source()
    for columns in (8, 3, 5, 1):
        trees = decode_window(source, [columns] * 8)
        assert source._window is not None
        assert list(map(len, source._window.levels)) == [columns - 1, *[columns] * (NGRAM_SIZE - 2)]
        assert len(trees[-1]) - 1 <= window_nodes(columns), "equal tokens share a node"


def test_a_narrowed_window_keeps_its_trajectories() -> None:
    """Fewer columns go on where they are: the next pass finishes n-grams at once, with no warm-up."""
    source = window_source()
    decode_window(source, [8] * 8)
    known = len(source.pool)
    source.pool = type(source.pool)(NGRAM_SIZE, 7)
    decode_window(source, [3])
    assert known and len(source.pool) >= 2


def test_window_shrinks_with_the_room() -> None:
    source = window_source()
    decode_window(source, [8] * 8)
    tree = grown(source, 8, 5)
    assert max(tree.depths) <= 5
    assert len(tree) > 1


def test_window_draws_from_its_own_generator() -> None:
    assert grown(window_source(seed=1), 6, 50).tokens == grown(window_source(seed=1), 6, 50).tokens
    draws = {tuple(grown(window_source(seed=seed), 6, 50).tokens) for seed in range(8)}
    assert len(draws) > 1
    assert all(set(tokens) <= {1, 2, 3} for tokens in draws), "from the text"


# --- what every source promises ----------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[], Source]] = {
    "suffix": SuffixSource,
    "recycling": lambda: RecyclingSource(SuccessorTable(64)),
    "pool": PoolSource,
    "window": lambda: WindowSource(seeded(3), 4),
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
    levels = [sorted(rng.randrange(LEVELS) for _ in line) for line in tokens]
    return Successors(tokens, levels)


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
        if isinstance(source, WindowSource):
            source.grow(tree, rng.randrange(4), 10)
        path = random_path(rng, tree, vocab)
        source.learn(tree, path, random_successors(rng, len(tree), vocab) if gathered else None)
        root = path.tokens[-1]

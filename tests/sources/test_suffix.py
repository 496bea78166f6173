"""The suffix automaton against plain searches, and the source that copies with it."""

import copy
from collections.abc import Sequence

from helpers.drafting import tokens_of
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Path, TokenTree
from lookahead.sources import SuffixAutomaton, SuffixSource

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


def suffix_source(text: Sequence[int]) -> SuffixSource:
    source = SuffixSource()
    source.start(text, None)
    return source


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
    source = suffix_source([1, 2, 3, 4, 1, 2, 3])
    alone = source.propose(source.root())
    assert tokens_of(alone) == [4]
    source = suffix_source([1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 3])
    mixed = source.propose(source.root())
    assert tokens_of(mixed) == [4, 5]
    kinds = [kind for _, kind in [*alone, *mixed]]
    assert len(set(kinds)) == 3
    assert alone[0][1] // 6 == mixed[0][1] // 6, "the same match length"
    assert source.priors[alone[0][1]] > source.priors[mixed[0][1]] > source.priors[mixed[1][1]]


def test_suffix_learns_what_was_written() -> None:
    source = suffix_source([])
    assert source.propose(source.root()) == []
    for token in (1, 2, 1):
        source.learn(TokenTree(0), Path([0], [token]), None)
    assert not source._automaton._next[0], "nothing is read as long as nothing is drafted"
    assert tokens_of(source.propose(source.root())) == [2]

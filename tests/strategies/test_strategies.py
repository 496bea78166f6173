"""Strategies as settings: defaults, what is refused and how, and the way through JSON."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.refusals import refuses
from helpers.toy import decode, examples, hashed, plain, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import JacobiDrafter, PlainDrafter
from lookahead import Jacobi, Lookahead
from lookahead.draft.context import RowContext
from lookahead.draft.published import LookaheadDrafter
from lookahead.registry import strategy_from
from lookahead.strategies.base import Strategy

COMMON = {
    "verification": st.sampled_from(["exact", "rejection"]),
    "seed": st.none() | st.integers(0, 2**40),
    "stats": st.sampled_from(["none", "summary", "detailed"]),
}
LOOKAHEADS = st.builds(
    Lookahead,
    window_size=st.integers(1, 30),
    ngram_size=st.integers(2, 30),
    verification_set_size=st.integers(0, 30),
    pool_from_prompt=st.booleans(),
    pool_from_output=st.booleans(),
    always_forward_one=st.booleans(),
    **COMMON,
)
JACOBIS = st.builds(
    Jacobi,
    mode=st.sampled_from(["jacobi", "gauss-seidel", "hybrid", "sliding"]),
    block_size=st.integers(1, 100),
    initial_guess=st.sampled_from(["text", "tail", "pad"]) | st.lists(st.integers(0, 99), min_size=1).map(tuple),
    return_trajectory=st.booleans(),
    tails=st.integers(0, 5),
    **COMMON,
)
BLOCKS = st.builds(
    Jacobi,
    mode=st.sampled_from(["jacobi", "gauss-seidel", "hybrid"]),
    block_size=st.integers(1, 100),
    blocks=st.integers(1, 4),
    spawn_ratio=st.floats(0, 1, exclude_min=True),
    tails=st.integers(0, 5),
    **COMMON,
)
STRATEGIES = LOOKAHEADS | JACOBIS | BLOCKS | st.just(Jacobi(mode="jacobi", block_size=None))


def row(prompt: list[int], **changes: Any) -> RowContext:
    settings = {"vocab_size": 5, "pad": 0, "end_tokens": frozenset({4}), "rng": seeded(0)}
    return RowContext(prompt=prompt, **settings | changes)


def test_lookahead_defaults() -> None:
    """No numbers are the automatic mode; with any of the three, the others are the paper's usual ones."""
    given = Lookahead(window_size=7)
    assert given == Lookahead(ngram_size=5) == Lookahead(verification_set_size=7)
    assert not given.automatic and Lookahead().automatic
    assert given.pool_from_prompt and given.pool_from_output and given.always_forward_one
    assert Jacobi() == Jacobi(mode="sliding", block_size=16, initial_guess="text", blocks=1, tails=0)


@pytest.mark.parametrize("strategy", [Lookahead, Jacobi])
def test_settings_are_keyword_only_and_frozen(strategy: type[Strategy]) -> None:
    with pytest.raises(TypeError, match="positional"):
        strategy(7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy().seed = 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        strategy(window=3)
    assert strategy(seed=3) == strategy(seed=3)
    assert len({strategy(seed=3), strategy(seed=3), strategy()}) == 2


REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    Lookahead: [
        ({"window_size": 0}, r"Lookahead\(window_size=\) must be at least 1: got 0"),
        ({"ngram_size": 0}, r"Lookahead\(ngram_size=\) must be at least 1: got 0"),
        ({"verification_set_size": -1}, r"Lookahead\(verification_set_size=\) must be at least 0: got -1"),
        ({"ngram_size": 1}, r"ngram_size=1\) is plain decoding.*got window_size=7, verification_set_size=7"),
        ({"ngram_size": 1, "verification_set_size": 0}, r"plain decoding.*got window_size=7, verification_set_size=0"),
        ({"window_size": "7"}, r"window_size=\) must be a whole number: got '7' of type str"),
        ({"window_size": 7.0}, r"window_size=\) must be a whole number: got 7.0 of type float"),
        ({"window_size": True}, r"window_size=\) must be a whole number: got True of type bool"),
        ({"ngram_size": "5"}, r"ngram_size=\) must be a whole number: got '5' of type str"),
        ({"verification_set_size": False}, r"verification_set_size=\) must be a whole number: got False of type bool"),
        ({"pool_from_prompt": 1}, r"pool_from_prompt=\) must be True or False: got 1"),
        ({"pool_from_output": "yes"}, r"pool_from_output=\) must be True or False: got 'yes'"),
        ({"always_forward_one": None}, r"always_forward_one=\) must be True or False: got None"),
    ],
    Jacobi: [
        (
            {"mode": "slide"},
            r"Jacobi\(mode=\) must be one of 'jacobi', 'gauss-seidel', 'hybrid', 'sliding': got 'slide'",
        ),
        ({"block_size": 0}, r"Jacobi\(block_size=\) must be at least 1: got 0"),
        ({"block_size": True}, r"block_size=\) must be a whole number: got True of type bool"),
        ({"block_size": None}, r"Jacobi\(mode='sliding'\) needs a block_size of at least 1: got None"),
        ({"initial_guess": "random"}, r"initial_guess=\) must be one of 'text', 'tail', 'pad': got 'random'"),
        ({"initial_guess": ()}, r"initial_guess=\) must be 'text', 'tail', 'pad' or a list of token ids: got \(\)"),
        ({"initial_guess": (1, -1)}, r"list of token ids: got \(1, -1\)"),
        ({"initial_guess": (1, True)}, r"list of token ids: got \(1, True\)"),
        ({"initial_guess": (1, 2.0)}, r"list of token ids: got \(1, 2.0\)"),
        ({"initial_guess": 5}, r"list of token ids: got 5"),
        ({"blocks": 0}, r"Jacobi\(blocks=\) must be at least 1: got 0"),
        ({"blocks": 2.0}, r"Jacobi\(blocks=\) must be a whole number: got 2.0 of type float"),
        ({"tails": -1}, r"Jacobi\(tails=\) must be at least 0: got -1"),
        ({"blocks": 2}, r"blocks=2\) needs blocks that end: expected mode='jacobi'.*got mode='sliding', block_size=16"),
        ({"blocks": 2, "mode": "jacobi", "block_size": None}, r"a block_size, got mode='jacobi', block_size=None"),
        ({"spawn_ratio": 0}, r"spawn_ratio=\) must be a number above 0 and at most 1: got 0"),
        ({"spawn_ratio": 85}, r"spawn_ratio=\) must be a number above 0 and at most 1: got 85"),
        ({"spawn_ratio": True}, r"spawn_ratio=\) must be a number above 0 and at most 1: got True"),
        ({"spawn_ratio": "0.85"}, r"spawn_ratio=\) must be a number above 0 and at most 1: got '0.85'"),
        ({"return_trajectory": 0}, r"return_trajectory=\) must be True or False: got 0"),
    ],
}
COMMON_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"verification": "traversal"},
        r"(Lookahead|Jacobi)\(verification=\) must be one of 'exact', 'rejection': got 'traversal'",
    ),
    (
        {"verification": ["exact"]},
        r"(Lookahead|Jacobi)\(verification=\) must be one of 'exact', 'rejection': got \['exact'\]",
    ),
    ({"stats": "all"}, r"(Lookahead|Jacobi)\(stats=\) must be one of 'none', 'summary', 'detailed': got 'all'"),
    ({"seed": 1.5}, r"(Lookahead|Jacobi)\(seed=\) must be a whole number: got 1.5 of type float"),
]


@pytest.mark.parametrize(
    ("strategy", "given", "message"),
    [(strategy, *each) for strategy in REFUSED for each in [*REFUSED[strategy], *COMMON_REFUSED]],
)
def test_what_is_refused(strategy: type[Strategy], given: dict[str, Any], message: str) -> None:
    refuses(message, strategy, **given)
    refuses(message, strategy.from_dict, given)


def test_smallest_settings_are_allowed() -> None:
    Lookahead(window_size=1, ngram_size=1, verification_set_size=0)
    Lookahead(window_size=1, ngram_size=2, verification_set_size=0)
    Jacobi(block_size=1)
    Jacobi(mode="jacobi", block_size=None)


@examples(150)
@given(STRATEGIES)
def test_settings_survive_json(strategy: Strategy) -> None:
    read = json.loads(json.dumps(strategy.to_dict()))
    assert type(strategy).from_dict(read) == strategy
    assert strategy_from(read) == strategy
    assert read["strategy"] == strategy.name
    assert read == strategy.to_dict(), "plain data: lists, no tuples"


def test_from_dict_leaves_its_argument_alone_and_fills_in_defaults() -> None:
    settings = {"strategy": "lookahead", "window_size": 3}
    assert Lookahead.from_dict(settings) == Lookahead(window_size=3)
    assert Lookahead.from_dict({"window_size": 3}) == Lookahead(window_size=3)
    assert settings == {"strategy": "lookahead", "window_size": 3}


@pytest.mark.parametrize(
    ("call", "value", "message"),
    [
        (
            Lookahead.from_dict,
            {"window": 3, "levels": 2},
            r"Unknown field 'levels', 'window' for Lookahead: it knows .*stats.*window_size",
        ),
        (Lookahead.from_dict, {"block_size": 3}, r"Unknown field 'block_size' for Lookahead"),
        (Lookahead.from_dict, {"strategy": "jacobi"}, r"These are settings of strategy 'jacobi': expected 'lookahead'"),
        (
            strategy_from,
            {"strategy": "lookbehind"},
            "Unknown strategy 'lookbehind' in lookahead_strategy: expected look",
        ),
        (strategy_from, {"strategy": "jacobi", "window_size": 3}, "Unknown field 'window_size' for Jacobi"),
        (strategy_from, "lookahead", "must be .* or a dict of their settings: got 'lookahead' of type str"),
        (strategy_from, 7, "or a dict of their settings: got 7 of type int"),
        (strategy_from, Lookahead, "or a dict of their settings: got .* of type type"),
        (lambda level: Lookahead.from_lade(LEVEL=level, WINDOW_SIZE=7, GUESS_SET_SIZE=7), 0, "ngram_size"),
        (lambda level: Lookahead.from_lade(LEVEL=level, WINDOW_SIZE=7, GUESS_SET_SIZE=7), -1, "ngram_size"),
    ],
)
def test_dicts_and_names_that_are_refused(call: Callable[[Any], Strategy], value: Any, message: str) -> None:
    refuses(message, call, value)


def test_strategy_from() -> None:
    given_ = Jacobi(block_size=3)
    assert strategy_from(given_) is given_
    assert strategy_from(None) == Lookahead()
    assert strategy_from({}) == Lookahead()
    assert strategy_from({"window_size": 3}) == Lookahead(window_size=3)
    assert strategy_from({"strategy": "jacobi", "mode": "hybrid"}) == Jacobi(mode="hybrid")


def test_from_lade() -> None:
    """The names and the defaults of ``lade.config_lade``: guesses from trajectories, the prompt's only if asked for."""
    settings = Lookahead.from_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=9)
    assert settings == Lookahead(
        window_size=7, ngram_size=5, verification_set_size=9, pool_from_prompt=False, pool_from_output=False
    )
    assert Lookahead.from_lade(LEVEL=4, WINDOW_SIZE=6, GUESS_SET_SIZE=-1).verification_set_size == 6
    assert Lookahead.from_lade(LEVEL=4, WINDOW_SIZE=6, GUESS_SET_SIZE=0).verification_set_size == 0
    assert Lookahead.from_lade(LEVEL=4, WINDOW_SIZE=6, GUESS_SET_SIZE=6, POOL_FROM_PROMPT=True).pool_from_prompt is True
    assert Lookahead.from_lade(LEVEL=4, WINDOW_SIZE=6, GUESS_SET_SIZE=6, POOL_FROM_PROMPT=1).pool_from_prompt is True


def test_drafter_has_the_settings() -> None:
    """G limits the pool, and the prompt is in it only if asked for."""
    prompt = [1, 2, 3, 1, 2, 0, 1, 2, 1]
    drafter = Lookahead(window_size=3, ngram_size=3, verification_set_size=2).drafter(row(prompt))
    assert isinstance(drafter, LookaheadDrafter)
    assert (drafter.pool.ngram_size, drafter.pool.per_key) == (3, 2)
    assert list(drafter.pool.get(1)) == [(2, 1), (2, 0)]
    without = Lookahead(ngram_size=3, pool_from_prompt=False).drafter(row(prompt))
    assert isinstance(without, LookaheadDrafter)
    assert len(without.pool) == 0


def test_plain_settings_make_the_plain_drafter() -> None:
    drafter = Lookahead(window_size=1, ngram_size=1, verification_set_size=0).drafter(row([1]))
    assert isinstance(drafter, PlainDrafter)


def test_jacobi_drafter_has_the_settings() -> None:
    drafter = Jacobi(mode="hybrid", block_size=3, initial_guess=(1, 2), return_trajectory=True).drafter(row([1]))
    assert isinstance(drafter, JacobiDrafter)
    assert (drafter.mode, drafter.block_size, drafter.trajectory) == ("hybrid", 3, [])
    assert drafter.draft(10).tokens[1:] == [1, 2, 1]
    ending = Jacobi(mode="hybrid", block_size=3, initial_guess=(1, 4)).drafter(row([1]))
    assert ending.draft(10).tokens[1:] == [1, 4], "the row's end token is watched"


@pytest.mark.parametrize("chain", [False, True])
def test_jacobi_tails_are_branches(chain: bool) -> None:
    """A model that takes one branch a pass is given one; the second block is in it."""
    settings = {"mode": "jacobi", "block_size": 4, "blocks": 2, "spawn_ratio": 0.5, "tails": 4, "initial_guess": "pad"}
    drafter = Jacobi(**settings).drafter(row([1, 2, 3], chain=chain, end_tokens=frozenset()))
    _, steps = decode(drafter, hashed(3, 4, 2), [1, 2, 3], 30)
    assert max(max(step.trees[0].depths) for step in steps) > 4
    assert any(len(step.trees[0]) > max(step.trees[0].depths) + 1 for step in steps) is not chain


@examples(60)
@given(STRATEGIES.filter(lambda s: isinstance(s.to_dict().get("initial_guess", "text"), str)), st.integers(0, 99))
def test_any_strategy_writes_plain_decodings_text(strategy: Strategy, seed: int) -> None:
    next_token = hashed(seed, 4, 2)
    text, steps = decode(strategy.drafter(row([1, 2, 3])), next_token, [1, 2, 3], 15)
    assert text == plain(next_token, [1, 2, 3], 15)
    assert len(steps) <= 15


def test_text_guess_draws_from_what_was_written_too() -> None:
    """The prompt holds only 1s and the text only 2s: later blocks must be able to start with a 2."""
    drafter = Jacobi(mode="gauss-seidel", block_size=4, return_trajectory=True).drafter(row([1]))
    decode(drafter, lambda prefix: 2, [1], 40)
    starts = [fed for fed in drafter.trajectory if len(fed) == 4]
    assert len(starts) > 3
    assert any(2 in fed for fed in starts)

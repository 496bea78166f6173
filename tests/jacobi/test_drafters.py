"""The Jacobi drafters in the common loop: plain decoding's text, in no more passes, by the published iteration."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import get_args

import pytest
from helpers.refusals import refuses
from helpers.toy import NextToken, ToyModel, decode, decoded_as_plain, examples, functions, hashed, plain, rooms, seeded
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Drafter, GreedyVerifier, JacobiDrafter, JacobiMode, PlainDrafter, Step, guesser, solve

MODES: tuple[JacobiMode, ...] = get_args(JacobiMode)
GUESSES = ["text", "tail", "pad", (1, 2, 3, 0)]
PROMPTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)
END = frozenset({3})


def jacobi(mode: JacobiMode, block: int | None, guess, prompt: Sequence[int], **settings) -> JacobiDrafter:
    return JacobiDrafter(mode, block, guesser(guess, list(prompt), 5, 0, seeded(0)), **settings)


def written(steps: Sequence[Step]) -> list[int]:
    """Tokens in all after each pass."""
    return list(accumulate(len(step.paths[0].tokens) for step in steps))


@st.composite
def drafters(draw: st.DrawFn, prompt: Sequence[int], end_tokens: frozenset[int] = frozenset()) -> JacobiDrafter:
    mode = draw(st.sampled_from(MODES))
    sizes = st.integers(1, 9)
    block = draw(st.none() | sizes if mode == "jacobi" else sizes)
    return jacobi(
        mode,
        block,
        draw(st.sampled_from(GUESSES)),
        prompt,
        end_tokens=end_tokens,
        keep_trajectory=True,
        blocks=1 if mode == "sliding" or block is None else draw(st.integers(1, 4)),
        spawn_ratio=draw(st.sampled_from([0.1, 0.5, 0.85, 1.0])),
        tails=draw(st.integers(0, 5)),
    )


@examples(250)
@given(functions(), PROMPTS, st.integers(1, 24), st.sampled_from([END, frozenset()]), st.data())
def test_text_is_plain_decoding(
    next_token: NextToken, prompt: list[int], count: int, end_tokens: frozenset[int], data: st.DataObject
) -> None:
    """For any function, mode, blocks, tails and guess; never more passes, and the iterate is the first branch fed."""
    drafter = data.draw(drafters(prompt, end_tokens))
    steps = decoded_as_plain(drafter, next_token, prompt, count, end_tokens)
    for fed, step in zip(drafter.trajectory, steps[1:], strict=True):
        assert step.trees[0].tokens[1 : len(fed) + 1] == fed
        assert drafter.tails or len(step.trees[0]) == len(fed) + 1
    if drafter.block_size is not None:
        assert max(map(len, drafter.trajectory), default=0) <= drafter.block_size * drafter.blocks


@examples(150)
@given(functions(), PROMPTS, st.integers(1, 10), st.sampled_from(GUESSES))
def test_block_follows_the_published_iteration(next_token: NextToken, prompt: list[int], block: int, guess) -> None:
    """``y_i <- f(x, y_<i)`` for all i at once, kept here in full: what is fed is its part that is not fixed yet."""
    drafter = jacobi("jacobi", block, guess, prompt, keep_trajectory=True)
    text, steps = decode(drafter, next_token, prompt, block + 1)
    first, iterate = text[:1], guesser(guess, list(prompt), 5, 0, seeded(0))(block)
    for fed, before in zip(drafter.trajectory, written(steps), strict=False):
        assert fed == iterate[before - 1 :][: len(fed)]
        assert iterate[: before - 1] == text[1:before], "what left the block was fixed"
        iterate = [next_token(prompt + first + iterate[:place]) for place in range(block)]
    assert iterate == text[1:]


@examples(150)
@given(functions(), PROMPTS, st.sampled_from(["jacobi", "gauss-seidel"]), st.integers(1, 8), st.integers(1, 30))
def test_block_of_m_needs_at_most_m_passes(
    next_token: NextToken, prompt: list[int], mode: JacobiMode, block: int, count: int
) -> None:
    """Every pass fixes a token, so a block of m places is used up after m of them."""
    starts: list[int] = []

    def guess(size: int) -> list[int]:
        starts.append(len(drafter.trajectory))
        return [0] * size

    drafter = JacobiDrafter(mode, block, guess, keep_trajectory=True)
    decode(drafter, next_token, prompt, count)
    sizes = [len(fed) for fed in drafter.trajectory]
    for start, end in pairwise([*starts, len(sizes)]):
        assert end - start <= max(1, sizes[start])
        assert all(later < sooner for sooner, later in pairwise(sizes[start:end]))


@pytest.mark.parametrize("mode", MODES)
def test_right_guess_is_one_pass(mode: JacobiMode) -> None:
    """m right tokens and the carried one come from one pass; with the prompt's own token that is m+2 in two."""
    next_token = hashed(1, 5)
    text = plain(next_token, [1, 2], 10)
    out, steps = decode(JacobiDrafter(mode, 8, lambda size: text[1:9][:size]), next_token, [1, 2], 10)
    assert out == text
    assert written(steps) == [1, 10]


def test_whole_block_leaves_when_it_is_fixed() -> None:
    """Gauss-Seidel blocks do not move: the next one starts only when all of the last one is fixed."""
    drafter = jacobi("gauss-seidel", 3, "pad", [1], keep_trajectory=True)
    decode(drafter, lambda prefix: 1, [1], 9)
    # 1 is fixed, the rest of the block turns to 1s at once, and all of it is accepted together.
    assert drafter.trajectory == [[0, 0, 0], [1, 1], [0, 0, 0], [1, 1]]


def test_sliding_block_keeps_its_size() -> None:
    drafter = jacobi("sliding", 3, "pad", [1], keep_trajectory=True)
    _, steps = decode(drafter, lambda prefix: 1, [1], 20)
    # One token is fixed: the argmax beyond the right edge fills the one new place. Four are: every place is new.
    assert drafter.trajectory[:4] == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert [len(tree) - 1 for tree, room in rooms(steps, 20)] == [min(3, room) for _, room in rooms(steps, 20)]


@examples(100)
@given(functions(), PROMPTS, st.integers(1, 8), st.sampled_from(GUESSES))
def test_sliding_block_fills_the_room_it_has(next_token: NextToken, prompt: list[int], block: int, guess) -> None:
    """However many tokens were fixed, its right edge is refilled."""
    _, steps = decode(jacobi("sliding", block, guess, prompt), next_token, prompt, 30)
    assert all(len(tree) - 1 == min(block, room) for tree, room in rooms(steps, 30))


@pytest.mark.parametrize("mode", MODES)
def test_a_wider_row_changes_no_draft(mode: JacobiMode) -> None:
    """The scores of a narrow row are padded to the widest tree; what stands there is no token."""

    def narrow() -> JacobiDrafter:
        return JacobiDrafter(mode, 3, lambda size: [4] * size, keep_trajectory=True)

    alone, beside, wide = narrow(), narrow(), jacobi("sliding", 9, "pad", [2])
    next_token = hashed(6, 5, 2)
    decode(alone, next_token, [1], 20)
    steps = list(solve(ToyModel(next_token, [[1], [2]]), [beside, wide], GreedyVerifier(2, 20)))
    assert any(len(step.trees[1]) > len(step.trees[0]) for step in steps)
    assert beside.trajectory[: len(alone.trajectory)] == alone.trajectory


@examples(150)
@given(functions(), PROMPTS, st.integers(1, 8), st.sampled_from(GUESSES))
def test_sliding_is_never_behind_in_its_first_block(
    next_token: NextToken, prompt: list[int], block: int, guess
) -> None:
    """From the same guess both hold the same iterate of the block; sliding also works on what lies beyond it.

    Later blocks start from other tokens in the two modes, so one text may go either way there.
    """
    _, shrinking = decode(jacobi("jacobi", block, guess, prompt), next_token, prompt, 30)
    _, sliding = decode(jacobi("sliding", block, guess, prompt), next_token, prompt, 30)
    for behind, ahead in zip(written(shrinking), written(sliding), strict=False):
        assert ahead >= behind
        if behind > block:
            break


def test_sliding_needs_fewer_passes_over_many_texts() -> None:
    def passes(mode: JacobiMode) -> int:
        texts = [hashed(seed, 4, order) for seed in range(40) for order in (1, 2, 3)]
        return sum(len(decode(jacobi(mode, 5, "pad", [1, 2]), text, [1, 2], 24)[1]) for text in texts)

    assert passes("sliding") < 0.95 * passes("jacobi")


@examples(150)
@given(functions(), PROMPTS, st.integers(1, 9), st.integers(1, 24), st.sampled_from(GUESSES))
def test_hybrid_drafts_nothing_past_an_end_token(
    next_token: NextToken, prompt: list[int], block: int, count: int, guess
) -> None:
    text, steps = decode(jacobi("hybrid", block, guess, prompt, end_tokens=END), next_token, prompt, count, END)
    assert text == plain(next_token, prompt, count, END)
    assert not any(END & set(step.trees[0].tokens[1:-1]) for step in steps)


def test_hybrid_keeps_the_places_past_an_end_token_that_goes_away() -> None:
    """The end token in the iterate was wrong: what was not fed behind it is fed next, as it was."""
    drafter = JacobiDrafter("hybrid", 4, lambda size: [1, 3, 2, 2][:size], END, keep_trajectory=True)
    text, _ = decode(drafter, lambda prefix: 1, [1], 6, END)
    assert text == [1] * 6
    assert drafter.trajectory[:2] == [[1, 3], [1, 2]]


def test_hybrid_decodes_the_rest_plainly() -> None:
    """Less than a block is left: nothing is drafted."""
    drafter = jacobi("hybrid", 4, "pad", [1], keep_trajectory=True)
    text, _ = decode(drafter, lambda prefix: 1, [1], 9)
    assert text == [1] * 9
    assert drafter.trajectory == [[0, 0, 0, 0], [1, 1, 1], [], [], []]


def test_no_block_size_is_all_the_room_there_is() -> None:
    """And the trajectory is kept only when it is asked for."""
    drafter = jacobi("jacobi", None, "pad", [1], keep_trajectory=True)
    decode(drafter, hashed(3, 5), [1], 12)
    assert len(drafter.trajectory[0]) == 10, "12 tokens less the prompt's own and the last carried one"
    drafter = jacobi("sliding", 4, "pad", [1])
    decode(drafter, hashed(3, 5), [1], 12)
    assert drafter.trajectory is None


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "jacobi"])
def test_only_block_jacobi_goes_without_a_block_size(mode: JacobiMode) -> None:
    refuses(f"Jacobi mode '{mode}' needs a block_size: got None", JacobiDrafter, mode, None, lambda size: [0] * size)


def test_plain_drafter_is_one_token_a_pass() -> None:
    next_token = hashed(5, 5)
    text, steps = decode(PlainDrafter(), next_token, [1, 2], 9)
    assert text == plain(next_token, [1, 2], 9)
    assert [len(step.trees[0]) for step in steps] == [1] * 9
    assert written(steps) == list(range(1, 10))


@examples(60)
@given(functions(), st.lists(PROMPTS, min_size=2, max_size=4), st.integers(1, 16), st.data())
def test_rows_of_a_batch_do_not_touch_each_other(
    next_token: NextToken, prompts: list[list[int]], count: int, data: st.DataObject
) -> None:
    """Rows with other trees, other lengths and other ends: each is written as it would be alone."""
    rows: list[Drafter] = [data.draw(drafters(prompt, END)) for prompt in prompts[1:]]
    verifier = GreedyVerifier(len(prompts), count, END)
    steps = list(solve(ToyModel(next_token, prompts), [PlainDrafter(), *rows], verifier))
    assert verifier.tokens == [plain(next_token, prompt, count, END) for prompt in prompts]
    assert len(steps) <= max(map(len, verifier.tokens))
    for row, text in enumerate(verifier.tokens):
        assert [token for step in steps for token in step.paths[row].tokens] == text


@examples(60)
@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 12), max_size=5))
def test_guessers(text: list[int], sizes: list[int]) -> None:
    drawn = guesser("text", text, 10, 77, seeded(2))
    tail = guesser("tail", text, 10, 77, seeded(2))
    pad = guesser("pad", text, 10, 77, seeded(2))
    given_ = guesser((4, 5, 6), text, 10, 77, seeded(2))
    again = guesser("text", text, 10, 77, seeded(2))
    used: list[int] = []
    for size in sizes:
        draw = drawn(size)
        assert len(draw) == size
        assert set(draw) <= set(text or range(10))
        assert draw == again(size)
        copied = tail(size)
        end = text[-size:] if size else []
        assert copied == [end[i % len(end)] if end else 77 for i in range(size)]
        assert pad(size) == [77] * size
        used += given_(size)
    assert used == [(4, 5, 6)[i % 3] for i in range(sum(sizes))]


def test_guesser_follows_a_text_that_grows() -> None:
    text = [1]
    tail, drawn = guesser("tail", text, 10, 0, seeded(0)), guesser("text", text, 10, 0, seeded(0))
    assert (tail(2), set(drawn(20))) == ([1, 1], {1})
    text += [2, 3]
    assert (tail(2), set(drawn(50))) == ([2, 3], {1, 2, 3})

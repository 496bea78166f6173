"""Lookahead decoding as published, in the common loop: its trees, its n-grams, its text."""

from collections.abc import Sequence
from itertools import islice

import pytest
from helpers.toy import NextToken, ToyModel, decode, decoded_as_plain, examples, functions, hashed, plain, seeded
from helpers.windows import Ngram, SlowWindow, counter
from hypothesis import given
from hypothesis import strategies as st

from jacobi import GreedyVerifier, Step, solve
from lookahead.draft.context import RowContext
from lookahead.draft.published import JacobiWindow, LookaheadDrafter
from lookahead.sources.ngram_pool import NgramPool

W, N, G = st.integers(1, 6), st.integers(2, 6), st.integers(0, 4)
PROMPTS = st.lists(st.integers(0, 4), min_size=1, max_size=8)


class Recording(NgramPool):
    """A pool that remembers what it was given."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.given: list[Ngram] = []

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        self.given.append((key, continuation))
        super().add(key, continuation)


def drafter(
    w: int,
    n: int,
    g: int,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    pool: NgramPool | None = None,
    from_prompt: bool = True,
    from_output: bool = True,
    forward_one: bool = True,
) -> LookaheadDrafter:
    return LookaheadDrafter(
        RowContext(prompt, 5, 0, frozenset(), seeded(seed)),
        NgramPool(n, g) if pool is None else pool,
        w,
        pool_from_prompt=from_prompt,
        pool_from_output=from_output,
        always_forward_one=forward_one,
    )


@examples(60)
@given(functions(), PROMPTS, W, N, G, st.booleans())
def test_window_moves_by_one_or_by_what_was_written(
    next_token: NextToken, prompt: list[int], w: int, n: int, g: int, forward_one: bool
) -> None:
    """`advance` is the one column; the columns beyond it are filled with tokens of the text so far."""
    skips: list[list[int]] = []

    class Spy(JacobiWindow):
        def skip(self, tokens: Sequence[int]) -> None:
            skips.append(list(tokens))
            super().skip(tokens)

    lookahead = drafter(w, n, g, prompt, forward_one=forward_one)
    lookahead._window = Spy(w, n, lookahead._window.levels[0])
    steps = list(islice(solve(ToyModel(next_token, [prompt]), [lookahead], GreedyVerifier(1, 200)), 10))
    written = [step.paths[0].tokens for step in steps]
    # The prompt's own pass had no window in it.
    assert [len(refill) for refill in skips] == ([] if forward_one else [len(tokens) - 1 for tokens in written[1:]])
    text = set(prompt).union(*written)
    assert all(set(refill) <= text for refill in skips)


@examples(150)
@given(
    functions(),
    PROMPTS,
    st.tuples(W, N, G),
    st.integers(1, 30),
    st.fixed_dictionaries(dict.fromkeys(("from_prompt", "from_output", "forward_one"), st.booleans())),
    st.sampled_from([frozenset({3}), frozenset()]),
)
def test_text_is_plain_decoding(
    next_token: NextToken,
    prompt: list[int],
    sizes: tuple[int, int, int],
    count: int,
    settings: dict[str, bool],
    end_tokens: frozenset[int],
) -> None:
    """For any function and setting; never more passes than tokens, and no node deeper than what is left to write."""
    decoded_as_plain(drafter(*sizes, prompt, **settings), next_token, prompt, count, end_tokens)


@examples(100)
@given(functions(), PROMPTS, W, N, G)
def test_warm_pass_feeds_at_most_w_plus_g_times_n_minus_1(
    next_token: NextToken, prompt: list[int], w: int, n: int, g: int
) -> None:
    _, steps = decode(drafter(w, n, g, prompt), next_token, prompt, 40)
    warm = steps[1 + n - 2 :]
    assert all(len(step.trees[0]) <= (w + g) * (n - 1) for step in warm)


@pytest.mark.parametrize(("w", "n", "g"), [(5, 4, 3), (3, 3, 2), (2, 2, 1), (1, 5, 4)])
def test_bound_on_fed_tokens_is_reached(w: int, n: int, g: int) -> None:
    """With a full pool and nothing shared the pass is exactly that big: prefixes are all that makes it smaller."""
    pool = NgramPool(n, g)
    lookahead = drafter(w, n, g, [1], pool=pool, from_prompt=False, from_output=False)
    fresh = counter()
    lookahead._window.levels = [list(islice(fresh, w - (level == 0))) for level in range(n - 1)]
    for _ in range(g):
        pool.add(1, tuple(islice(fresh, n - 1)))
    assert len(lookahead.draft(100)) == (w + g) * (n - 1)


@examples(100)
@given(functions(), PROMPTS, W, N, st.sampled_from([0, 3]))
def test_harvest_is_what_the_model_says_on_the_slow_windows_paths(
    next_token: NextToken, prompt: list[int], w: int, n: int, g: int
) -> None:
    """The whole window recomputed from the description: a cell's next token follows the real text, the spine up to
    its column and what is above it in its column. Column 0 hangs from the real root and is keyed by it."""
    pool = Recording(n, g)
    lookahead = drafter(w, n, g, prompt, pool=pool, from_prompt=False, from_output=False)
    slow = SlowWindow(w, n, lookahead._window.levels[0])
    text, expected, warm = list(prompt), [], 0
    verifier = GreedyVerifier(1, 200)
    for index, step in enumerate(islice(solve(ToyModel(next_token, [prompt]), [lookahead], verifier), 12)):
        if index:
            levels = slow.levels()
            new = []
            for column in range(len(levels[-1]) + (len(levels) == 1)):
                tooth = [level[column] for level in levels[1:]]
                new.append(next_token(text + levels[0][:column] + tooth))
            ngrams = slow.advance(text[-1], new)
            assert not ngrams or ngrams[0][0] == step.trees[0].tokens[0] == text[-1]
            expected += ngrams
            warm += bool(ngrams)
            assert pool.given == expected
        text += step.paths[0].tokens
    assert warm == 12 - 1 - (n - 2)


def test_column_0_is_keyed_by_the_real_root_after_several_tokens_were_accepted() -> None:
    """The window believed in another token there: it moves by one, the text by as many as were right."""
    text = [1, 2, 3, 4] * 20
    pool = Recording(3, 2)
    lookahead = drafter(3, 3, 2, text[:8], pool=pool, from_output=False)
    pool.given.clear()
    verifier = GreedyVerifier(1, 60)
    model = ToyModel(lambda prefix: text[len(prefix)], [text[:8]])
    leaps = 0
    for step in islice(solve(model, [lookahead], verifier), 10):
        harvest, pool.given = pool.given, []
        if harvest:
            assert harvest[0][0] == step.trees[0].tokens[0]
            leaps += len(step.paths[0].tokens) > 1
    assert leaps > 3, "guesses from the prompt are right here"


def test_guesses_are_verified_from_the_first_pass_on() -> None:
    """The pool knows the prompt, and the window is far from full."""
    text = [1, 2, 3, 4] * 6
    model = ToyModel(lambda prefix: text[len(prefix)], [text[:8]])
    steps = list(islice(solve(model, [drafter(4, 5, 2, text[:8])], GreedyVerifier(1, 14)), 2))
    assert len(steps[1].paths[0].tokens) >= 5, "N-1 right guesses and the carried token"


def test_window_alone_finds_repeated_text() -> None:
    """G=0 and nothing from the prompt: the window's own paths are verified too."""
    next_token = hashed(7, 5, 0)
    text, steps = decode(drafter(4, 3, 0, [1], from_prompt=False, from_output=False), next_token, [1], 30)
    assert text == plain(next_token, [1], 30)
    assert len(steps) < 20


@pytest.mark.parametrize("sources", [{"from_prompt": True}, {"from_output": True}, {}])
def test_pool_takes_only_what_it_is_asked_to(sources: dict[str, bool]) -> None:
    settings = {"from_prompt": False, "from_output": False} | sources
    pool = Recording(3, 4)
    prompt, text = [1, 2, 3, 4], [10 + place for place in range(20)]
    lookahead = drafter(2, 3, 4, prompt, pool=pool, **settings)
    at_start = list(pool.given)
    decode(lookahead, lambda prefix: text[len(prefix) - 4], prompt, 8)
    seen = set(pool.given[len(at_start) :])
    written = prompt + text[:8]
    output = {(written[end - 2], (written[end - 1], written[end])) for end in range(4, len(written))}
    assert at_start == ([(1, (2, 3)), (2, (3, 4))] if settings["from_prompt"] else [])
    assert (output <= seen) == settings["from_output"]


def draft_tokens(steps: Sequence[Step]) -> list[tuple[list[int], list[int]]]:
    return [(step.trees[0].tokens, step.trees[0].parents) for step in steps]


@pytest.mark.parametrize("forward_one", [True, False])
def test_steps_repeat_with_the_seed(forward_one: bool) -> None:
    """The same drafts from the same seed; another seed may need another number of passes for the same text."""

    def run(seed: int) -> tuple[list[int], list[Step]]:
        prompt = [1, 2, 3, 4]
        return decode(drafter(4, 3, 2, prompt, seed=seed, forward_one=forward_one), hashed(3, 5, 2), prompt, 40)

    runs = [run(seed) for seed in (0, 0, *range(1, 12))]
    assert draft_tokens(runs[0][1]) == draft_tokens(runs[1][1])
    assert len({str(draft_tokens(steps)) for _, steps in runs}) > 1
    assert len({tuple(text) for text, _ in runs}) == 1


def test_no_prompt_draws_from_the_whole_vocabulary() -> None:
    lookahead = drafter(6, 6, 0, [])
    assert set(lookahead._window.levels[0]) <= set(range(5))
    assert len(lookahead._window.levels[0]) == 9

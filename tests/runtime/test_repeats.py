"""How much of a text would have been drafted rightly."""

from lookahead.runtime.linear import PaidTest, Repeats


def test_the_example_of_the_docstring() -> None:
    repeats = Repeats(["abcd"])  # type: ignore[list-item]
    repeats.learn(0, "abcda")  # type: ignore[arg-type]
    assert (repeats.tokens, repeats.in_a_row) == (3, 3)
    repeats.learn(0, "xbc")  # type: ignore[arg-type]
    assert (repeats.tokens, repeats.in_a_row) == (3, 0)


def test_the_newest_continuation_is_expected() -> None:
    repeats = Repeats([[1, 2, 3, 1, 2, 4]])
    repeats.learn(0, [1, 2, 4])
    assert repeats.tokens == 1
    assert Repeats([[1, 2]]).tokens == 0
    for prompt in ([], [1], [1, 1]):
        repeats = Repeats([prompt])
        repeats.learn(0, [1, 1, 1, 1, 1])
        assert repeats.in_a_row >= 2


def test_a_batch_is_as_far_as_the_sequence_with_the_fewest() -> None:
    repeats = Repeats([[1, 2, 1, 2], [1, 2, 3, 4]])
    repeats.learn(0, [1, 2, 1])
    repeats.learn(1, [5, 6, 7])
    assert (repeats.tokens, repeats.in_a_row) == (0, 0)
    repeats.learn(1, [3, 4, 5, 6, 7])
    assert (repeats.tokens, repeats.in_a_row) == (3, 3)


def test_a_test_is_run_when_the_text_has_paid_for_it() -> None:
    """Six passes like the prompt's and four over one token: 38 ms, at 2 ms a token."""
    ran = []
    test = PaidTest(lambda: ran.append(1), prompt_tokens=50)  # type: ignore[func-returns-value]
    assert not test.allows(1000), "nothing is known of what a token costs"
    test.prompt_ms, test.single_ms = 5.0, 2.0
    assert [test.allows(repeated) for repeated in (17, 19, 20)] == [False, False, True]
    assert ran == [1]
    short = PaidTest(lambda: "wrong", prompt_tokens=10)
    short.prompt_ms, short.single_ms = 5.0, 2.0
    assert not short.allows(41), "its passes are longer than the prompt"
    assert not short.allows(42)
    assert not short.allows(99)
    assert PaidTest(None, 0).allows(0)

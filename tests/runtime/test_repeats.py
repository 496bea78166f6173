"""How much of a text would have been drafted rightly."""

from lookahead.runtime.linear import Repeats


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

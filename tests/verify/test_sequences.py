"""Sequences: what is written, what is padding, and prefixes as tensors."""

import torch
from helpers.verifying import sequences_of, settings

from jacobi import Path
from lookahead.verify.sequences import Sequences

PROMPTS = [[17, 41, 5], [0, 9, 23]]


def drawn(*, keep_up: bool) -> Sequences:
    """The example of the docstring."""
    sequences = sequences_of(PROMPTS, end=[2], length=9, keep_up=keep_up)
    sequences.written[0] += [8, 8, 31]
    sequences.written[1] += [6, 2]
    sequences.finish(1)
    return sequences


def test_the_drawn_example() -> None:
    sequences = drawn(keep_up=False)
    assert sequences.finished == [False, True]
    assert sequences.lengths() == [3, 2]
    assert sequences.padded().tolist() == [[17, 41, 5, 8, 8, 31], [0, 9, 23, 6, 2, 0]]
    assert (sequences.longest, sequences.most_new, sequences.end_tokens) == (3, 6, {2})


def test_prefixes_follow_what_is_written() -> None:
    sequences = sequences_of(PROMPTS)
    assert sequences.prefixes().tolist() == PROMPTS
    for count in range(1, 140):  # past the first and the second growth
        for row in (0, 1):
            sequences.written[row].append(count + row)
        assert sequences.texts([1]).tolist() == [[0, 9, 23, *range(2, count + 2)]]
        assert sequences.prefixes().tolist() == [PROMPTS[row] + sequences.written[row] for row in (0, 1)]
    assert sequences.prefixes().is_contiguous()
    prompt = torch.tensor(PROMPTS)
    criteria, config = settings()
    sequences = Sequences(prompt, criteria, config, keep_up=False)
    sequences.written[0].append(7)
    sequences.padded().fill_(1)
    assert sequences.texts([0]).tolist() == [[17, 41, 5, 7]]
    assert prompt.tolist() == PROMPTS, "the caller's prompt is not written into"


def test_shorter_texts_are_padded_with_their_own_last_token() -> None:
    sequences = sequences_of([*PROMPTS, [3, 3, 3]])
    assert sequences.texts([0, 1]).tolist() == PROMPTS
    sequences.written[0] += [8, 9, 31]
    sequences.written[1] += [6]
    sequences.written[2] += [7]
    assert sequences.texts([0, 1, 2]).tolist() == [[17, 41, 5, 8, 9, 31], [0, 9, 23, 6, 6, 6], [3, 3, 3, 7, 7, 7]]
    assert sequences.texts([1, 2]).tolist() == [[0, 9, 23, 6], [3, 3, 3, 7]]


def test_texts_go_on_along_branches() -> None:
    sequences = sequences_of(PROMPTS)
    sequences.written[0] += [8, 9]
    branches = [[], [1, 2], [3], [4, 4]]
    expected = [[0, 9, 23, 23, 23, 23], [17, 41, 5, 8, 9, 1, 2], [0, 9, 23, 3], [17, 41, 5, 8, 9, 4, 4]]
    assert sequences.texts([1, 0, 1, 0], branches).tolist() == [line + line[-1:] * (7 - len(line)) for line in expected]
    assert sequences.texts([1], [[]]).tolist() == [PROMPTS[1]]
    assert sequences.texts([1], [[5]]).tolist() == [[0, 9, 23, 5]]


def test_who_keeps_up_is_idle_when_as_long_as_the_longest() -> None:
    """Padding is counted by ``written``, and not by ``lengths``."""
    sequences = drawn(keep_up=True)
    assert [sequences.behind(row) for row in (0, 1)] == [0, 1]
    assert [sequences.idle(row) for row in (0, 1)] == [False, False]
    sequences.written[1].append(0)
    assert sequences.idle(1)
    assert sequences.lengths() == [3, 2]
    assert drawn(keep_up=False).idle(1)


def test_without_an_end_token_nothing_is_padding() -> None:
    sequences = sequences_of(PROMPTS, length=5)
    sequences.written[1] += [6, 2]
    sequences.finish(1)
    sequences.written[1].append(4)
    assert not sequences.pads
    assert sequences.lengths() == [0, 3]
    assert sequences_of(PROMPTS, length=2).most_new == 0
    assert sequences_of(PROMPTS).most_new > 10_000
    assert not sequences_of([[1]], keep_up=True).keep_up, "a sequence alone has nobody to keep up with"


def test_time_cuts_all_to_the_slowest_that_had_not_ended() -> None:
    """The example of the docstring; the last pass wrote three tokens, none and one."""
    sequences = sequences_of([*PROMPTS, [3, 3, 3]], end=[2])
    for row, written in enumerate([[8, 8, 31, 4], [6, 2], [7, 5]]):
        sequences.written[row] += written
    sequences.finish(1)
    assert sequences.padded().shape == (3, 7)
    paths = [Path([0, 1, 4], [8, 31, 4]), Path(), Path([0], [5])]
    sequences.cut(paths)
    assert sequences.written == [[8, 8], [6, 2], [7, 5]]
    assert sequences.finished == [True] * 3
    assert paths == [Path([0], [8]), Path(), Path([0], [5])]
    assert sequences.lengths() == [2, 2, 2]
    assert sequences.padded().tolist() == [[17, 41, 5, 8, 8], [0, 9, 23, 6, 2], [3, 3, 3, 7, 5]]

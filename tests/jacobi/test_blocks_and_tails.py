"""Several Jacobi blocks at a time, and rejected tails as branches: the trees they grow, and plain decoding's text."""

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.refusals import refuses
from helpers.toy import NextToken, decode, hashed

from jacobi import JacobiDrafter, Path, TokenTree
from jacobi.fixed_point import RejectedTails

END = frozenset({3})


def pads(size: int) -> list[int]:
    return [0] * size


def after(prefix: Sequence[int]) -> int:
    """The next number."""
    return prefix[-1] + 1


def started(root: int, **settings: Any) -> JacobiDrafter:
    """A drafter behind the prompt's pass, which wrote ``root``."""
    drafter = JacobiDrafter("jacobi", 4, pads, keep_trajectory=True, **settings)
    drafter.learn(TokenTree(9), [root], Path([0], [root]))
    return drafter


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens below the root down to each leaf."""
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    return [[tree.tokens[node] for node in tree.path(leaf)[1:]] for leaf in leaves]


def test_a_second_block_stands_behind_the_first_once_enough_of_it_is_fixed() -> None:
    """A pass fixes one number. Two of four are fixed when the second block of guesses comes."""
    drafter = JacobiDrafter("jacobi", 4, pads, keep_trajectory=True, blocks=2, spawn_ratio=0.5)
    text, _ = decode(drafter, after, [1], 20)
    assert text == list(range(2, 22))
    assert drafter.trajectory[:7] == [
        [0, 0, 0, 0],
        [1, 1, 1],
        [2, 2, 0, 0, 0, 0],
        [3, 3, 1, 1, 1],
        [4, 4, 2, 2],  # the second block is the one in use now
        [5, 5, 3],
        [6, 6, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(("ratio", "passes"), [(0.25, 1), (0.26, 2), (0.75, 3), (0.85, None)])
def test_the_spawn_ratio_is_a_share_of_the_block(ratio: float, passes: int | None) -> None:
    """Of four, 0.85 is all of them, and then the first block is gone."""
    drafter = JacobiDrafter("jacobi", 4, pads, keep_trajectory=True, blocks=2, spawn_ratio=ratio)
    decode(drafter, after, [1], 20)
    first = next((index for index, fed in enumerate(drafter.trajectory) if len(fed) > 4), None)
    assert first == passes


def test_a_third_block_waits_until_the_second_one_settles() -> None:
    """The root's own number comes one at a time, while the guesses behind it say themselves again at once."""

    def next_token(prefix: Sequence[int]) -> int:
        return 0 if prefix[-1] == 0 else prefix[-1] + 1

    drafter = JacobiDrafter("jacobi", 4, pads, keep_trajectory=True, blocks=3, spawn_ratio=0.5)
    decode(drafter, next_token, [1], 24)
    assert [len(fed) for fed in drafter.trajectory[:6]] == [4, 3, 2 + 4, 5 + 4, 8 + 4, 11]
    assert max(map(len, drafter.trajectory)) <= 12


def test_an_accepted_second_block_is_taken_in_the_same_pass() -> None:
    """Blocks are one branch: what is right of the second one needs no pass of its own."""
    text = list(range(1, 30))
    guesses = iter([text[2:4] + [0, 0], text[6:10]])
    drafter = JacobiDrafter("jacobi", 4, lambda size: next(guesses), blocks=2, spawn_ratio=0.5, keep_trajectory=True)
    out, steps = decode(drafter, lambda prefix: text[len(prefix)], text[:1], 10)
    assert out == text[1:11]
    assert drafter.trajectory == [[3, 4, 0, 0], [6, 7, 8, 9, 10]]
    assert [len(step.paths[0].tokens) for step in steps] == [1, 3, 6]


def test_rejected_tails() -> None:
    tails = RejectedTails(2)
    assert tails.candidates(5, [0, 0]) == []
    tails.keep([9, 5, 6])
    assert tails.candidates(5, [0, 0]) == [], "the present state is no rejected one"
    tails.keep([5, 7, 8, 5])
    assert tails.candidates(5, [1, 2, 3]) == [[6, 2, 3]], "filled up with the present draft"
    tails.keep([])
    tails.keep([4])
    assert tails.candidates(5, [1, 2, 3]) == [[7, 8, 5], [6, 2, 3]], "newest first, from the first occurrence"
    assert tails.candidates(5, [1]) == [[7], [6]], "no longer than the draft"
    assert tails.candidates(3, [1]) == []
    tails.keep([1])
    assert tails.candidates(5, [1]) == [[7]], "the queue holds two"
    assert RejectedTails(0).candidates(5, [1]) == []


def test_tails_are_branches_of_one_tree() -> None:
    drafter = started(7, tails=4)
    assert paths(drafter.draft(10)) == [[0, 0, 0, 0]]
    drafter.learn(TokenTree.chain(7, [0, 0, 0, 0]), [1, 8, 2, 3, 4], Path([0], [1]))
    assert paths(drafter.draft(10)) == [[8, 2, 3]]  # the root is 1
    drafter.learn(TokenTree.chain(1, [8, 2, 3]), [8, 2, 4, 5], Path([0, 1], [8, 2]))
    tree = drafter.draft(10)  # the root is 2, and the state [8, 2, 3] was rejected; [4] is the present one
    assert paths(tree) == [[4], [3]]
    assert (tree.tokens, tree.parents) == ([2, 4, 3], [-1, 0, 0])


def test_branches_share_prefixes() -> None:
    """The rejected state and the draft begin alike: what they share is scored once."""
    drafter = started(7, tails=2)
    drafter.draft(10)
    drafter.learn(TokenTree.chain(7, pads(4)), [1, 2, 3, 4, 5], Path([0], [1]))
    drafter.draft(10)
    drafter.learn(TokenTree.chain(1, [2, 3, 4]), [2, 3, 6, 7], Path([0], [2]))  # as if 2 ended the walk
    tree = drafter.draft(10)  # present [3, 6]; rejected [2, 3, 4]
    assert (tree.tokens, tree.parents) == ([2, 3, 6, 4], [-1, 0, 1, 1])


def test_the_accepted_branch_is_iterated() -> None:
    """What the model says along the branch that it accepted is the next state, not what it says along the draft."""
    drafter = started(7, tails=4)
    drafter.draft(10)
    drafter.learn(TokenTree.chain(7, pads(4)), [1, 8, 2, 3, 4], Path([0], [1]))
    drafter.draft(10)
    drafter.learn(TokenTree.chain(1, [8, 2, 3]), [2, 5, 6, 6], Path([0], [2]))
    tree = drafter.draft(10)
    assert (tree.tokens, tree.parents) == ([2, 5, 6, 3, 6], [-1, 0, 1, 0, 3])
    drafter.learn(tree, [3, 9, 9, 1, 9], Path([0, 3], [3, 1]))
    assert paths(drafter.draft(10)) == [[0, 0, 0, 0]], "two tokens were left of the block, and both are fixed"


def late(text: Sequence[int]) -> NextToken:
    """A model of ``text`` that says the right tokens one place late wherever what it reads is not the text."""

    def next_token(prefix: Sequence[int]) -> int:
        return text[len(prefix)] if list(prefix) == list(text[: len(prefix)]) else text[len(prefix) - 1]

    return next_token


@pytest.mark.parametrize("mode", ["jacobi", "sliding"])
def test_tails_bring_tokens_that_were_said_at_other_places(mode: Any) -> None:
    """Jacobi iteration gains nothing from such a model, and tails nearly whole blocks."""
    text = list(range(1, 32))
    passes = {}
    for tails in (0, 4):
        drafter = JacobiDrafter(mode, 6, pads, tails=tails)
        out, steps = decode(drafter, late(text), text[:2], 28)
        assert out == text[2:30]
        passes[tails] = len(steps)
    assert passes[0] == 28
    assert passes[4] <= 16


@pytest.mark.parametrize("mode", ["jacobi", "gauss-seidel", "sliding"])
def test_nothing_is_drafted_past_an_end_token_of_the_models_own(mode: Any) -> None:
    """A guess may be one: the pad token often is."""
    drafter = JacobiDrafter(mode, 4, lambda size: [3] * size, END, keep_trajectory=True, tails=2)
    drafter.learn(TokenTree(9), [7], Path([0], [7]))
    assert paths(drafter.draft(10)) == [[3, 3, 3, 3]]
    drafter.learn(TokenTree.chain(7, [3] * 4), [5, 1, 3, 2, 2], Path([0], [5]))
    assert paths(drafter.draft(10)) == [[1, 3]]
    drafter.learn(TokenTree.chain(5, [1, 3]), [6, 1, 1], Path([0], [6]))  # the end token went away
    assert drafter.draft(10).tokens[1:4] == {"sliding": [1, 1, 2]}.get(mode, [1, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 0}, "Expected blocks >= 1 and tails >= 0: got blocks=0, tails=0"),
        ({"tails": -1}, "Expected blocks >= 1 and tails >= 0: got blocks=1, tails=-1"),
        ({"spawn_ratio": 0.0}, "spawn_ratio is a share of a block, above 0 and at most 1: got 0.0"),
        ({"spawn_ratio": 1.5}, "spawn_ratio is a share of a block, above 0 and at most 1: got 1.5"),
        ({"blocks": 2, "mode": "sliding"}, "blocks=2, but a sliding block has no end"),
        ({"blocks": 2, "block_size": None}, "blocks=2, but a block without a block_size takes all room"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    refuses(message, JacobiDrafter, **{"mode": "jacobi", "block_size": 4, "guess": pads} | settings)


def test_more_blocks_and_tails_need_fewer_passes_over_many_texts() -> None:
    def passes(**settings: Any) -> int:
        texts = [hashed(seed, 4, order) for seed in range(40) for order in (1, 2, 3)]
        found = [decode(JacobiDrafter("jacobi", 5, pads, **settings), text, [1, 2], 24)[1] for text in texts]
        return sum(map(len, found))

    alone = passes()
    assert passes(blocks=2, spawn_ratio=0.5) < alone
    assert passes(tails=4) < alone

"""When nothing pays: how seldom sources are asked, and when a small draft is tried."""

import pytest

from lookahead.draft.planner import Mode, Rest


def after(passes: int) -> Rest:
    """A rest of so many plain passes."""
    rest = Rest()
    for _ in range(passes):
        rest.observe(Mode.DRAFT, drafted=False, refused=True, accepted=False)
    return rest


def test_sources_are_asked_more_and_more_seldom() -> None:
    asked = [passes for passes in range(40) if not after(passes).is_on]
    assert asked == [0, 1, 2, 3, 4, 8, 12, 16, 24, 32]


def test_a_pass_without_candidates_is_no_rest() -> None:
    rest = Rest()
    rest.observe(Mode.DRAFT, drafted=False, refused=False, accepted=False)
    rest.observe(Mode.MEASURE, drafted=False, refused=False, accepted=False)
    assert rest.passes == 0
    rest.observe(Mode.REST, drafted=False, refused=False, accepted=False)
    assert rest.passes == 1


@pytest.mark.parametrize(("cost", "first"), [(1.0, 32), (1.5, 32), (2.0, 50), (3.0, 100)])
def test_trials_take_a_fiftieth_of_the_time_at_most(cost: float, first: int) -> None:
    assert not after(first - 1).tries(cost)
    assert after(first).tries(cost)


def test_trials_in_vain_become_rarer_and_do_not_end_the_rest() -> None:
    rest, waited = Rest(), []
    for _ in range(6):
        plain = 0
        while not rest.tries(1.0):
            rest.observe(Mode.REST, drafted=False, refused=False, accepted=False)
            plain += 1
        waited.append(plain + 16 * bool(waited))  # a rest goes on from the 16th pass
        rest.observe(Mode.PROBE, drafted=True, refused=False, accepted=False)
        assert rest.passes == 16
    assert waited == [32, 64, 128, 256, 512, 512]


@pytest.mark.parametrize("mode", [Mode.DRAFT, Mode.PROBE])
def test_an_accepted_token_ends_the_rest(mode: Mode) -> None:
    rest = after(40)
    rest.observe(mode, drafted=True, refused=False, accepted=True)
    assert rest.passes == 0
    assert not rest.is_on

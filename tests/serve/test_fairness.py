"""Turns among clients: by rows, by who waited longest, and not by what they call themselves."""

import pytest
from helpers.serving import Asked, client, engine, served, wait_until

from lookahead.serve.fairness import FairTurns

A = {"address": "a"}
B = {"address": "b"}


def writing(rows: int, **who: str) -> Asked:
    """A job with so many answers under way."""
    job = Asked(4, **who)
    job.tasks = dict.fromkeys(range(rows))  # type: ignore[arg-type]
    return job


def test_the_next_row_goes_to_who_has_fewest() -> None:
    turns, first, second, third = FairTurns(), Asked(4, **A), Asked(4, **B), Asked(4, address="c")
    assert turns.next([first, second], [writing(2, **A), writing(1, **B)]) is second
    assert turns.next([first, second, third], [writing(1, **A), writing(1, **B)]) is third
    assert turns.next([], [first]) is None


def test_addresses_take_turns_where_they_have_as_many() -> None:
    turns, many, one = FairTurns(), [Asked(4, **A) for _ in range(3)], Asked(4, **B)
    assert turns.next([*many, one], []) is many[0]
    assert turns.next([*many[1:], one], []) is one
    assert turns.next(many[1:], []) is many[1]


def test_users_share_the_turns_of_their_address() -> None:
    turns, alone = FairTurns(), Asked(4, **B)
    made_up = [Asked(4, user=str(number), **A) for number in range(3)]
    order, asking = [], [*made_up, *made_up[:1], alone]
    while asking:
        job = turns.next(asking, [])
        assert job is not None
        order.append(job)
        asking.remove(job)
    assert order == [made_up[0], alone, made_up[1], made_up[2], made_up[0]]
    assert turns.next([made_up[0], made_up[1]], [writing(1, user="0", **A)]) is made_up[1]


def test_of_one_client_the_job_with_fewest_rows_is_next() -> None:
    turns, first, second = FairTurns(), writing(2), writing(1)
    assert turns.next([first, second], [first, second]) is second
    assert turns.next([first, Asked(4)], [first]) is not first


@pytest.mark.usefixtures("augmented")
def test_who_asks_once_does_not_wait_for_who_asks_often() -> None:
    with engine(most_waiting=16, rows=1) as running:
        jobs = [Asked(60, **A) for _ in range(6)]
        for job in jobs:
            running.submit(job)
        wait_until(lambda: running.running)
        late = Asked(4, **B)
        running.submit(late)
        wait_until(lambda: late.over)
        assert sum(job.over for job in jobs) < 4
        wait_until(lambda: all(job.over for job in jobs))


@pytest.mark.usefixtures("augmented")
def test_requests_say_who_their_user_is() -> None:
    with served() as address, client(address) as openai:
        answer = openai.completions.create(model="tiny-coder", prompt="def ", max_tokens=2, user="me")
        assert answer.usage.completion_tokens == 2

"""The engine's queue: what leaves it, what is refused, and how it stops."""

import threading
from typing import Any

import httpx
import pytest
import torch
from helpers.serving import NAME, NO_END, PROMPT, Asked, bundled, client, engine, plain, served, wait_until

from lookahead.serve import application
from lookahead.serve.errors import ApiError
from lookahead.serve.jobs import Answer
from lookahead.serve.server import Server

pytestmark = pytest.mark.usefixtures("augmented")


def test_jobs_run_in_their_order() -> None:
    with engine() as running:
        jobs = [Asked(8) for _ in range(4)]
        for job in jobs:
            running.submit(job)
        wait_until(lambda: jobs[-1].over)
        assert all(job.events[-1] is None and isinstance(job.events[-2], Answer) for job in jobs)
        assert len({job.events[-2].text for job in jobs}) == 1


def test_what_waits_and_is_dropped_makes_room() -> None:
    with engine(most_waiting=1) as running:
        first, second, third = Asked(900), Asked(4), Asked(4)
        running.submit(first)
        wait_until(lambda: running.running)
        running.submit(second)
        with pytest.raises(ApiError, match="wait already") as refused:
            running.submit(third)
        assert refused.value.status == 429
        assert int(refused.value.headers["Retry-After"]) >= 1
        running.drop(second)
        assert running.waiting == 0
        running.submit(third)
        running.drop(first)
        wait_until(lambda: third.over)
        assert third.events[-1] is None
        assert not second.events


def test_a_job_that_fails_says_so_and_the_next_one_runs() -> None:
    with engine() as running:
        bad, good = Asked(4, num_beams=2), Asked(4)
        running.submit(bad)
        running.submit(good)
        wait_until(lambda: good.over)
        assert isinstance(bad.events[-1], Exception)
        assert good.events[-1] is None


def test_what_is_cut_off_is_told_why() -> None:
    with engine() as running:
        jobs = [Asked(900), Asked(900)]
        for job in jobs:
            running.submit(job)
        wait_until(lambda: running.running)
        running.refuse()
        with pytest.raises(ApiError, match="shutting down"):
            running.submit(Asked(1))
        running.cut()
        wait_until(lambda: all(job.over for job in jobs))
        assert [job.events[-1].status for job in jobs] == [503, 503]
        assert not running.alive


def test_the_generator_of_the_process_is_left_alone() -> None:
    with served() as address, client(address) as openai:
        before = torch.get_rng_state()
        openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=1.0, seed=3)
        openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=1.0)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("grace", [20.0, 0.0], ids=["finished", "cut off"])
def test_a_server_that_is_told_to_stop(grace: float) -> None:
    """New requests get 503; the one under way is finished in time, or told that the server stops."""
    app = application(*bundled(), NAME)
    server = Server(app, app.state.service.engine, host="127.0.0.1", port=0, log_level="error", grace=grace)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "logit_bias": {"0": -100}}
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(httpx.post(f"{address}/v1/completions", json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: app.state.service.engine.running)
    server.handle_exit(15, None)
    if grace:
        wait_until(lambda: not app.state.service.engine.alive)
        refused = httpx.post(f"{address}/v1/completions", json=body | {"max_tokens": 1})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(f"{address}/health").status_code == 503
    asking.join(60)
    thread.join(30)
    assert not thread.is_alive()
    if grace:
        settings: Any = {"do_sample": False, "sequence_bias": {(0,): -100.0}}
        assert found[0].json()["choices"][0]["text"] == plain(PROMPT, max_new_tokens=400, **settings)
    else:
        assert (found[0].status_code, found[0].json()["error"]["code"]) == (503, "shutting_down")


def test_answers_share_passes_and_are_plain_ones() -> None:
    """Several jobs, and several answers of one, at a time; a cancelled one leaves nothing behind."""
    with engine(most_waiting=16, rows=3) as running:
        jobs = [Asked(20 + 9 * number, do_sample=bool(number % 2)) for number in range(6)]
        gone = Asked(900)
        for job in (*jobs, gone):
            running.submit(job)
        wait_until(lambda: jobs[0].over)
        running.drop(gone)
        wait_until(lambda: all(job.over for job in jobs) and running.idle)
        for number, job in enumerate(jobs):
            settings = NO_END | {"do_sample": bool(number % 2), "max_new_tokens": 20 + 9 * number}
            assert job.events[-2].text == plain(PROMPT, 0, **settings)
        wait_until(lambda: not running._scheduler.running)

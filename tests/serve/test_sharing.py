"""What clients share: rows, connections, and nothing that tells one of another."""

import asyncio
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.serving import NAME, PROMPT, Asked, bundled, client, engine, in_a_thread, plain, served, wait_until

from lookahead import Lookahead
from lookahead.draft.memory import exchange
from lookahead.serve.server import Server
from lookahead.sources.learned import Learned

pytestmark = pytest.mark.usefixtures("augmented")


HOT: dict[str, Any] = {"do_sample": True, "temperature": 1.5}


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_a_small_job_does_not_wait_for_large_ones(rows: int) -> None:
    """All rows are taken by answers of hundreds of tokens, more of which wait: none is done before the small job is."""
    with engine(rows=rows) as running:
        large = [Asked(400, n=16, **HOT) for _ in range(rows // 2)]
        for job in large:
            running.submit(job)
        wait_until(lambda: sum(len(job.tasks) for job in large) == rows)
        for _ in range(3):
            small = Asked(4, **HOT)
            running.submit(small)
            wait_until(lambda: small.over, 60)  # noqa: B023
            assert len(small.answers) == 1
        assert not any(job.answers for job in large)


def test_rows_are_shared_evenly() -> None:
    with engine(rows=4) as running:
        first, second = Asked(20, n=16, **HOT), Asked(20, n=16, **HOT)
        running.submit(first)
        wait_until(lambda: len(first.tasks) == 4)
        running.submit(second)
        wait_until(lambda: first.over, 120)
        assert len(second.answers) >= 8  # it has begun later, and was not left to wait for the first one's end
        wait_until(lambda: second.over, 120)


def test_log_probabilities_are_of_the_models_own_logits() -> None:
    """With penalties, biases and draws, which change what is chosen and not these; and no logits are kept for them."""
    model, tokenizer = bundled()
    given: Any = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "prompt": PROMPT, "model": NAME}
    given |= {"logit_bias": {"5": 2.0}, "frequency_penalty": 1.0}
    with served() as address, client(address) as openai:
        bare = openai.completions.create(**given).choices[0]
        for use in (True, False):
            found = openai.completions.create(**given, logprobs=4, extra_body={"use_lookahead": use}).choices[0]
            assert found.text == bare.text and found.logprobs is not None
            assert found.logprobs.tokens is not None and found.logprobs.token_logprobs is not None
            ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
            text = torch.cat([ids, tokenizer(found.text, return_tensors="pt")["input_ids"]], dim=1)
            if text.shape[1] == ids.shape[1] + len(found.logprobs.tokens):
                with torch.no_grad():
                    logs = torch.log_softmax(model(text).logits[0, ids.shape[1] - 1 : -1], -1)
                expected = [float(line[token]) for line, token in zip(logs, text[0, ids.shape[1] :], strict=True)]
                assert found.logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
    job = Asked(6)
    assert "output_logits" not in job.plan.settings


@pytest.mark.parametrize("memory", [True, False])
def test_nothing_is_remembered_where_that_is_asked(memory: bool) -> None:
    """Neither keys and values, of which ``cached_tokens`` would tell, nor what drafts have learnt."""
    model, _ = bundled()
    before = exchange(model)
    try:
        with served(memory=memory) as address, client(address) as openai:
            given: Any = {"model": NAME, "prompt": PROMPT * 4, "max_tokens": 30, "temperature": 0}
            answers = [openai.completions.create(**given) for _ in range(2)]
        assert answers[0].choices[0].text == plain(PROMPT * 4, max_new_tokens=30, do_sample=False)
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
        learnt = exchange(model)
        assert (cached[1] > 0, bool(learnt.acceptances)) == (memory, memory) and cached[0] == 0
    finally:
        exchange(model, before)


@pytest.mark.parametrize("learn", [True, False])
def test_answers_teach_later_servers_where_that_is_asked(learn: bool, tmp_path: Path) -> None:
    model, _ = bundled()
    file, before = tmp_path / "memory.safetensors", exchange(model)
    try:
        with served(learn=learn and file) as address, client(address) as openai:
            given: Any = {"model": NAME, "prompt": PROMPT * 2, "max_tokens": 20, "temperature": 0}
            openai.completions.create(**given)
        assert file.exists() == learn
        if learn:
            assert len(Learned.load(file)) == 20
            with served(strategy=Lookahead(memory=file)) as address, client(address) as openai:
                assert openai.completions.create(**given).choices[0].text == plain(
                    PROMPT * 2, max_new_tokens=20, do_sample=False
                )
    finally:
        exchange(model)
        exchange(model, before)


class Idle:
    """An engine of nothing."""

    idle = True

    def refuse(self) -> None: ...

    def cut(self) -> None: ...


def impatient(application: Any, client_timeout: float) -> Server:
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "log_level": "error"}
    return Server(application, Idle(), client_timeout=client_timeout, **settings)


def test_connections_that_say_nothing_are_closed() -> None:
    with in_a_thread(impatient(lambda *given: None, 0.3)) as port:
        for head in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: "):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
                if head:
                    slow.sendall(head)
                with suppress(ConnectionResetError):
                    assert slow.recv(100) == b""


def test_streams_that_nobody_reads_are_closed() -> None:
    left = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(leaves(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b" " * (1 << 20), "more_body": True})
            await asyncio.sleep(0)
        left.set()

    async def leaves(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with (
        in_a_thread(impatient(endless, 0.3)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as deaf,
    ):
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert left.wait(60)


def test_a_stream_that_is_read_slowly_goes_on() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.3)
        await send({"type": "http.response.body", "body": b"end"})

    with (
        in_a_thread(impatient(slow, 0.4)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as patient,
    ):
        patient.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
        told = b""
        while part := patient.recv(1000):
            told += part
    assert told.endswith((b"end\r\n0\r\n\r\n", b"end"))

"""Many clients, clients that leave, a full queue, and conversations that go on."""

import asyncio
import gc
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.serving import NAME, PROMPT, client, plain, served, wait_until
from openai import OpenAI

from lookahead.serve.app import _while_there
from lookahead.serve.errors import ApiError

pytestmark = pytest.mark.usefixtures("augmented")
PROMPTS = [PROMPT, "class Stack:\n", "def add(a, b):\n", "import os\n"]


def asked(openai: OpenAI, index: int) -> tuple[Any, str]:
    """One request of a mix, and the text that it must bring."""
    prompt, seed = PROMPTS[index % 4], index % 5
    settings: Any = {"temperature": 0} if index % 2 else {"temperature": 0.7, "seed": seed}
    create = openai.completions.create
    if index % 3:
        text = create(model=NAME, prompt=prompt, max_tokens=24, **settings).choices[0].text
    else:
        chunks = create(model=NAME, prompt=prompt, max_tokens=24, stream=True, **settings)
        text = "".join(chunk.choices[0].text for chunk in chunks)
    return (prompt, None if index % 2 else seed), text


def check(found: list[tuple[Any, str]]) -> None:
    expected = {}
    for (prompt, seed), text in found:
        if (prompt, seed) not in expected:
            settings: Any = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.7}
            expected[prompt, seed] = plain(prompt, seed, max_new_tokens=24, **settings)
        assert text == expected[prompt, seed]


def test_eight_clients_get_plain_texts() -> None:
    with served() as address, client(address) as openai, ThreadPoolExecutor(8) as pool:
        check(list(pool.map(lambda index: asked(openai, index), range(24))))


@pytest.mark.slow
def test_eight_clients_for_two_minutes() -> None:
    end = time.monotonic() + 120

    def work(first: int) -> list[tuple[Any, str]]:
        found = []
        while time.monotonic() < end:
            found.append(asked(openai, first + 8 * len(found)))
        return found

    with served() as address, client(address) as openai, ThreadPoolExecutor(8) as pool:
        found = [each for some in pool.map(work, range(8)) for each in some]
    assert len(found) > 100
    check(found)


@pytest.mark.slow
def test_memory_is_flat_over_500_requests() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() >> 20

    with served() as address, client(address) as openai:
        for index in range(300):  # drafts and kept caches fill up
            asked(openai, index)
        before = resident()
        for index in range(500):
            asked(openai, index)
        assert resident() - before < 16


def long_request() -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": 1000,
        "temperature": 1.5,
        "seed": 1,
        "logit_bias": {"0": -100},
    }


def idle(address: str) -> bool:
    text = httpx.get(f"{address}/metrics").text
    return f'num_requests_running{{model_name="{NAME}"}} 0.0' in text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    with served() as address:
        body = long_request() | {"stream": stream}
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=body, timeout=0.3)
        wait_until(lambda: idle(address))
        with client(address) as openai:
            check([asked(openai, index) for index in range(4)])
            total = httpx.get(f"{address}/metrics").text
            line = next(line for line in total.splitlines() if line.startswith("vllm:generation_tokens_total{"))
            assert float(line.rpartition(" ")[2]) == 4 * 24  # the abandoned answer was never finished


def test_what_a_client_has_left_is_not_logged_as_an_error() -> None:
    told: list[Any] = []

    class Left:
        async def is_disconnected(self) -> bool:
            return True

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ApiError("The request was cancelled.", 499) from None

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        with pytest.raises(ApiError, match="left"):
            await _while_there(Left(), work())  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(leave())
    assert not told


def test_a_conversation_is_prefilled_from_where_it_ended() -> None:
    text, cached = PROMPT, []
    with served() as address, client(address) as openai:
        for turn in range(4):
            settings: Any = {"temperature": 0.7, "seed": turn} if turn % 2 else {"temperature": 0}
            answer = openai.completions.create(model=NAME, prompt=text, max_tokens=30, **settings)
            plainly: Any = {"do_sample": True, "temperature": 0.7} if turn % 2 else {"do_sample": False}
            assert answer.choices[0].text == plain(text, turn, max_new_tokens=30, **plainly)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            text += answer.choices[0].text + "\n    # next\n"
    assert cached[0] == 0 and cached == sorted(cached) and cached[-1] > 60

"""A server of the bundled model in a thread of the test's process, and what plain ``generate`` writes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import uvicorn
from openai import OpenAI

import lookahead
from lookahead.serve import application
from lookahead.serve.bodies import Request
from lookahead.serve.engine import Engine
from lookahead.serve.jobs import Job
from lookahead.serve.plans import RequestPlan

NAME = "tiny-coder"
PROMPT = "def read_json(path):\n"


@cache
def bundled() -> tuple[Any, Any]:
    return lookahead.load_bundled()


def plain(prompt: str | list[int], seed: int | None = None, **settings: Any) -> str:
    """The text that ``generate`` writes without lookahead."""
    model, tokenizer = bundled()
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    inputs = torch.tensor([ids])
    if seed is not None:
        torch.manual_seed(seed)
    output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **settings)
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True, clean_up_tokenization_spaces=False))


def wait_until(done: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def in_a_thread(server: uvicorn.Server) -> Iterator[int]:
    """The port of a server that runs in a thread, and is stopped in the end."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, 30)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def served(model: Any = None, tokenizer: Any = None, **settings: Any) -> Iterator[str]:
    """The address of a server, which is stopped in the end; without a model it has the bundled one."""
    given = bundled() if model is None else (model, tokenizer)
    app = application(*given, NAME, **settings)
    with in_a_thread(
        uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none"))
    ) as port:
        yield f"http://127.0.0.1:{port}"


def client(address: str, key: str = "none", **settings: Any) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60, **settings)


NO_END = {"do_sample": False, "sequence_bias": {(0,): -100.0}}


class Asked(Job):
    """A job that keeps what it is told."""

    def __init__(
        self, new_tokens: int, n: int = 1, address: str = "", user: str | None = None, **settings: Any
    ) -> None:
        self.events: list[Any] = []
        ids = bundled()[1](PROMPT)["input_ids"]
        plan = RequestPlan([ids], [new_tokens], NO_END | settings, Request(n=n, user=user))
        super().__init__(plan, self.events.append, address)

    @property
    def over(self) -> bool:
        return bool(self.events) and (self.events[-1] is None or isinstance(self.events[-1], BaseException))


@contextmanager
def engine(most_waiting: int = 8, rows: int = 1) -> Iterator[Engine]:
    made = Engine(*bundled(), most_waiting=most_waiting, rows=rows)
    try:
        yield made
    finally:
        made.cut()
        made.close()

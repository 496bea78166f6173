"""Servers under load, by one driver: ``lookahead serve`` and transformers' own, with continuous batching.

    python -m benchmarks.serving --model DIR --clients 1,4,8,16 --modes greedy,t0.8

Each server is a process of its own, started anew in every round, one at a time. So many clients each ask one question
after the other, streamed; with ``--rate`` questions come at times that were drawn before, whatever is answered by then.
A token counts when the client has it; the first one's time includes the wait for a place. Texts are counted by the
model's tokenizer, as pieces of a stream are not tokens.
"""

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from socket import socket
from typing import Annotated, Any

import httpx
import typer
from transformers import AutoTokenizer

from benchmarks import options
from benchmarks.harness import Run, in_turn, quiet_console, texts_of, watched
from benchmarks.options import MODES, chosen, whole_numbers
from benchmarks.tables import show

COLUMNS = "server, prompts, mode, clients, tokens/s, first token ms, its p99, failed"
READY_S = 180.0  # that a server may take to load its model


def commands(model: Path, port: int, rows: int, dtype: str) -> dict[str, list[str]]:
    """How each server is started."""
    ours = [sys.executable, "-m", "lookahead", "serve", "--model", str(model), "--dtype", dtype, "--rows", str(rows)]
    theirs = [which("transformers") or str(Path(sys.executable).with_name("transformers")), "serve", str(model)]
    theirs += ["--continuous-batching", "--device", "cpu", "--dtype", dtype]
    return {"lookahead": [*ours, "--port", str(port)], "transformers": [*theirs, "--port", str(port)]}


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[str]:
    """The address of a server that answers; it is stopped in the end."""
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + READY_S
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    raise typer.BadParameter(f"the server did not start: {log.read_text()[-2000:]}")
                try:
                    if httpx.get(f"{address}/health", timeout=5.0).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def bodies_of(texts: list[str], said: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests, one a text."""
    return [said | {"messages": [{"role": "user", "content": text}], "stream": True} for text in texts]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, float, str]:
    """Seconds to the first piece of an answer and to its end, and its text; a failure has no first piece."""
    start, first, text = time.monotonic(), float("nan"), ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.loads(line[6:]).get("choices") or ():
                    piece = choice["delta"].get("content") or ""
                    first = time.monotonic() - start if piece and not text else first
                    text += piece
    except httpx.HTTPError:
        first = float("nan")
    return first, time.monotonic() - start, text


async def loaded(address: str, bodies: list[dict[str, Any]], clients: int, rate: float | None) -> list[Any]:
    """The answers of all ``bodies``, and the seconds that they took together."""
    async with httpx.AsyncClient(base_url=address, timeout=600.0, limits=httpx.Limits(max_connections=None)) as client:
        start, queue, found = time.monotonic(), list(reversed(bodies)), []
        if rate is None:

            async def one() -> None:
                while queue:
                    found.append(await ask(client, queue.pop()))

            await asyncio.gather(*(one() for _ in range(clients)))
        else:
            draw, tasks = random.Random(0), []
            for body in bodies:
                tasks.append(asyncio.create_task(ask(client, body)))
                await asyncio.sleep(draw.expovariate(rate))
            found = list(await asyncio.gather(*tasks))
        return [found, time.monotonic() - start]


def figures(found: list[Any], seconds: float, tokenizer: Any) -> dict[str, Any]:
    """What all answers of a run amount to."""
    firsts = sorted(first for first, _, _ in found if first == first)
    tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, _, text in found)
    return {
        "tokens_per_s_median": tokens / seconds,
        "first_token_ms": 1e3 * statistics.median(firsts),
        "its p99": round(1e3 * firsts[math.ceil(0.99 * len(firsts)) - 1]),
        "failed": len(found) - len(firsts),
    }


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.", exists=True, file_okay=False)],
    clients: Annotated[str, typer.Option(help="Comma-separated numbers of them.")] = "1,4,8,16",
    rate: Annotated[float | None, typer.Option(help="Questions a second, in place of clients.")] = None,
    servers: Annotated[str, typer.Option(help="lookahead, transformers, or all.")] = "all",
    modes: options.Modes = "greedy,t0.8",
    source: Annotated[str, typer.Option("--set", help="A file of prompts, or of prompts/ without suffix.")] = "chat",
    requests: Annotated[int, typer.Option(min=1, help="Questions of a run.")] = 32,
    new_tokens: options.NewTokens = 64,
    dtype: options.Dtype = "bfloat16",
    rounds: options.Rounds = 1,
    logs: Annotated[Path, typer.Option(help="Folder for what servers print.")] = Path("build/serving"),
    out: options.Out = None,
) -> None:
    """Measure tokens a second, and the time of the first one."""
    console, tokenizer = quiet_console(None), AutoTokenizer.from_pretrained(model)
    levels, wanted = whole_numbers(clients) if rate is None else [0], chosen(modes, MODES, "mode")
    names, texts = chosen(servers, ("lookahead", "transformers"), "server"), texts_of(source)
    settings = {"set": source, "requests": requests, "new_tokens": new_tokens, "dtype": dtype, "rate": rate}
    run = Run("serving", out, model=model.name, **settings, rows=[])
    logs.mkdir(parents=True, exist_ok=True)
    for turn in range(rounds):
        for name in in_turn(dict.fromkeys(names), turn):
            with socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            command = commands(model, port, max(levels[-1], 8), dtype)[name]
            with running(command, port, logs / f"{name}.log") as address:
                served = httpx.get(f"{address}/v1/models", timeout=60.0).json()["data"][0]["id"]
                said = {"model": served if name == "lookahead" else str(model), "max_tokens": new_tokens}
                cases = [(mode, level) for mode in wanted for level in levels]
                asyncio.run(loaded(address, bodies_of(texts[:2], said), 1, None))  # warms up
                for mode, level in watched(console, name, cases):
                    asked = [texts[number % len(texts)] for number in range(requests)]
                    salt = {"cache_salt": f"{mode} {level}"} if name == "lookahead" else {}  # no load reads another's
                    bodies = bodies_of(asked, said | salt | {"temperature": MODES[mode].get("temperature", 0.0)})
                    found, seconds = asyncio.run(loaded(address, bodies, level, rate))
                    row = {"server": name, "set": source, "mode": mode, "clients": level, "round": turn}
                    run.add("rows", [row | figures(found, seconds, tokenizer)])
    show(console, "servers under load", COLUMNS, run.document["rows"])
    run.finish()


if __name__ == "__main__":
    typer.run(main)

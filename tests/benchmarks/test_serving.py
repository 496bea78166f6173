"""The driver of servers under load, against a server in this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.serving import NAME, served

from benchmarks import serving


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(("clients", "rate"), [(1, None), (3, None), (1, 50.0)])
def test_every_question_is_asked_and_answered(loaded: tuple[Any, Any], clients: int, rate: float | None) -> None:
    tokenizer, texts = loaded[1], [f"def f{number}(" for number in range(5)]
    said = {"model": NAME, "max_tokens": 8, "temperature": 0}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with served(*loaded, template=template) as address:
        bodies = [*serving.bodies_of(texts, said), *serving.bodies_of(["x"], said | {"max_tokens": -1})]
        found, seconds = asyncio.run(serving.loaded(address, bodies, clients, rate))
    told = serving.figures(found, seconds, tokenizer)
    assert told["failed"] == 1, "what is refused counts as failed"
    assert 0 < told["first_token_ms"] <= told["its p99"] + 1
    assert all(first <= whole for first, whole, text in found if text)
    assert 5 <= told["tokens_per_s_median"] * seconds <= 45, "about eight tokens of each of five"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["python", "-c", "raise SystemExit('no such model')"]
    refused = pytest.raises(typer.BadParameter, match="did not start: no such model")
    with refused, serving.running(command, 1, tmp_path / "log"):
        pass

"""``lookahead serve`` as a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers.cli import run
from helpers.command import serving
from helpers.serving import PROMPT, client, plain

from lookahead.cli import common
from lookahead.serve.server import check_address

SERVING = r"Serving \S+ at (http://127\.0\.0\.1:[1-9]\d*) "


def test_it_answers_and_stops_gracefully() -> None:
    with serving(SERVING, "--served-model-name", "mine") as (process, address), client(address) as openai:
        answer = openai.completions.create(model="mine", prompt=PROMPT, max_tokens=24, temperature=0)
        assert answer.choices[0].text == plain(PROMPT, max_new_tokens=24, do_sample=False)
        stream = openai.completions.create(
            model="mine", prompt=PROMPT, max_tokens=300, temperature=1.0, seed=3, logit_bias={"0": -100}, stream=True
        )
        text = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        for chunk in stream:  # what runs is finished
            text += chunk.choices[0].text
        assert len(text) > 300
        assert process.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "/nowhere"], "--model /nowhere does not exist"),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere cannot be read"),
        (["--api-key", ""], "--api-key is empty"),
    ],
)
def test_refusals(arguments: list[str], told: str) -> None:
    given = [sys.executable, "-m", "lookahead", "serve", *arguments]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


def test_what_cannot_be_served_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "load", lambda *given: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("serve", "--port", taken.getsockname()[1])
    assert ran.status == 2 and "in use" in ran.err and "Serving" not in ran.err
    ran = run("serve", "--host", "a..b")
    assert ran.status == 2 and "--host a..b --port 8000: nothing can be served there" in " ".join(ran.err.split())
    assert run("serve", "--log-level", "loud").status == 2


def test_a_free_address_stays_free() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_address("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_draft_model_and_a_template(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assets = Path(__file__).parents[2] / "lookahead" / "assets" / "tiny-coder"
    begin = time.monotonic()
    arguments = "--draft", str(assets), "--dtype", "float32", "--chat-template", str(template)
    with serving(SERVING, *arguments) as (_, address), client(address) as openai:
        messages = [{"role": "user", "content": PROMPT}]
        settings = {"max_tokens": 24, "temperature": 0}
        answer = openai.chat.completions.create(model="tiny-coder", messages=messages, **settings)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == plain(PROMPT, max_new_tokens=24, do_sample=False)
    assert time.monotonic() - begin < 300

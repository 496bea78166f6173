"""``lookahead serve`` as a process of its own."""

import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.cli import run
from helpers.command import serving
from helpers.serving import PROMPT, client, plain

from lookahead.bundled import BUNDLED
from lookahead.cli import common
from lookahead.serve.server import check_address

SERVING = r"Serving \S+ at (http://127\.0\.0\.1:[1-9]\d*) "


def test_it_answers_and_stops_gracefully(tmp_path: Path) -> None:
    """With a name, a draft model and a template of the user's."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    arguments = "--draft", str(BUNDLED), "--dtype", "float32", "--chat-template", str(template)
    expected = plain(PROMPT, max_new_tokens=24, do_sample=False)
    with serving(SERVING, "--served-model-name", "mine", *arguments) as (process, address), client(address) as openai:
        answer = openai.completions.create(model="mine", prompt=PROMPT, max_tokens=24, temperature=0)
        assert answer.choices[0].text == expected
        settings: Any = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
        assert openai.chat.completions.create(model="mine", **settings).choices[0].message.content == expected
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


def test_what_cannot_be_served_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "load", lambda *given: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("serve", "--port", taken.getsockname()[1])
    assert ran.status == 2 and "in use" in ran.err and "Serving" not in ran.err
    ran = run("serve", "--host", "a..b")
    assert ran.status == 2 and "--host a..b --port 8000: nothing can be served there" in " ".join(ran.err.split())
    assert run("serve", "--log-level", "loud").status == 2
    assert "--api-key is empty" in run("serve", "--api-key", "").err


def test_a_free_address_stays_free() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_address("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass

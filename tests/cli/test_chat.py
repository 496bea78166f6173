"""``lookahead chat`` in a terminal of its own."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pexpect
import pytest
from helpers.serving import bundled, plain
from rich.console import Console

from lookahead import Lookahead
from lookahead.chat_format import render
from lookahead.cli import chat

LENGTH = ("--max-new-tokens", "200")


@pytest.fixture
def terminal() -> Iterator[Any]:
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background are deaf to interrupts
    settings = {"env": os.environ | {"TERM": "dumb", "COLUMNS": "200"}, "encoding": "utf-8", "preexec_fn": heard}
    spawned = pexpect.spawn(sys.executable, ["-m", "lookahead", "chat", *LENGTH], timeout=300, **settings)
    spawned.setecho(False)
    spawned.expect(r"tells the commands\.\s+> ")
    yield spawned
    spawned.close(force=True)


def said(terminal: Any, line: str) -> str:
    terminal.sendline(line)
    terminal.expect(r"\n> ")
    return str(terminal.before).replace("\r", "")


def test_a_conversation(terminal: Any) -> None:
    tokenizer = bundled()[1]
    said(terminal, "/system Write code.")
    messages = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "def add(a, b):"}]
    first = said(terminal, "def add(a, b):")
    ids = render(tokenizer, messages)
    expected = plain(ids, max_new_tokens=200, do_sample=False)
    assert expected.strip() in first
    told = said(terminal, "/stats")
    assert re.search(r"\d+ tokens in [\d.]+ m?s, ", told) and "S = " in told
    assert "Plain decoding." in said(terminal, "/plain")
    assert "There is no command /nothing" in said(terminal, "/nothing")
    assert "A new conversation." in said(terminal, "/clear")
    terminal.sendline("/exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_interrupts_end_the_answer_alone(terminal: Any) -> None:
    said(terminal, "/plain")
    terminal.sendline("class Stack:")
    terminal.expect(r"\w+ \w+")
    terminal.sendintr()
    terminal.expect(r"\[stopped\]")
    terminal.expect(r"\n> ")
    terminal.sendintr()
    terminal.expect("leaves")
    terminal.expect(r"\n> ")
    assert "tokens in" in said(terminal, "/stats")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)


class Swallowing(chat._Voice):
    """Ctrl-C after the twentieth token, in the middle of something that hears of no error."""

    def put(self, value: Any) -> None:
        super().put(value)
        if self.count == 20:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("plain", [False, True])
def test_a_lost_interrupt_ends_the_answer(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    written = io.StringIO()
    settings = {"max_new_tokens": 60, "do_sample": False, "sequence_bias": {(0,): -100.0}}
    talk = chat.Talk(*bundled(), Lookahead(nodes=7), settings, Console(file=written), plain=plain)
    monkeypatch.setattr(chat, "_Voice", Swallowing)
    before = signal.getsignal(signal.SIGINT)
    talk.answer("class Stack:")
    assert "20 tokens in" in talk.told() and written.getvalue().rstrip().endswith("[stopped]")
    assert signal.getsignal(signal.SIGINT) is before


class Interrupted(chat._Voice):
    """Ctrl-C after the twentieth token."""

    def put(self, value: Any) -> None:
        super().put(value)
        if self.count == 20:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("plain", [False, True])
def test_a_stopped_answer_counts(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    console = Console(file=io.StringIO())
    settings = {"max_new_tokens": 60, "do_sample": False, "sequence_bias": {(0,): -100.0}}
    talk = chat.Talk(*bundled(), Lookahead(nodes=7), settings, console, plain=plain)
    talk.answer("class Stack:")
    whole = talk.stats
    monkeypatch.setattr(chat, "_Voice", Interrupted)
    talk.answer("class Queue:")
    if plain:
        assert not talk.stats.steps and "Plain decoding." in talk.told()
        return
    more = talk.stats.emitted - whole.emitted
    assert 20 <= more < 60 and "20 tokens in" in talk.told() and f"{more} tokens in" in talk.last.splitlines()[1]
    for each in (whole, talk.stats):
        assert each.emitted == each.row_steps + each.accepted == sum(k * n for k, n in each.histogram.items())
        assert sum(each.sources.values()) <= each.accepted <= each.drafted
    assert talk.stats.drafted > whole.drafted and talk.stats.steps > whole.steps

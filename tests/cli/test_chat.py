"""``lookahead chat`` in a terminal of its own."""

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pexpect
import pytest
from helpers.serving import bundled, plain

from lookahead.chat_format import render

LENGTH = ("--max-new-tokens", "200")


@pytest.fixture
def terminal() -> Iterator[Any]:
    settings = {"env": os.environ | {"TERM": "dumb", "COLUMNS": "200"}, "encoding": "utf-8"}
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
    assert re.search(r"\d+ tokens in \d+\.\d+ s", told) and "S = " in told
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

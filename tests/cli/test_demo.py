"""``lookahead demo``: what it says of texts and speed."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import other_token, run, spoil
from transformers import AutoTokenizer

from lookahead import DecodingStats, bundled
from lookahead.cli import common
from lookahead.cli.demo import FREE, coloured
from lookahead.cli.prompts import PROMPTS

QUICK = ("--new-tokens", 12, "--prompts", 2, "--rounds", 1)


def test_demo_says_identical_and_the_speedup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    ran = run("demo", *QUICK, "--window-size", 3)
    assert ran.status == 0
    assert "Texts: identical, all 24 tokens of 2 texts." in ran.words
    assert re.search(r"greedy plain 1\.00x \d+\.\d 1\.00 greedy lookahead \d+\.\d\dx", ran.words)
    assert re.search(r"lookahead \d+\.\d\dx, too few to say \(2 texts of 24 tokens: at least 3 and 96", ran.words)
    assert "24 tokens in " in ran.words and "S: tokens that a pass writes" in ran.words
    assert PROMPTS[0] in ran.out


@pytest.mark.parametrize(
    ("factor", "said"),
    [(2.0, "lookahead 2.00x, a win."), (1.0, "lookahead 1.00x, no difference."), (0.5, "lookahead 0.50x, a loss.")],
)
def test_demo_says_win_or_loss_plainly(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float, said: str) -> None:
    decode = common.decode

    def timed(model: Any, inputs: Any, strategy: Any, **settings: Any) -> common.Decoded:
        decoded = decode(model, inputs, strategy, **settings)
        return dataclasses.replace(decoded, seconds=factor if strategy is None else 1.0)

    monkeypatch.setattr(common, "decode", timed)
    ran = run("demo", "--model", folder, "--new-tokens", 32, "--prompts", 3, "--rounds", 1)
    assert ran.status == 0
    assert said in ran.words
    assert " passes (S = " in ran.words


def test_demo_shows_a_bug_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 1) % 258))
    ran = run("demo", "--model", folder, *QUICK)
    assert ran.status == 1
    assert "Text 1 differs (bug) at token 6: plain" in ran.words
    assert "identical" not in ran.words


def test_demo_shows_a_tie_and_succeeds(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: token ^ 1))
    ran = run("demo", "--model", twins, *QUICK)
    assert ran.status == 0
    assert "Text 1 differs (tie) at token 6" in ran.words


def test_free_tokens_are_all_of_a_pass_but_the_last(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("ab cdé")["input_ids"]  # the last letter has two tokens
    passes = [{"tokens": [1]}, {"tokens": [3]}, {"tokens": [1]}, {"tokens": [2]}]
    text = coloured(tokenizer, common.Decoded(tokens, 1.0, DecodingStats(passes=passes)))
    assert text.plain == "ab cdé"
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == FREE] == ["b", " "]

"""``lookahead verify`` and ``demo``: identical texts, ties and bugs, each called by its name; what is said of speed."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import PROMPT, expected, other_token, refused, run, spoil
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


def test_verify_finds_identical_texts(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--prompt", "import os", "--max-new-tokens", 16)
    assert ran.status == 0
    assert "2 identical, 0 tied, 0 with a bug; 2 prompts, greedy, float32" in ran.words


def test_verify_json(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--window-size", 3, "--max-new-tokens", 16, "--json")
    document = json.loads(ran.out)
    assert ran.status == 0
    assert document["verdict"] == "identical"
    assert document["settings"]["strategy"]["window_size"] == 3
    (result,) = document["results"]
    assert (result["prompt"], result["tokens"], result["divergence"]) == (PROMPT, 16, None)
    assert result["tokens_per_pass"] >= 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read: No such file or directory."),
        ("empty.txt", "\n\n", "holds no prompt"),
        ("broken.jsonl", '{"prompt": "x"}\n{"prompt"', "line 2, is not JSON"),
        ("other.jsonl", '{"text": "x"}', 'line 1: expected an object with a "prompt"'),
        ("number.jsonl", '{"prompt": 3}', 'line 1: expected an object with a "prompt"'),
        (
            "nothing.jsonl",
            '{"prompt": ""}',
            'line 1: expected an object with a "prompt" that is text; got {"prompt": ""}',
        ),
        ("binary.txt", b"\xff\xfe", "is not text"),
    ],
)
def test_verify_refuses_bad_prompt_files(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(message, "verify", "--prompts", tmp_path / name)


def test_verify_refuses_an_empty_prompt(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", "")
    assert (ran.status, ran.err) == (2, "Error: The prompt is empty: expected text of at least one token.\n")


def test_verify_calls_a_wide_gap_a_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 1) % 258))
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 1
    assert "1: bug at token 6: plain" in ran.words
    assert "0 identical, 0 tied, 1 with a bug" in ran.words
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
    assert ran.status == 1
    found = json.loads(ran.out)["results"][0]["divergence"]
    assert found["at"] == 5
    assert found["plain_token"] == expected(folder, 16)[5]
    assert found["lookahead_token"] == (found["plain_token"] + 1) % 258
    assert found["gap"] >= found["margin"] > 100 * found["rounding_error"] > 0


def test_verify_calls_equal_scores_a_tie(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: token ^ 1))
    ran = run("verify", "--model", twins, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 0
    assert "1: tie at token 6: plain" in ran.words
    assert "0 identical, 1 tied, 0 with a bug" in ran.words


def test_a_tie_beside_a_third_token_is_still_a_bug(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 2) % 256))
    ran = run("verify", "--model", twins, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
    found = json.loads(ran.out)["results"][0]["divergence"]
    assert (ran.status, found["verdict"]) == (1, "bug")
    assert found["margin"] <= 2 * found["rounding_error"] < found["gap"]


def test_a_text_that_ends_early_is_a_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda decoded: dataclasses.replace(decoded, tokens=decoded.tokens[:-1]))
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 1
    assert "bug at token 16: plain" in ran.words
    assert "lookahead the end" in ran.words

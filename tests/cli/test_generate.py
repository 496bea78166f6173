"""``lookahead generate``: the text and the JSON of plain decoding, streamed."""

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cli import PROMPT, expected, refused, run
from transformers import AutoTokenizer

from lookahead import DecodingStats, bundled
from lookahead.cli import generate, prompts


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "plain"])
def test_generate_streams_plain_decodings_text(folder: Path, strategy: str) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--strategy", strategy, "--max-new-tokens", 24)
    text = AutoTokenizer.from_pretrained(folder).decode(expected(folder, 24), skip_special_tokens=True)
    assert (ran.status, ran.out, ran.err) == (0, text + "\n", "")


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "plain"])
def test_generate_json_is_one_document(folder: Path, strategy: str) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--strategy", strategy, "--new-tokens", 24, "--json")
    document = json.loads(ran.out)
    assert document.keys() == {"prompt", "text", "tokens", "seconds", "stats", "settings", "versions"}
    assert document["prompt"] == PROMPT
    assert document["tokens"] == expected(folder, 24)
    assert document["settings"]["strategy"]["strategy"] == strategy
    assert document["settings"]["max_new_tokens"] == 24
    assert document["versions"]["torch"] == torch.__version__
    if strategy == "plain":
        assert document["stats"] is None
    else:
        assert DecodingStats.from_dict(document["stats"]).emitted == 24


def test_generate_takes_w_n_g(folder: Path) -> None:
    sizes = ("--window-size", 4, "--ngram-size", 3, "--verification-set-size", 2)
    ran = run("generate", "--model", folder, "--prompt", PROMPT, *sizes, "--max-new-tokens", 8, "--json")
    strategy = json.loads(ran.out)["settings"]["strategy"]
    assert [strategy[name] for name in ("window_size", "ngram_size", "verification_set_size")] == [4, 3, 2]


def test_generate_samples_the_text_of_its_seed(folder: Path) -> None:
    options = ("--sample", "--temperature", 0.7, "--top-p", 0.9, "--top-k", 40, "--seed", 5)
    ran = run("generate", "--model", folder, "--prompt", PROMPT, *options, "--max-new-tokens", 24, "--json")
    torch.manual_seed(5)
    tokens = expected(folder, 24, do_sample=True, temperature=0.7, top_p=0.9, top_k=40)
    assert json.loads(ran.out)["tokens"] == tokens
    assert json.loads(ran.out)["settings"]["temperature"] == 0.7


@pytest.mark.parametrize("option", [(), ("--prompt", "-")])
@pytest.mark.parametrize("end", ["", "\n"])
def test_generate_reads_stdin_less_its_last_line_break(folder: Path, option: tuple[str, ...], end: str) -> None:
    ran = run("generate", "--model", folder, *option, "--max-new-tokens", 8, "--json", stdin=PROMPT + end)
    document = json.loads(ran.out)
    assert (document["prompt"], document["tokens"]) == (PROMPT, expected(folder, 8))


def test_generate_stats_are_on_stderr(folder: Path) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats")
    assert re.search(r"24 tokens in \d+ passes \(\d\.\d\d a pass\), .* tokens/s\ndrafted \d+ tokens", ran.err)
    ran = run(
        "generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats", "--strategy", "plain"
    )
    assert "24 tokens in 24 passes (1.00 a pass)" in ran.err


def test_the_default_model_is_the_bundled_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    document = json.loads(run("generate", "--prompt", PROMPT, "--max-new-tokens", 8, "--json").out)
    assert (document["tokens"], document["settings"]["model"]) == (expected(folder, 8), "bundled")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt", ""), "The prompt is empty: give --prompt TEXT, or text on stdin."),
        (("--prompt", "x", "--sample", "--temperature", 0), "--temperature must be above 0: got 0.0."),
        (("--prompt", "x", "--sample", "--top-p", 1.5), "--top-p must be at most 1: got 1.5."),
        (("--prompt", "x", "--sample", "--top-k", -1), "--top-k must be above 0: got -1."),
        (
            ("--prompt", "x", "--strategy", "jacobi", "--window-size", 3),
            "--window-size belongs to --strategy lookahead",
        ),
        (("--prompt", "x", "--device", "abacus"), "--device abacus cannot be used here"),
    ],
)
def test_generate_refuses_in_one_line(folder: Path, args: tuple[Any, ...], message: str) -> None:
    refused(message, "generate", "--model", folder, *args)


def test_a_prompt_must_be_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stdin, which may be closed, or as an argument: Python hands half of a surrogate pair over for such a byte."""
    ran = run("generate", "--model", folder, stdin=b"\xff\xfe")
    assert ran.status == 2 and "The prompt on stdin is not text" in ran.err
    ran = run("generate", "--model", folder, "--prompt", "x\udcff")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("Error: The prompt is not text")
    monkeypatch.setattr(prompts, "sys", SimpleNamespace(stdin=None))
    message = "There is no prompt: stdin is closed. Give --prompt TEXT, or text on stdin.\n"
    refused(message, "generate", "--model", folder)


def test_a_full_device_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate._Echo, "on_finalized_text", full)
    ran = run("generate", "--model", folder, "--prompt", "x", "--max-new-tokens", 2)
    assert ran.status == 2
    assert ran.err.splitlines()[-1] == "Error: [Errno 28] No space left on device"

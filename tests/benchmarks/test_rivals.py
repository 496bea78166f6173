"""Ways to decode in processes of their own; llama.cpp, which would not read so small a file, is taken for missing."""

import json
from pathlib import Path

import pytest
import typer
from helpers.chat_model import save_chat_model, save_gguf
from typer.testing import CliRunner

from benchmarks import rivals
from benchmarks.rivals_worker import LLAMA


def test_figures() -> None:
    answers = [
        {"tokens": [1, 2, 3], "first_s": 1.0, "last_s": 2.0, "memory_mb": 5},
        {"tokens": [1, 2, 3], "first_s": 0.5, "last_s": 1.0, "memory_mb": 7},
    ]
    row = rivals.figures(answers)
    assert (row["tokens_per_s_median"], row["whole_per_s_median"]) == (3.0, 2.25)
    assert (row["first_token_ms"], row["memory_mb"]) == (750.0, 7)


@pytest.mark.slow
def test_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to JSON, and what is missing is named."""
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    app = typer.Typer()
    app.command()(rivals.main)
    folder = save_chat_model(tmp_path / "model")
    file = save_gguf(folder, tmp_path / "model.gguf")
    given = ["--model", str(folder), "--gguf", str(file), "--out", str(tmp_path / "rivals.json")]
    options = "--precisions bfloat16 --prompts 1 --new-tokens 6 --modes greedy"
    done = CliRunner().invoke(app, [*given, *options.split()])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "rivals.json").read_text())
    rows = {row["way"]: row for row in document["rows"]}
    assert all(row["tokens_per_s_median"] > 0 and len(row["texts"]) == 1 for row in rows.values())
    assert list(rows) == ["bfloat16 plain", "bfloat16 lookahead"]
    assert [each["way"] for each in document["skipped"]] == list(LLAMA)

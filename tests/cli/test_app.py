"""The command line as a whole: help, version, and one line for bad input."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers.cli import PROMPT, refused, run


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lookahead`` where there is no script on the path."""
    monkeypatch.setattr(sys, "argv", ["lookahead", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lookahead", run_name="__main__")
    assert ended.value.code == 0
    assert torch.__version__ in capsys.readouterr().out


def test_version_names_what_decides_about_a_text() -> None:
    ran = run("--version")
    assert ran.status == 0
    assert re.fullmatch(r"lookahead \S+, transformers 5\.\S+, torch \S+, python 3\.\S+\n", ran.out)


@pytest.mark.parametrize("command", ["demo", "generate", "verify"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("gone", "does not exist: expected a folder with config.json and weights"),
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("cut", "could not be loaded"),
    ],
)
def test_a_broken_model_folder_is_one_line(folder: Path, tmp_path: Path, command: str, harm: str, message: str) -> None:
    broken = tmp_path / "broken"
    if harm != "gone":
        broken.mkdir()
        for file in folder.iterdir():
            if file.name != harm:
                (broken / file.name).write_bytes(file.read_bytes())
    if harm == "cut":
        (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    refused(message, command, "--model", broken, *(["--prompt", PROMPT] if command != "demo" else []))

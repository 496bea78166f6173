"""The command line as a whole: help, version, and one line for bad input."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import PROMPT, run


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


def test_help_lists_the_commands() -> None:
    ran = run("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in ("demo", "generate", "verify"))


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
    ran = run(command, "--model", broken, *(["--prompt", PROMPT] if command != "demo" else []))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


@pytest.mark.parametrize(
    "args",
    [
        ("--max-new-tokens", 0),
        ("--dtype", "int8"),
        ("--strategy", "magic"),
        ("--window-size", "many"),
        ("--window-size", 0),
    ],
)
def test_options_out_of_range_are_usage_errors(args: tuple[Any, ...]) -> None:
    ran = run("generate", "--prompt", "x", *args)
    assert (ran.status, ran.out) == (2, "")
    assert args[0] in ran.err

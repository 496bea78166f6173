"""The command line as a whole: help, version, one line for bad input, and commands imported only when they are run."""

import inspect
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers.cli import MADE, PROMPT, RUN, refused

import lookahead
from lookahead.cli import COMMANDS
from lookahead.cli.training_arguments import TRAINED, Train

ROOT = Path(lookahead.__file__).parent.parent


def fresh(code: str) -> str:
    """What ``code`` prints in a Python of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"COLUMNS": "160", "PATH": ""}
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_lists_every_command_and_loads_none(args: list[str]) -> None:
    told = fresh(RUN.format(commands=[args]))
    for name, options in COMMANDS.items():
        assert f" {name} " in told
        assert str(options.__doc__).partition("\n")[0] in told
    assert "loaded []" in told


def test_the_version_names_what_decides_about_a_text_and_loads_nothing() -> None:
    told = fresh(RUN.format(commands=[["--version"]]))
    assert told.startswith(f"lookahead {lookahead.__version__}, transformers 5.")
    version = r"lookahead \S+, transformers 5\.\S+, torch \S+, python 3\.\S+\n"
    assert re.fullmatch(version + r"status 0\nloaded \[\]\n", told)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_options_help(name: str) -> None:
    command = MADE.commands[name]
    assert (command.name, command.help) == (name, inspect.getdoc(COMMANDS[name]))


def test_every_module_of_a_command_is_listed() -> None:
    """Such a module has a function of the command's name."""
    words = {name.replace("-", "_") for name in COMMANDS}
    files = (ROOT / "lookahead" / "cli").glob("*.py")
    found = [word for file in files for word in re.findall(r"^def (\w+)\(options: ", file.read_text(), re.M)]
    assert sorted(word for word in found if word in words) == sorted(words)


@pytest.mark.parametrize("kind", TRAINED)
def test_the_options_of_a_training_are_its_settings(kind: str) -> None:
    """With the same defaults, but for the minutes, which depend on the device, and the warm-up, which is fixed."""
    given = Train(kind=kind, output=Path("heads"))
    assert given.settings("cuda") == TRAINED[kind]()
    assert given.settings("cpu") == TRAINED[kind](max_minutes=15.0)
    missing = {field.name for field in fields(TRAINED[kind]) if not hasattr(given, field.name)}
    assert missing == {"warmup"}


WRONG = {
    "generate --magic": "No such option",
    "generate --prompt": "requires an argument",
    "generate --prompt x --max-new-tokens many": "Invalid value for '--max-new-tokens'",
    "generate --prompt x --max-new-tokens 0": "Invalid value for '--max-new-tokens'",
    "generate --prompt x --dtype int8": "Invalid value for '--dtype'",
    "generate --prompt x --strategy magic": "Invalid value for '--strategy'",
    "generate --prompt x --window-size 0": "--window-size",
    "generate --prompt x --top-p 0.5": "--top-p needs --sample",
    "generate --prompt x --ngram-size 1": "--ngram-size 1 is plain decoding",
    "generate --prompt x --quantize int8 --device cuda": "--quantize is for a CPU: got --device cuda",
    "generate --prompt x --quantize int8 --dtype float32": "--quantize takes weights in bfloat16: got --dtype float32",
    "conjure": "No such command 'conjure'",
    "chat --model /nowhere": "--model /nowhere does not exist",
    "chat --draft /nowhere": "--draft /nowhere does not exist",
    "chat --temperature 0 --top-k 3": "--temperature 0 takes the likeliest tokens: drop --top-k",
    "serve --model /nowhere": "--model /nowhere does not exist",
    "serve --chat-template /nowhere": "--chat-template /nowhere cannot be read",
    "serve --max-replicas 2": "--max-replicas 2 with --replicas 0",
    "bench --prompts /nowhere": "--prompts /nowhere cannot be read",
    "bench --questions /nowhere": "--questions /nowhere cannot be read",
    "bench --modes warm": "--modes names 'warm'",
    "bench --modes t0": "expected greedy, or t and a temperature",
    "bench --questions q --prompts p": "give one of them",
    "bench --out /nope/x.json": "--out /nope/x.json: there is no folder /nope",
    "bench --out /": "--out / is a folder",
    "bench --plot /nope/x.png": "--plot /nope/x.png: there is no folder /nope",
    "bench --plot x.jpeg": "--plot x.jpeg: expected a name that ends in .png, .svg, .pdf",
    "batch /nowhere /out": "/nowhere cannot be read",
    "trace --output /nowhere/page.html": "there is no folder /nowhere",
    "verify --model lookahead/cli": "lookahead/cli holds no config.json",
    "tune --seconds 0": "Invalid value for '--seconds'",
    "tree --nodes 4097": "Invalid value for '--nodes'",
    "tune --batch 0": "Invalid value for '--batch'",
    "tune --output /": "--output / is a folder",
    "support --model /nowhere": "--model /nowhere does not exist",
    "tree --model lookahead/assets/tiny-coder": "needs --heads",
    "convert --kind eagle /nowhere /target": "SOURCE /nowhere does not exist",
    "convert --kind mtp /nowhere /target": "--kind mtp: expected one of medusa, eagle, redrafter",
    "train --kind medusa --output heads --data /nowhere": "The data /nowhere does not exist",
    "train --kind medusa --output heads --data setup.py --eval-data setup.py --hold-out 3": "both say what to evaluate",
    "train --kind medusa --output heads --model lookahead/assets/tiny-coder": "--data is missing: expected what",
    "train --kind medusa --output heads --data x --quantize int8": "--quantize is not for training",
    "train --kind medusa --output heads --unroll 2": "--unroll belongs to --kind eagle or redrafter: got medusa",
    "train --kind mtp --output head": "--kind mtp: expected one of medusa, eagle, redrafter",
    "train --kind redrafter --output head --heads 2": "--heads belongs to --kind medusa: got redrafter",
    "train --kind eagle --output head --targets model": "--targets belongs to --kind redrafter: got eagle",
    "train --kind eagle --output head --layers 0": "num_layers=0",
    "train --kind eagle --output head --feature-layers 1,x": "--feature-layers 1,x: expected numbers",
}


def test_what_is_wrong_is_told_without_torch() -> None:
    code = RUN.format(commands=[args.split() for args in WRONG])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "status 2\nloaded []\n" * len(WRONG), ran.stdout + ran.stderr
    for (args, told), said in zip(WRONG.items(), ran.stderr.split("ended\n"), strict=False):
        assert told in " ".join(said.replace("│", " ").split()), args


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lookahead`` where there is no script on the path."""
    monkeypatch.setattr(sys, "argv", ["lookahead", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lookahead", run_name="__main__")
    assert ended.value.code == 0
    assert torch.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "generate", "verify"])
def test_a_broken_model_folder_is_one_line(folder: Path, tmp_path: Path, command: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    given = ["--prompt", PROMPT] if command != "demo" else []
    refused("could not be loaded", command, "--model", broken, *given)

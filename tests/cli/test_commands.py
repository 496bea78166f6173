"""Commands are imported when they are run: the list of commands needs none of them."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.cli import RUN

import lookahead
from lookahead.cli import COMMANDS, load_command
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
    told = fresh(RUN.format(args=args))
    for name, options in COMMANDS.items():
        assert f" {name} " in told
        assert str(options.__doc__).partition("\n")[0] in told
    assert "loaded []" in told


def test_the_version_loads_nothing_either() -> None:
    told = fresh(RUN.format(args=["--version"]))
    assert told.startswith(f"lookahead {lookahead.__version__}, transformers ")
    assert told.endswith("status 0\nloaded []\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_options_help(name: str) -> None:
    command = load_command(name)
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

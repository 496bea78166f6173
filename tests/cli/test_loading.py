"""Options that commands share: device and dtype with the same defaults, and files of prompts read by one rule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import MADE, PROMPT, run
from helpers.refusals import refuses

from lookahead import bundled
from lookahead.cli import common
from lookahead.cli.prompts import read_prompts


@pytest.mark.parametrize("name", ["demo", "generate", "support", "tree", "tune", "verify"])
def test_device_and_dtype_are_automatic(name: str) -> None:
    defaults = {parameter.name: parameter.default for parameter in MADE.commands[name].params}
    assert (defaults["device"], defaults["dtype"]) == ("auto", "auto")


@pytest.mark.parametrize(("given", "dtype"), [((), "bfloat16"), (("--dtype", "float64"), "float64")])
def test_the_checkpoints_own_dtype(half: Path, given: tuple[Any, ...], dtype: str) -> None:
    options = ("--model", half, "--prompt", PROMPT, "--max-new-tokens", 4, *given, "--json")
    for command in ("generate", "verify"):
        settings = json.loads(run(command, *options).out)["settings"]
        assert settings["dtype"] == dtype


def test_a_config_that_names_no_dtype(half: Path, tmp_path: Path) -> None:
    """The weights say it themselves."""
    for file in half.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((half / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = common.load(str(tmp_path), "auto", "auto")
    assert model.dtype == torch.bfloat16


def test_the_bundled_model_is_float32(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file holds half precision to be small."""
    monkeypatch.setattr(bundled, "BUNDLED", half)
    model, _ = common.load(None, "auto", "auto")
    assert model.dtype == torch.float32


def test_the_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(device))
    assert [common.usable_device(device) for device in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"] == asked


def test_a_line_is_a_prompt_or_an_object_that_holds_one(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('x = 1\n\n  {"prompt": "y\\nz", "id": 3}\n"quoted"\n3\n{ return x; }\n{x: 1}\n')
    assert read_prompts(file) == ["x = 1", "y\nz", '"quoted"', "3", "{ return x; }", "{x: 1}"]


def test_every_line_of_a_jsonl_file_is_an_object(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x = 1", "ü\n")) + "\n\n")
    assert read_prompts(file) == ["x = 1", "ü\n"]
    for line, message in (("x = 1", "is not JSON"), ('"x = 1"', 'expected an object with a "prompt"')):
        file.write_text(f'{{"prompt": "x"}}\n{line}\n')
        refuses(rf"--prompts \S+prompts\.jsonl, line 2.*{message}", read_prompts, file)


@pytest.mark.parametrize("name", ["tree", "tune", "verify"])
def test_the_rule_is_in_each_commands_help(name: str) -> None:
    (option,) = (parameter for parameter in MADE.commands[name].params if parameter.name == "prompts")
    assert 'every line of a .jsonl file, is a JSON object with a "prompt"' in option.help

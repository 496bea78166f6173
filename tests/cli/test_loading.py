"""Device and dtype of commands: one option each, with the same defaults everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import PROMPT, run

from lookahead import bundled
from lookahead.cli import common, load_command


@pytest.mark.parametrize("name", ["demo", "generate", "support", "tree", "tune", "verify"])
def test_device_and_dtype_are_automatic(name: str) -> None:
    defaults = {parameter.name: parameter.default for parameter in load_command(name).params}
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

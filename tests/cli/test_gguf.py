"""GGUF files: read where they are named, where they are the model, and where nothing else could be meant."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_model import save_gguf
from helpers.cli import MADE, PROMPT, expected, run
from helpers.refusals import refuses

from lookahead import load_model, model_folder
from lookahead.cli import COMMANDS, common
from lookahead.cli.arguments import Chat, Serve


@pytest.fixture(scope="module")
def weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf")


@pytest.fixture
def mixed(folder: Path, weights: Path, tmp_path: Path) -> Path:
    """A folder with a configuration and a tokenizer, whose weights are a GGUF file's."""
    for file in folder.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    shutil.copy(weights, tmp_path)
    return tmp_path


def tokens(*given: Any) -> list[int]:
    ran = run("generate", *given, "--prompt", PROMPT, "--new-tokens", 12, "--json")
    assert ran.status == 0, ran.err
    written: list[int] = json.loads(ran.out)["tokens"]
    return written


def test_a_folders_only_file_is_taken(folder: Path, mixed: Path) -> None:
    """It may be named itself, too, even twice."""
    file = mixed / "tiny-f32.gguf"
    for given in ((mixed,), (file,), (file, "--gguf-file", "tiny-f32.gguf")):
        assert tokens("--model", *given) == expected(folder, 12)
    facts = json.loads(run("support", "--model", mixed, "--json").out)
    assert (facts["route"], facts["checked"]) == ("tree", "class, config and self-test")


def test_a_file_is_named_where_there_are_several(folder: Path, mixed: Path, weights: Path) -> None:
    shutil.copy(weights, mixed / "other.gguf")
    ran = run("generate", "--model", mixed, "--prompt", PROMPT)
    assert (ran.status, ran.out) == (2, "")
    assert "holds other.gguf, tiny-f32.gguf: say by --gguf-file (gguf_file=) which to read" in ran.err
    assert tokens("--model", mixed, "--gguf-file", "tiny-f32.gguf") == expected(folder, 12)
    shutil.copy(folder / "model.safetensors", mixed)  # which is read where no file is named
    assert tokens("--model", mixed) == expected(folder, 12)


def test_what_is_missing_is_named(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("generate", "--model", mixed, "--gguf-file", "none.gguf", "--prompt", PROMPT)
    assert ran.status == 2 and "holds no none.gguf: it has tiny-f32.gguf" in ran.err
    ran = run("verify", "--gguf-file", "none.gguf")
    assert ran.status == 2 and "--gguf-file needs --model" in ran.err
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    ran = run("demo", "--model", mixed)
    assert ran.status == 2 and "tiny-f32.gguf cannot be read without the package gguf: pip install gguf" in ran.err
    monkeypatch.undo()
    (mixed / "tiny-f32.gguf").write_bytes(b"GGUF")
    refuses("could not be loaded", load_model, mixed)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_one(name: str) -> None:
    assert "--gguf-file" in [option for parameter in MADE.commands[name].params for option in parameter.opts]


@pytest.mark.parametrize("options", [Chat, Serve])
def test_a_draft_model_is_read_from_one(
    folder: Path, mixed: Path, weights: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(weights, mixed / "other.gguf")
    model, tokenizer = load_model(folder)
    for given in ({"draft": str(mixed / "other.gguf")}, {"draft": str(mixed), "draft_gguf_file": "other.gguf"}):
        draft: Any = common.drafting(options(**given), model, tokenizer).draft_model
        for name, weight in draft.state_dict().items():
            torch.testing.assert_close(weight, model.state_dict()[name])
    monkeypatch.setattr(common, "load", lambda *given: pytest.fail("the model was loaded"))
    name = options.__name__.lower()
    ran = run(name, "--draft", mixed)
    assert ran.status == 2 and "say by --gguf-file (gguf_file=) which to read, or name that file itself" in ran.err
    ran = run(name, "--draft-gguf-file", "other.gguf")
    assert ran.status == 2 and "--draft-gguf-file needs --draft" in ran.err
    ran = run(name, "--draft", mixed, "--draft-gguf-file", "none.gguf")
    assert ran.status == 2 and "holds no none.gguf: it has other.gguf, tiny-f32.gguf" in ran.err

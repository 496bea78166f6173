"""``lookahead support``: the route of a model or config."""

import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.cli import run
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from transformers import CLIPConfig, GPT2Config, MambaConfig, Qwen2VLConfig, WhisperConfig

from lookahead import _native
from lookahead.models.conformance import recorded_version


def test_support(folder: Path, tmp_path: Path) -> None:
    """A model with weights is tested; a config alone tells what it can; a refusal has exit status 1 and its reason."""
    status, facts = told(folder)
    assert (status, facts["model"], facts["route"], facts["reason"]) == (0, "LlamaForCausalLM", "tree", None)
    assert (facts["attention"], facts["cache_layers"]) == ("sdpa", "DynamicLayer")
    assert "self-test" in facts["checked"]
    with mock.patch.object(_native, "speedups", None), mock.patch.object(_native, "missing", "it does not load (why)"):
        built = told(folder / "config.json")[1]["built_in_c"]
    assert built.startswith("no: it does not load (why), so drafting takes longer; `pip install -v")
    ran = run("support", "--model", folder / "config.json")
    assert ran.status == 0 and "no weights" in ran.out
    status, facts = told(saved(MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1), tmp_path))
    assert status == 1 and "a recurrent state cannot follow a tree" in facts["reason"]
    assert told(saved(GPT2Config(n_positions=77), tmp_path))[1]["limits"] == "77 positions (a learned table)"
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    for source, message in (
        ("nowhere", "does not exist"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "cannot be read as a model that writes text"),
    ):
        ran = run("support", "--model", source)
        assert ran.status == 2 and message in ran.err


def told(source: Any, *given: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what is told of a folder, or of a config that is saved in one."""
    ran = run("support", "--model", source, "--json", *given)
    return ran.status, json.loads(ran.out)


def saved(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "route", "architecture"),
    [("zaya", "chain", "ZayaForCausalLM"), ("jamba", "plain", "JambaForCausalLM")],
)
def test_support_of_a_recurrent_config(name: str, route: str, architecture: str, tmp_path: Path) -> None:
    """No state can be continued without weights: what was found for the class has the say."""
    status, facts = told(saved(hybrid(name).config, tmp_path))
    assert (status, facts["route"], facts["kind"]) == (int(route == "plain"), route, "causal")
    assert "a recurrent state cannot follow a tree" in facts["reason"]
    assert "meta" not in facts["reason"]
    assert f"the conformance record of transformers {recorded_version()} for {architecture}" in facts["checked"]


def test_support_of_a_config_that_is_not_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed where nothing is known."""
    monkeypatch.setattr(importlib.import_module("lookahead.cli.support"), "recorded", lambda _: [])
    status, facts = told(saved(hybrid("zaya").config, tmp_path))
    assert (status, facts["route"]) == (0, "unknown")
    assert "does not have this class, and there are no weights for the self-test" in facts["checked"]


def test_support_of_a_config_that_names_no_class(tmp_path: Path) -> None:
    """As a config made by hand is saved; it may be that of a model for images or speech."""
    assert told(saved(Qwen2VLConfig(), tmp_path))[1]["model"] == "Qwen2VLForConditionalGeneration"
    assert told(saved(WhisperConfig(), tmp_path))[1]["route"] == "tree"
    ran = run("support", "--model", saved(CLIPConfig(), tmp_path))
    assert ran.status == 2 and "no model of type 'clip'" in " ".join(ran.err.split())


def test_support_of_an_encoder_decoder(tmp_path: Path) -> None:
    """With weights and without."""
    model = seq2seq_model("bart")
    status, facts = told(saved(model.config, tmp_path))
    assert (status, facts["model"], facts["kind"]) == (0, "BartForConditionalGeneration", "encoder-decoder")
    assert (facts["route"], facts["limits"]) == ("tree", "64 positions of the decoder (a learned table)")
    assert "conformance record" in facts["checked"]
    model.save_pretrained(tmp_path)
    status, facts = told(saved(model.config, tmp_path))
    assert (status, facts["route"], facts["checked"]) == (0, "tree", "class, config and self-test")

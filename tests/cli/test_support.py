"""``lookahead support``: the route of a model or config."""

import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from transformers import CLIPConfig, GPT2Config, MambaConfig, Qwen2VLConfig, WhisperConfig
from typer.testing import CliRunner

from lookahead import _native
from lookahead.cli import app
from lookahead.models.conformance import recorded_version


def test_support(folder: Path, tmp_path: Path) -> None:
    """A model with weights is tested; a config alone tells what it can; a refusal has exit status 1 and its reason."""
    result = CliRunner().invoke(app, ["support", "--model", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["model"], facts["route"], facts["reason"]) == ("LlamaForCausalLM", "tree", None)
    assert (facts["attention"], facts["cache_layers"]) == ("sdpa", "DynamicLayer")
    assert "self-test" in facts["checked"]
    with mock.patch.object(_native, "speedups", None), mock.patch.object(_native, "missing", "it does not load (why)"):
        result = CliRunner().invoke(app, ["support", "--model", str(folder / "config.json"), "--json"])
    built = json.loads(result.stdout)["built_in_c"]
    assert built.startswith("no: it does not load (why), so drafting takes longer; `pip install -v")
    result = CliRunner().invoke(app, ["support", "--model", str(folder / "config.json")])
    assert result.exit_code == 0, result.output
    assert "no weights" in result.stdout
    config = MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert "a recurrent state cannot follow a tree" in json.loads(result.stdout)["reason"]
    GPT2Config(n_positions=77).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["limits"] == "77 positions (a learned table)"
    for source in ("nowhere", str(tmp_path / "nowhere")):
        result = CliRunner().invoke(app, ["support", "--model", source])
        assert result.exit_code == 2
        assert "does not exist" in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be read as a model that writes text" in result.stderr


def _supported(config: Any, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("name", "route", "architecture"),
    [("qwen3_next", "chain", "Qwen3NextForCausalLM"), ("jamba", "plain", "JambaForCausalLM")],
)
def test_support_of_a_recurrent_config(name: str, route: str, architecture: str, tmp_path: Path) -> None:
    """No state can be continued without weights: what was found for the class has the say."""
    status, facts = _supported(hybrid(name).config, tmp_path)
    assert (status, facts["route"], facts["kind"]) == (int(route == "plain"), route, "causal")
    assert "a recurrent state cannot follow a tree" in facts["reason"]
    assert "meta" not in facts["reason"]
    assert f"the conformance record of transformers {recorded_version()} for {architecture}" in facts["checked"]


def test_support_of_a_config_that_is_not_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed where nothing is known."""
    monkeypatch.setattr(importlib.import_module("lookahead.cli.support"), "recorded", lambda _: [])
    status, facts = _supported(hybrid("lfm2").config, tmp_path)
    assert (status, facts["route"]) == (0, "unknown")
    assert "does not have this class, and there are no weights for the self-test" in facts["checked"]


def test_support_of_a_config_that_names_no_class(tmp_path: Path) -> None:
    """As a config made by hand is saved; it may be that of a model for images or speech."""
    assert _supported(Qwen2VLConfig(), tmp_path)[1]["model"] == "Qwen2VLForConditionalGeneration"
    assert _supported(WhisperConfig(), tmp_path)[1]["route"] == "tree"
    CLIPConfig().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "no model of type 'clip'" in " ".join(result.stderr.split())


def test_support_of_an_encoder_decoder(tmp_path: Path) -> None:
    """With weights and without."""
    model = seq2seq_model("bart")
    status, facts = _supported(model.config, tmp_path)
    assert (status, facts["model"], facts["kind"]) == (0, "BartForConditionalGeneration", "encoder-decoder")
    assert (facts["route"], facts["limits"]) == ("tree", "64 positions of the decoder (a learned table)")
    assert "conformance record" in facts["checked"]
    model.save_pretrained(tmp_path)
    status, facts = _supported(model.config, tmp_path)
    assert (status, facts["route"], facts["checked"]) == (0, "tree", "class, config and self-test")

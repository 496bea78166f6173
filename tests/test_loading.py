"""Folders that hold no model are named."""

import json
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.models import tiny_model

from lookahead import LookaheadError, bundled, load_model, loading


def test_folders_without_a_model(tmp_path: Any) -> None:
    """Nothing there, no config, no weights, broken weights."""
    with pytest.raises(LookaheadError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(LookaheadError, match=r"holds no config\.json"):
        load_model(tmp_path)
    config = tiny_model("llama").config.to_dict() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(LookaheadError, match=r"holds no weights: expected .*safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(LookaheadError, match="could not be loaded"):
        load_model(tmp_path)
    with pytest.raises(LookaheadError, match="is not a folder"):
        load_model(tmp_path / "config.json")


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_go_straight_to_a_device(has_accelerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers needs accelerate for that; without it they are read to the CPU, and moved."""
    model, given = MagicMock(), {}
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: has_accelerate)
    monkeypatch.setattr(
        loading.AutoModelForCausalLM, "from_pretrained", lambda source, **kwargs: given.update(kwargs) or model
    )
    loading.load_weights(bundled.BUNDLED, "auto", "cuda:1")
    assert given == {"dtype": "auto"} | ({"device_map": {"": "cuda:1"}} if has_accelerate else {})
    assert [call.args for call in model.to.call_args_list] == ([] if has_accelerate else [("cuda:1",)])

"""Folders that hold no model are named."""

import json
from typing import Any

import pytest
from helpers.models import tiny_model

from lookahead import LookaheadError, load_model


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

"""Folders of tiny models for commands."""

from pathlib import Path

import pytest
import torch
from helpers.cli import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("twins"), twins=True)


@pytest.fixture(scope="session")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint in bfloat16."""
    saved = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(saved)
    AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
    return saved

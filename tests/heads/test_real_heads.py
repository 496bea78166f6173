"""Heads of real models, as they are stored here: small, whole, and of matrices in 8 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network
from helpers.refusals import refuses

from lookahead.eagle import EagleHead
from lookahead.heads.block.head import BlockHead

HEADS = Path(__file__).parents[2] / "examples" / "heads"


@pytest.mark.parametrize("folder", sorted(HEADS.iterdir()), ids=lambda folder: folder.name)
def test_each_is_whole_small_and_told_of(folder: Path) -> None:
    read: Any = BlockHead if "block" in folder.name else EagleHead
    assert all(bool(weight.isfinite().all()) for weight in read.from_pretrained(folder).parameters())
    rates = json.loads((folder / "evaluation.json").read_text())["tokens_per_pass"]["greedy"]
    assert f"| free sources | {rates['free sources']:.2f} " in (folder / "README.md").read_text()
    assert sum(file.stat().st_size for file in HEADS.rglob("*") if file.is_file()) <= 20_000_000


def test_matrices_of_8_bits_are_read_as_they_were_to_half_a_step(tmp_path: Path) -> None:
    head, sizes = EagleHead(random_network(3).float()), []
    for bits in (16, 8):
        head.save_pretrained(tmp_path / str(bits), bits=bits)
        read = dict(EagleHead.from_pretrained(tmp_path / str(bits)).named_parameters())
        for name, weight in head.named_parameters():
            step = weight.abs().amax(-1, keepdim=True) / 127 if bits == 8 and weight.ndim == 2 else torch.zeros(1)
            assert bool(((read[name] - weight).abs() <= 0.51 * step).all())
        sizes.append((tmp_path / str(bits) / "model.safetensors").stat().st_size)
    assert sizes[1] < 0.4 * sizes[0]
    refuses("bits=4: expected 8, or 16", head.save_pretrained, tmp_path / "4", bits=4)

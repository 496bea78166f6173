"""Broken weights are found, once for as long as nothing changes."""

from typing import Any

import pytest
import torch
from helpers.graphs import counting
from torch import nn

from lookahead.models import fingerprint
from lookahead.models.fingerprint import broken_weight


def test_weights_are_looked_at_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    looked = counting(monkeypatch, fingerprint, "look_for_broken_weight")
    for _ in range(3):
        assert broken_weight(module) is None
    assert len(looked) == 1
    with torch.no_grad():
        module[1].weight[0, :2] = torch.tensor([torch.nan, torch.inf])
    for _ in range(3):
        assert broken_weight(module) == "2 of 6 numbers of 1.weight are NaN or infinite"
    assert len(looked) == 2
    module[1].weight = nn.Parameter(torch.ones(2, 3))
    assert broken_weight(module) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_numbers_are_not_broken(dtype: torch.dtype) -> None:
    """Though their sum is infinite."""
    module = nn.Linear(8, 8).to(dtype)
    nn.init.constant_(module.weight, torch.finfo(dtype).max)
    assert broken_weight(module) is None


def test_weights_that_cannot_be_looked_at() -> None:
    module: Any = nn.Module()
    module.stored = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    module.small = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    module.nowhere = nn.Parameter(torch.ones(3, device="meta"))
    with torch.inference_mode():
        module.untracked = nn.Parameter(torch.ones(3))
    assert broken_weight(module) is None

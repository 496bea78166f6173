"""Heads that cannot draft: named before any pass of the model, which stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network
from helpers.medusa import random_heads
from helpers.models import fresh_model, prompts, same_as_plain
from helpers.mtp import with_layers
from helpers.redrafter import random_head
from helpers.refusals import Passes, refused
from torch import nn

from lookahead.eagle import Eagle, EagleHead
from lookahead.medusa import Medusa
from lookahead.mtp import Mtp, MtpHeads
from lookahead.redrafter import ReDrafter


def pair(kind: str, folder: Path) -> tuple[Any, nn.Module, Any]:
    """A model, a head for it, and how its strategy is made."""
    model = with_layers(folder, "mimo") if kind == "mtp" else fresh_model("llama")
    if kind == "mtp":
        return model, MtpHeads.from_pretrained(model=model), Mtp
    if kind == "eagle":
        return model, EagleHead(random_network(1)), Eagle
    if kind == "redrafter":
        return model, random_head().to(model.dtype), ReDrafter
    return model, random_heads(model), Medusa


NAMES = {
    "eagle": "The EAGLE head is",
    "redrafter": "The ReDrafter head is",
    "mtp": "The MTP layers are",
    "medusa": "[Tt]?he.? heads are",
}


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("kind", NAMES)
def test_heads_that_break_in_memory(kind: str, tmp_path: Path, passes: Passes) -> None:
    """Before their first use, or after it."""
    model, head, make = pair(kind, tmp_path)
    strategy = make(head)
    same_as_plain(model, prompts(1), strategy, max_new_tokens=6)
    with torch.no_grad():
        next(iter(head.parameters())).flatten()[3] = torch.nan
    refused(passes, model, f"{NAMES[kind]} broken: 1 of .* are NaN or infinite", lookahead_strategy=strategy)
    refused(passes, model, "broken: 1 of", lookahead_strategy=make(head))


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("kind", NAMES)
def test_heads_elsewhere(kind: str, tmp_path: Path, passes: Passes) -> None:
    model, head, make = pair(kind, tmp_path)
    match = "on meta and the model's output layer is on cpu: call .to.'cpu'. on it"
    refused(passes, model, match, lookahead_strategy=make(head.to("meta")))

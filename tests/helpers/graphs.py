"""CUDA graphs without a GPU, and views of models with static shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import prompts

from lookahead.models.mask_rules import mask_rules
from lookahead.runtime.cache.tree import TreeCache
from lookahead.runtime.cuda_graphs import buffers as arenas
from lookahead.runtime.cuda_graphs import executor as static
from lookahead.runtime.cuda_graphs.executor import StaticModel, fused_model


def view(model: Any, batch: int = 1, length: int = 12, **settings: Any) -> StaticModel:
    """A static view of a model after the prompt of :func:`prompts`."""
    inputs = prompts(batch, length)
    fused = fused_model(
        True,
        model,
        mask_rules(model),
        TreeCache(model.config.num_hidden_layers),
        inputs["input_ids"],
        model.generation_config,
        {"attention_mask": inputs["attention_mask"]},
        40,
        None,
        lambda row: False,
        **settings,
    )
    assert isinstance(fused, StaticModel)
    return fused


class StandIn:
    """Replays a pass by running it again, into the logits of its first run, as a graph does.

    Args:
        monkeypatch: puts it in the place of CUDA graphs.
        frozen: what is captured ignores everything that changes later.
        broken: capturing raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, frozen: bool = False, broken: bool = False) -> None:
        self.captured = self.replayed = 0
        self._frozen, self._broken = frozen, broken
        monkeypatch.setattr(static, "_capture", self.capture)
        monkeypatch.setattr(static, "_on_side_stream", lambda run, arena: run())
        original = StaticModel.__init__
        monkeypatch.setattr(StaticModel, "__init__", lambda *a, **k: original(*a, **k | {"graphs": True}))

    def capture(self, run: Callable[[], arenas.Outputs], arena: Any) -> tuple[Callable[[], None], arenas.Outputs]:
        if self._broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        logits = torch.full(self.shape, torch.nan, dtype=arena.dtype)
        hidden = torch.full((*self.shape[:2], self.hidden), torch.nan, dtype=arena.dtype) if self.hidden else None

        def replay() -> None:
            self.replayed += 1
            fresh, states = run()
            if not self._frozen or self.replayed == 1:
                logits.copy_(fresh)
                if hidden is not None and states is not None:
                    hidden.copy_(states)

        return replay, (logits, hidden)

    shape = (1, 8, 48)
    hidden = 0  # channels of what the output layer reads, where a call wants it

"""CUDA graphs without a GPU, and views of models with static shapes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.views import tree_view
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.hidden_states import Outputs
from lookahead.runtime import attention, split_attention
from lookahead.runtime.cuda_graphs import executor as static
from lookahead.runtime.cuda_graphs.buffers import StaticBuffers
from lookahead.runtime.cuda_graphs.buffers import _waiting as buffers_of_models
from lookahead.runtime.cuda_graphs.executor import GraphExecutor
from lookahead.runtime.tree import TreeModel


def view(model: Any, batch: int = 1, length: int = 12) -> TreeModel:
    """A static view of a model that will read the prompt of :func:`helpers.models.prompts`."""
    return tree_view(model, batch, length, static=True)


def waiting(model: Any) -> list[StaticBuffers]:
    """The static buffers that wait for the model's next call."""
    return list(buffers_of_models.of(model))


@contextmanager
def chunked(length: int) -> Iterator[None]:
    """Split attention of passes into chunks of ``length`` slots, on any device, while the block runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "serves", lambda *_: True)
        patched.setattr(split_attention, "chunk_length", lambda *_: length)
        yield


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    *,
    planned: bool = False,
) -> Tensor:
    """Attention ``[batch, node, head, channel]`` through the wrapper, inside a pass."""
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = query.shape[1] // key.shape[1], False
    with attention.grouped_attention(), attention.tree_forward(planned=planned):
        output: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling)[0]
    return output


class StandIn:
    """Replays a pass by running it again, into the logits of its first run, as a graph does.

    Args:
        monkeypatch: puts it in the place of CUDA graphs.
        frozen: what is captured ignores everything that changes later.
        broken: capturing raises, every time or so many times.
        stale: replays leave out what makes the logits.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, frozen: bool = False, broken: bool | int = False, stale: bool = False
    ) -> None:
        self.captured = self.replayed = 0
        self._frozen, self._stale = frozen, stale
        self._broken: float = math.inf if broken is True else broken
        monkeypatch.setattr(static, "capture", self.capture)
        monkeypatch.setattr(static, "on_side_stream", lambda run, arena: run())
        original = GraphExecutor.__init__

        def capturing(executor: GraphExecutor, *args: Any, **kwargs: Any) -> None:
            original(executor, *args, **kwargs)
            executor._captures = True

        monkeypatch.setattr(GraphExecutor, "__init__", capturing)

    def capture(self, run: Callable[[], Outputs], arena: Any) -> tuple[Callable[[], None], Outputs]:
        if self._broken > 0:
            self._broken -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        logits = torch.full(self.shape, torch.nan, dtype=arena.dtype)
        shape = (*self.shape[:2], self.hidden)
        hidden = (torch.full(shape, torch.nan, dtype=arena.dtype),) if self.hidden else ()

        def replay() -> None:
            self.replayed += 1
            fresh = run()
            if not self._stale and (not self._frozen or self.replayed == 1):
                logits.copy_(fresh.logits)
                for kept, states in zip(hidden, fresh.hidden, strict=True):
                    kept.copy_(states)

        return replay, Outputs(logits, hidden)

    shape = (1, 8, 48)
    hidden = 0  # channels of what the output layer reads, where a call wants it


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Grows by its arguments with every call of a function."""
    original, calls = getattr(owner, name), []

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, noting)
    return calls

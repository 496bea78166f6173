"""Checks that a refused call leaves everything as it was."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.models import prompts, registries, run, same_caches
from torch import Tensor
from transformers import GenerationMixin

from lookahead import LookaheadError
from lookahead.models.names import CACHE

Passes = Callable[[Any], list[int]]


@contextmanager
def unchanged(model: Any, *caches: Any) -> Iterator[None]:
    """Assert that the block leaves the model, the patch, transformers' registries and the caches as they were."""

    def state() -> list[Any]:
        modules = [(name, set(vars(module)), module.training) for name, module in model.named_modules()]
        hooks = [list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values()) for m in model.modules()]
        settings = [model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation]
        return [modules, hooks, settings, dict(vars(GenerationMixin)), registries()]

    before = state()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies = copy.deepcopy(caches)
    yield
    assert state() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    for cache, kept in zip(caches, copies, strict=True):
        same_caches(cache, kept, 0.0)


def refused(passes: Passes, model: Any, match: str, inputs: dict[str, Any] | None = None, **settings: Any) -> None:
    """Assert that a call is refused with this text before any pass, and that a plain and a good call work after it."""
    inputs = prompts(1) if inputs is None else inputs
    settings = {"max_new_tokens": 8} | settings
    if not {"lookahead_strategy", "use_lookahead", "generation_config"} & set(settings):
        settings["use_lookahead"] = True
    seen, cache = passes(model), settings.get(CACHE)
    state = torch.get_rng_state()
    with unchanged(model, *([cache] if cache is not None else [])), pytest.raises(LookaheadError, match=match):
        model.generate(**inputs, **settings)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)


def filled(model: Any, inputs: dict[str, Tensor], cache: Any = None) -> Any:
    """The cache that a model fills with a prompt's text."""
    return run(model, inputs, **{CACHE: cache}, max_new_tokens=1, return_dict_in_generate=True)[0][CACHE]


def refuses(match: str, call: Callable[..., Any], /, *args: Any, **settings: Any) -> None:
    """Assert that a call raises ``LookaheadError`` with this text."""
    with pytest.raises(LookaheadError, match=match):
        call(*args, **settings)

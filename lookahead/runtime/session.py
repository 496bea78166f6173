"""Passes outside of ``generate``: a model that has read a prompt and waits for trees, to be measured or tested."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from jacobi import Path
from lookahead.models.families.registry import takes_positions
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.mask_rules import mask_rules
from lookahead.models.traits import input_device, is_seq2seq
from lookahead.runtime.attention import grouped_attention
from lookahead.runtime.cache.tree import empty_cache
from lookahead.runtime.cuda_graphs.executor import fused_model
from lookahead.runtime.encoder_decoder import stand_in_encoder
from lookahead.runtime.linear import ChainModel, chain_cache
from lookahead.runtime.tree import FusedModel


@contextmanager
def bare_model(
    model: PreTrainedModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    static: bool | None = False,
    past: Cache | None = None,
    hidden: HiddenStates | None = None,
    **inputs: Any,
) -> Iterator[FusedModel]:
    """A view of ``model`` with all of ``prompt`` in its history: the trees of a pass start with the token after it.

    Args:
        model: a model that lookahead supports; what an encoder says is made up.
        prompt: ``[batch, token]``, at least one token.
        new_tokens: slots to make room for, beside the prompt's.
        static: as for :func:`lookahead.runtime.cuda_graphs.executor.fused_model`.
        past: what comes before the prompt; only read.
        hidden: is given what the output layer reads in every pass; None = nobody wants it.
        inputs: what else the model is given, as :class:`lookahead.runtime.tree.FusedModel` takes it.
    """
    cache = empty_cache(model, past)
    batch, count = prompt.shape
    before = cache.get_seq_length()
    if is_seq2seq(model):
        inputs = {"encoder_outputs": stand_in_encoder(model, batch)} | inputs
    else:
        positions = torch.arange(before, before + count, device=input_device(model))[None].expand(batch, -1)
        inputs = {"position_ids": positions} | inputs
    fused = fused_model(
        static,
        model,
        mask_rules(model),
        cache,
        prompt,
        GenerationConfig(),
        inputs,
        new_tokens,
        None,
        lambda row: False,
        hidden=hidden,
    )
    with grouped_attention(), _read(fused, batch):
        yield fused


@contextmanager
def bare_chain(model: PreTrainedModel, prompt: Tensor, mask: Tensor | None = None) -> Iterator[ChainModel]:
    """A view of ``model`` outside of ``generate``, with all of ``prompt`` ``[batch, token]`` in its history.

    Args:
        model: a causal model.
        prompt: ``[batch, token]``.
        mask: 0 for padding on the left, ``[batch, token]``; None = there is none.
    """
    batch = prompt.shape[0]
    inputs = masked_inputs(model, torch.ones_like(prompt) if mask is None else mask)
    chain = ChainModel(model, chain_cache(model, None), prompt, GenerationConfig(), inputs)
    with _read(chain, batch):
        yield chain


def masked_inputs(model: PreTrainedModel, mask: Tensor) -> dict[str, Any]:
    """A mask ``[batch, token]``, 0 for padding on the left, and its positions if the model takes any."""
    if not takes_positions(type(model).forward):
        return {"attention_mask": mask}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@contextmanager
def _read(view: FusedModel | ChainModel, batch: int) -> Iterator[None]:
    """While a prompt is in the history of ``view``."""
    view.prefill()
    view.keep([Path([0], [0])] * batch)
    try:
        yield
    finally:
        view.close()

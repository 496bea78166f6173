"""Passes outside of ``generate``: a model that has read a prompt and waits for trees, to be measured or tested."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from jacobi import Path, Wants
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import grouped_attention
from lookahead.runtime.encoder_decoder import stand_in_encoder
from lookahead.runtime.experts import expert_kernels
from lookahead.runtime.forward import Prompt
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.open import Tracing, open_tree
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.tree import PlainPasses, TreeModel


def unread(
    model: PreTrainedModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    static: bool | None = False,
    wants: Wants | None = None,
    traced: Tracing | None = None,
    packed: Packed | None = None,
    **inputs: Any,
) -> TreeModel:
    """A view of ``model`` that is still to read its ``prompt``; the arguments are those of :func:`bare_model`."""
    traits = ModelTraits.of(model)
    (batch, count), past = prompt.shape, inputs.pop(CACHE, None)
    if traits.is_encoder_decoder:
        inputs = {"encoder_outputs": stand_in_encoder(model, batch)} | inputs
    else:
        before = 0 if past is None else int(past.get_seq_length())
        positions = torch.arange(before, before + count, device=traits.device)[None].expand(batch, -1)
        inputs = {"position_ids": positions} | inputs
    given = Prompt(prompt, GenerationConfig(), inputs, past, new_tokens)
    return open_tree(model, traits, given, None, wants or Wants(), static=static, traced=traced, packed=packed)


@contextmanager
def bare_model(
    model: PreTrainedModel, prompt: Tensor, new_tokens: int, *, past: Cache | None = None, **settings: Any
) -> Iterator[TreeModel]:
    """A view of ``model`` with all of ``prompt`` ``[batch, token]`` in its KV cache, which has room for ``new_tokens``:
    the trees of a pass start with the token after it. ``past`` comes before, and is only read. ``settings`` are
    ``static``, ``traced``, ``packed`` as for :func:`lookahead.runtime.open.open_tree`; ``wants``, of which hidden
    states are noted in every pass; and what else the model is given. What an encoder says is made up."""
    view = unread(model, prompt, new_tokens, **settings, **{CACHE: past})
    with _read(view, len(prompt)):
        yield view


@contextmanager
def bare_chain(model: PreTrainedModel, prompt: Tensor, mask: Tensor | None = None) -> Iterator[LinearModel]:
    """A view of a causal model that is given one branch a pass, with all of ``prompt`` ``[batch, token]`` in its cache.
    ``mask`` ``[batch, token]`` is 0 for padding on the left; None = there is none."""
    traits = ModelTraits.of(model)
    inputs = masked_inputs(traits, torch.ones_like(prompt) if mask is None else mask)
    view = LinearModel(model, traits, Prompt(prompt, GenerationConfig(), inputs, None, 0), Wants())
    with _read(view, len(prompt)):
        yield view


def stepwise(model: PreTrainedModel, prompt: Tensor, tokens: Sequence[int], **inputs: Any) -> Tensor:
    """The logits ``[batch, token, vocab]`` of ``tokens`` after ``prompt`` ``[batch, token]``, one a pass, as plain
    decoding computes them; ``inputs`` are what else the model is given."""
    cache: Cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if model.config.is_encoder_decoder:
        inputs = {"encoder_outputs": stand_in_encoder(model, len(prompt))} | inputs
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    inputs |= {CACHE: cache, "use_cache": True}
    model._prefill(prompt, GenerationConfig(), inputs)
    text = torch.cat([prompt, prompt.new_tensor([tokens] * len(prompt))], dim=1)
    passes = PlainPasses(model, cache, inputs, 1)
    ends = range(prompt.shape[1] + 1, text.shape[1] + 1)
    return torch.stack([passes.forward(text[:, :end]).logits[:, -1].float() for end in ends], dim=1)


def masked_inputs(traits: ModelTraits, mask: Tensor) -> dict[str, Any]:
    """A mask ``[batch, token]``, 0 for padding on the left, and its positions if the model takes any."""
    if not traits.takes_positions:
        return {"attention_mask": mask}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@contextmanager
def kernels(hidden: HiddenStates | None = None) -> Iterator[None]:
    """Inside, attention and experts are computed as suits trees, and ``hidden`` states are noted."""
    with grouped_attention(), expert_kernels(), hidden or nullcontext():
        yield


@contextmanager
def _read(view: TreeModel | LinearModel, batch: int) -> Iterator[None]:
    with kernels(view.hidden):
        read_prompt(view, batch)
        try:
            yield
        finally:
            view.close()


def read_prompt(view: TreeModel | LinearModel, batch: int = 1) -> None:
    """Let a model read its prompt, all of which is in the KV cache afterwards."""
    view.prefill()
    view.keep([Path([0], [0])] * batch)

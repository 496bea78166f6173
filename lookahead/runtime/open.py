"""Opens a model that follows trees for one call: which executor runs its passes."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from jacobi import LookaheadError, Wants
from lookahead.models.families.registry import overrides_for
from lookahead.models.families.scans import scanned_layers
from lookahead.models.hidden_states import HiddenStates, tapped
from lookahead.models.mask_rules import held_window
from lookahead.models.traits import ModelTraits, boundary
from lookahead.runtime.cache.tree import empty_cache
from lookahead.runtime.cuda_graphs.executor import GraphExecutor, refusal, rejection
from lookahead.runtime.encoder_decoder import EncoderDecoderForward
from lookahead.runtime.executor import Executor
from lookahead.runtime.forward import Prompt, TreeForward
from lookahead.runtime.layout import Layout
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.tree import TreeModel, Writing

Tracing = Callable[[TreeForward, str | None], Executor]  # makes the executor of passes, and is told why no better one


def open_tree(
    model: PreTrainedModel,
    traits: ModelTraits,
    prompt: Prompt,
    writing: Writing | None,
    wants: Wants,
    *,
    static: bool | None = None,
    traced: Tracing | None = None,
    packed: Packed | None = None,
) -> TreeModel:
    """A model that follows trees; call its ``close()`` when the call is over.

    Args:
        writing: the text; None = passes outside of ``generate``.
        static: fixed shapes, on CUDA as graphs: None = on CUDA where possible, True = or an error, False = never.
        traced: makes the executor of passes that are given nothing special; None = they are run eagerly.
        packed: the model's packed weights, for passes with shapes that follow the text; None = there are none.

    Raises:
        LookaheadError: ``static=True`` for a model that cannot be run with static shapes.
    """
    cache = empty_cache(
        traits, scanned_layers(model, traits.config) or [], on_host=getattr(prompt.cache, "offloading", False)
    )
    idle = (lambda row: False) if writing is None else writing.idle
    limit, find = (None, None) if writing is None else (traits.depth_limit, partial(boundary, traits))
    layout = Layout(cache, traits.device, limit, idle, find)
    hidden = HiddenStates(tapped(model, wants.taps)) if wants.taps else None
    logits = (wants.prompt_top_k if wants.top_k else 1) + prompt.spread
    kind = EncoderDecoderForward if traits.is_encoder_decoder else TreeForward
    forward = kind(model, traits, layout, prompt, hidden, logits)
    reason = dynamic_reason(static, model, traits) or _prompt_reason(prompt, cache.on_host) or rejection(forward)
    if static is True and reason is not None:
        raise LookaheadError(refusal(reason))
    executor: Executor
    if reason is None:
        executor = GraphExecutor(forward, required=static is True)
        packed = None
    elif traced is not None and forward.is_plain and not traits.is_encoder_decoder:
        executor = traced(forward, reason)
    else:
        executor = Executor(forward, reason)
    if not (writing is None or reason is None or cache.on_host or reads_in_chunks(prompt.config)):
        forward.holds = held_window(model, traits, forward.rules, prompt.cache)
    if packed is not None:
        forward.use(packed)
    return TreeModel(forward, executor, writing, wants.top_k)


def open_shared(read: TreeModel, traced: Tracing | None = None, packed: Packed | None = None) -> TreeModel:
    """Passes over sequences that come and go: first those whose prompts ``read`` has read, which is used up, and then
    what joins (:meth:`TreeModel.join`). ``traced`` and ``packed`` are those of :func:`open_tree`."""
    before = read.forward_pass
    model, traits = before.model, before.traits
    layout = Layout(before.layout.cache, traits.device, traits.depth_limit, lambda row: False)
    layout.join(before.layout, len(before.layout.rows))
    ids = torch.zeros((1, 1), dtype=torch.long, device=traits.device)
    forward = TreeForward(model, traits, layout, Prompt(ids, GenerationConfig(), {}, None, 0))
    if packed is not None:
        forward.use(packed)
    forward.follow(layout.count)
    return TreeModel(forward, Executor(forward) if traced is None else traced(forward, None), None)


def reads_in_chunks(config: GenerationConfig) -> bool:
    """Whether a prompt is read in several passes."""
    return getattr(config, "prefill_chunk_size", None) is not None


def dynamic_reason(static: bool | None, model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why passes asked for with ``static`` (see :func:`open_tree`) do not have static shapes; None = they have."""
    if static is False:
        return "static=False"
    if static is None and model.device.type != "cuda":
        return "static shapes are used on CUDA devices unless asked for"
    return static_reason(model, traits)


def static_reason(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why passes over this model cannot have static shapes now; None = as far as can be told, they can."""
    if traits.is_encoder_decoder:
        return "an encoder-decoder model counts positions on the host"
    places = getattr(model, "hf_device_map", None) or {}
    devices = {weight.device for weight in model.parameters()}
    if torch.device("meta") in devices:
        return "the model's weights are offloaded"
    if len(set(places.values())) > 1 or len(devices) > 1 or getattr(model, "_device_mesh", None) is not None:
        return "the model lies on several devices"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, and frees the weights that it has cast when it ends"
    if traits.attention == "flex_attention":
        return "flex_attention compiles a kernel of its own for a mask"
    if traits.rope_limit is not None:
        return f"{traits.rope_limit[0]} RoPE changes its frequencies with the text's length"
    if traits.index_limit is not None:
        return "attention that leaves out tokens is handed over to plain passes when the text is long"
    if scanned_layers(model, traits.config):
        return "its layers have recurrent states, which move outside of passes"
    if traits.counts_slots and overrides_for(model):
        return "this model counts cache slots by itself, and is given places for each pass"
    return None


def _prompt_reason(prompt: Prompt, on_host: bool) -> str | None:
    positions = prompt.kwargs.get("position_ids")
    if positions is not None and positions.ndim > 2:
        return "positions have several axes"
    return "the cache is offloaded" if on_host else None

"""What can be decoded with lookahead, checked before any pass: each refusal names the culprit and the way out."""

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from jacobi import LookaheadError, Path, TokenTree
from lookahead.bare import bare_model
from lookahead.cache import check_cache
from lookahead.chain import bare_chain

Route = Literal["tree", "chain", "plain"]

_ATTENTION = ("sdpa", "eager", "flex_attention")
_RECURRENT_WORDS = ("linear", "mamba", "conv", "recurrent", "hybrid")

# A model's verdicts live as long as the model and are stored nowhere else.
_verdicts: "weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], str | None]]"
_verdicts = weakref.WeakKeyDictionary()
_verdicts_lock = threading.Lock()


def check_mode(generation_config: GenerationConfig, assistant_model: Any = None) -> None:
    """Refuse generation modes that lookahead cannot be combined with.

    Raises:
        LookaheadError: beams, an assistant, prompt lookup or multi-token prediction is asked for as well.
    """

    def refuse(culprit: str, way_out: str) -> None:
        raise LookaheadError(f"use_lookahead cannot be combined with {culprit}: {way_out}, or drop use_lookahead.")

    if (generation_config.num_beams or 1) > 1:
        refuse(f"num_beams={generation_config.num_beams}", "set num_beams=1")
    if assistant_model is not None:
        refuse("assistant_model", "drop assistant_model")
    for name in ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit"):
        if getattr(generation_config, name, None):
            refuse(f"{name}={getattr(generation_config, name)!r}", f"drop {name}")
    if getattr(generation_config, "cache_implementation", None) == "paged":
        refuse("cache_implementation='paged'", "leave cache_implementation unset")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None) and generation_config.return_dict_in_generate:
            refuse(f"{name}=True", f"drop {name} (scores, logits and the cache are returned as usual)")


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be decoded with lookahead, as far as its class and config tell.

    Raises:
        LookaheadError: an encoder-decoder, or an attention without custom masks where trees need them.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise LookaheadError(
            f"{name} is an encoder-decoder model: lookahead decodes causal models. Drop use_lookahead."
        )
    attention = model.config.get_text_config()._attn_implementation
    if attention not in _ATTENTION and no_tree(model) is None:
        raise LookaheadError(
            f"Attention implementation {attention!r} takes no custom mask: expected one of {', '.join(_ATTENTION)}. "
            "Call model.set_attn_implementation('sdpa') first, or drop use_lookahead."
        )


def no_tree(model: PreTrainedModel) -> str | None:
    """Why a model cannot follow a tree, as far as its class and config tell; None = nothing speaks against it."""
    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT_WORDS))
    # Some hybrid classes can be configured without a recurrent layer; then the class flag says nothing.
    only_attention = bool(kinds) and all("attention" in kind for kind in kinds)
    if recurrent or (getattr(model, "_is_stateful", False) and not only_attention):
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "recurrent layers"
        return f"{name} has {what}, and a recurrent state cannot follow a tree"
    if any("local" in str(kind) for kind in getattr(config, "attention_layers", None) or ()):
        return f"{name} has local attention layers whose window is counted in cache slots, not in positions"
    if getattr(config, "alibi", False) is True:
        return f"{name} has ALiBi biases that are counted in cache slots, not in positions"
    if not _takes_positions(type(model).forward):
        return f"{name}.forward takes no position_ids, so siblings of a tree cannot share a position"
    return None


def route(model: PreTrainedModel) -> tuple[Route, str | None]:
    """How a model is decoded.

    A model that no tree can pass may be tested with a few short passes the first time; the verdict is remembered for as
    long as the model lives.

    Returns:
        ``"tree"`` and None; ``"chain"`` (see :mod:`lookahead.chain`) and why it is not a tree; or ``"plain"``, which
        means that transformers' own loop decodes it, and why it is not a chain either.
    """
    why = no_tree(model)
    if why is None:
        return "tree", None
    error = _remembered(model, "chain", _chain_error)
    return ("chain", why) if error is None else ("plain", f"{why}, and {error}")


@lru_cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in inspect.signature(forward).parameters


def check_prompt(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse prompts that no text can follow.

    Raises:
        LookaheadError: an empty prompt, ids outside the vocabulary, right padding, more tokens than positions, or
            position_ids that are not ``[batch, token]``.
    """
    embeds = model_kwargs.get("inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and position_ids.ndim != 2 and no_tree(model) is None:
        raise LookaheadError(
            f"position_ids of shape {tuple(position_ids.shape)} are not supported: expected [batch, token]. "
            "Drop use_lookahead for this model."
        )
    if length == 0 or input_ids.shape[0] == 0:
        raise LookaheadError(
            f"The prompt is empty: got input_ids of shape {tuple(input_ids.shape)}, expected at least one token. "
            "Start with the model's begin-of-text token."
        )
    vocab = model.get_input_embeddings().weight.shape[0]
    if input_ids.numel():
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= vocab:
            raise LookaheadError(
                f"Token id {low if low < 0 else high} is outside the vocabulary: expected 0 to {vocab - 1}. "
                "Was the prompt made by another model's tokenizer?"
            )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape[-1] < length:
        raise LookaheadError(
            f"attention_mask of shape {tuple(mask.shape)} does not cover the {length} tokens of the prompt: expected "
            "one column for each token."
        )
    if mask is not None and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise LookaheadError(
            f"Row {row} is padded on the right: new tokens follow the last column, so a batch must be padded on the "
            "left. Set tokenizer.padding_side = 'left'."
        )
    table = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    reach = length if position_ids is None else int(position_ids.max()) + 1
    if isinstance(table, int) and 0 < table < reach:
        raise LookaheadError(
            f"The prompt reaches position {reach - 1}, and the model's position table ends at {table} "
            "(config.max_position_embeddings). Shorten the prompt."
        )


def check_caches(model: PreTrainedModel, cache: Any, batch: int, slots: int) -> None:
    """Refuse a cache that is another model's, cannot keep chosen slots, or has fewer than ``slots`` of them."""
    if cache is None:
        return
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    channels = getattr(config, "head_dim", None)
    if channels is None and getattr(config, "hidden_size", None) and getattr(config, "num_attention_heads", None):
        channels = config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) or not isinstance(heads, int) or not isinstance(channels, int):
        heads = channels = None  # latent attention: the cached shape follows other fields
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    check_cache(
        cache,
        n_layers=config.num_hidden_layers,
        n_shared=shared,
        batch=batch,
        heads=heads,
        channels=channels,
        slots=slots,
    )


def depth_limit(model: PreTrainedModel, last_position: int, batch: int) -> int | None:
    """The first position that must not be drafted; None = no limit.

    A table of learned positions simply ends. RoPE variants that choose their frequencies from the largest position of a
    pass would change all of it when one drafted node crosses their boundary, so nothing is drafted across it.

    Args:
        model: the model.
        last_position: the largest position this call can reach.
        batch: number of rows.

    Raises:
        LookaheadError: ``longrope`` would be crossed while decoding, where transformers recomputes the whole text; or
            ``dynamic`` by several rows, whose frequencies would follow whichever row is ahead.
    """
    config = model.config.get_text_config()
    table = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not rope:
        return table if isinstance(table, int) and table > 0 else None
    kinds = rope.values() if all(isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type == "dynamic":
            if batch > 1 and table is not None and last_position >= table:
                raise LookaheadError(
                    f"This model's dynamic RoPE changes at token {table}, and a batch of {batch} may write up to token "
                    f"{last_position + 1}: lower max_new_tokens, decode one row at a time, or drop use_lookahead."
                )
            return table
        if rope_type == "longrope":
            boundary = kind.get("original_max_position_embeddings")
            boundary = int(boundary or getattr(config, "original_max_position_embeddings", None) or table or 0)
            if last_position >= boundary:
                raise LookaheadError(
                    f"This model's longrope positions change at token {boundary}, and this call may write up to token "
                    f"{last_position + 1}: lower max_new_tokens, or drop use_lookahead."
                )
            return boundary
    return None


def self_test(model: PreTrainedModel) -> None:
    """Check once per model that it heeds tree masks and positions: a root with two branches against each branch alone.

    The verdict is remembered for as long as the model lives, under its attention implementation and dtype.

    Raises:
        LookaheadError: the branches disturb each other.
    """
    error = _remembered(model, "tree", _tree_error)
    if error is not None:
        raise LookaheadError(error)


def _remembered(
    model: PreTrainedModel, test: str, run: Callable[[PreTrainedModel], tuple[str | None, bool]]
) -> str | None:
    """The verdict of a test that is run once per model, attention implementation, dtype and device."""
    config = model.config.get_text_config()
    key = (test, str(config._attn_implementation), model.dtype, model.device.type, model.training)
    with _verdicts_lock:
        known = _verdicts.setdefault(model, {})
    if key not in known:
        error, certain = run(model)
        if not certain:
            return error
        known[key] = error
    return known[key]


@torch.no_grad()
def _tree_error(model: PreTrainedModel) -> tuple[str | None, bool]:
    """What is wrong with the model's handling of a tree, if anything, and whether that can be told for certain."""
    vocab = model.get_input_embeddings().weight.shape[0]
    word = [(7 + 13 * i) % vocab for i in range(8)]
    prompt = torch.tensor([word[:4]] * 3, device=model.device)
    left, right = word[5:8], [(token + 1) % vocab for token in word[5:7]]

    name = type(model).__name__
    try:
        with bare_model(model, prompt, 16, attention_mask=torch.ones_like(prompt)) as fused:
            trees = [TokenTree.from_paths(word[4], paths) for paths in ([left, right], [left], [right])]
            both, *alone = fused.forward(trees).logits.float()
    except (LookaheadError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
        message = f"{name} did not run a pass with a tree mask ({type(error).__name__}: {error})."
        return f"{message} Drop use_lookahead for this model.", True
    together = torch.cat([both[:4], both[:1], both[4:]])
    apart = torch.cat([line[: len(tree)] for line, tree in zip(alone, trees[1:], strict=True)])
    if _untold(together, apart):
        return None, False  # decoding will name the step
    difference, allowed = _difference(together, apart, model.dtype)
    if difference <= allowed:
        return None, True
    reason = "model.eval() was not called, or " if model.training else ""
    return (
        f"{name} does not keep the branches of a tree apart: scores differ by {difference:.2g} of their spread, "
        f"allowed {allowed:.2g} ({reason}it ignores attention masks or position_ids). "
        "Drop use_lookahead for this model."
    ), True


def _untold(ours: Tensor, alone: Tensor) -> bool:
    """Whether scores say nothing, because they are not numbers."""
    return bool(alone.isnan().any()) or not bool((ours.isfinite() & alone.isfinite()).any())


def _difference(ours: Tensor, alone: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """How far scores lie apart, as a share of their spread, and how far they may in this dtype."""
    finite = ours.isfinite() & alone.isfinite()  # a model may rule tokens out with -inf
    difference = (ours - alone)[finite].abs().max() / (alone[finite].std() + 1e-9)
    return difference.item(), max(1e-3, 32 * torch.finfo(dtype).eps)


@torch.no_grad()
def _chain_error(model: PreTrainedModel) -> tuple[str | None, bool]:
    """What is wrong with the model's way of continuing a state with several tokens, and whether that is certain.

    A text is fed token by token; then in passes of which one is kept whole, one is cut short, one feeds again what was
    accepted and is cut short, one is kept whole, and a last one follows on what that has left. Scores have to be the
    same, and the states wherever a pass was kept whole.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    word = [(7 + 13 * i) % vocab for i in range(18)]
    wrong = [(token + 1) % vocab for token in word]
    prompt = torch.tensor([word[:6]], device=model.device)
    drafts = [(6, 9, 9), (9, 11, 13), (11, 12, 14), (12, 16, 16), (16, 17, 17)]  # first token, first wrong one, end
    try:
        alone, states = [], []
        with bare_chain(model, prompt) as chain:
            for place in range(6, 17):
                alone.append(chain.forward([TokenTree(word[place])]).logits[0].float())
                chain.keep([Path([0], [0])])
                if place + 1 in (9, 16, 17):
                    states += chain.states()
        ours, left = [], []
        with bare_chain(model, prompt) as chain:
            for first, right, end in drafts:
                tokens = word[first:right] + wrong[right:end]
                kept = right - first
                logits = chain.forward([TokenTree.chain(tokens[0], tokens[1:])]).logits[0, :kept]
                ours.append(logits.float())
                chain.keep([Path(list(range(kept)), [0] * kept)])
                if right == end:
                    left += chain.states()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that is not made for it may fail in any way
        return f"it does not continue a cached state with several tokens ({type(error).__name__}: {error})", True
    together, apart = torch.cat(ours), torch.cat(alone)
    if _untold(together, apart):
        return None, False  # decoding will name the step
    difference, allowed = _difference(together, apart, model.dtype)
    # In a small part of a model a lost state may hardly show in the scores of so short a text.
    for got, expected in zip(left, states, strict=True):
        if got.shape != expected.shape:
            return "several tokens leave a cached state of another shape than one by one", True
        lost = (got - expected).abs().max() / (expected.abs().max() + 1e-9)
        difference = max(difference, lost.item())
    if difference <= allowed:
        return None, True
    return (
        "several tokens that continue a cached state do not give what they give one by one: scores or states differ "
        f"by {difference:.2g} of their spread, allowed {allowed:.2g}"
    ), True

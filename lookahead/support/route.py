"""What can be decoded with lookahead, checked before any pass: each refusal names the culprit and the way out."""

import inspect
from typing import Any, Literal

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticCache

from jacobi import LookaheadError
from lookahead.models.families.encoder_decoders import forgets_padding, own_steps
from lookahead.models.families.registry import overrides_for, takes_positions
from lookahead.models.limits import boundary, position_limit, rope_settings
from lookahead.models.mask_rules import windows_of_the_cache
from lookahead.models.traits import decoder_config, is_seq2seq, position_table, vocabulary
from lookahead.runtime.cache.snapshots import holds_text
from lookahead.support.self_test import chain_error, is_on_record, tree_error

Route = Literal["tree", "chain", "plain"]

_ATTENTION = ("sdpa", "eager", "flex_attention")
_UNMASKED = ("GPTNeoSelfAttention", "LEDDecoder")
_RECURRENT_WORDS = ("linear", "mamba", "conv", "recurrent", "hybrid")


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


def check_model(model: PreTrainedModel, attention: str | None = None) -> None:
    """Refuse a model that cannot be decoded with lookahead, as far as its class and config tell.

    Args:
        model: the model.
        attention: the implementation that the call will use; None = the model's own.

    Raises:
        LookaheadError: a decoding loop of the model's own, or an attention without custom masks where trees need them.
    """
    loop = _own_loop(model)
    if loop is not None:
        raise LookaheadError(
            f"{type(model).__name__} writes in a decoding loop of its own ({loop}._sample), and lookahead cannot take "
            "its place. Drop use_lookahead for this model."
        )
    attention = attention or decoder_config(model)._attn_implementation
    if attention not in _ATTENTION and no_tree(model) is None:
        raise LookaheadError(
            f"Attention implementation {attention!r} takes no custom mask: expected one of {', '.join(_ATTENTION)}. "
            "Decode with Lookahead(attention='sdpa'), which switches for the call, call "
            "model.set_attn_implementation('sdpa') first, or drop use_lookahead."
        )


def _own_loop(model: PreTrainedModel) -> str | None:
    """The class whose ``_sample`` does not end in transformers' own, as speech models have it; None = there is none."""
    for kind in type(model).__mro__:
        if kind is GenerationMixin:
            break
        own = vars(kind).get("_sample")
        code = None if own is None else getattr(inspect.unwrap(own), "__code__", None)
        if code is not None and "_sample" not in code.co_names:
            return kind.__name__
    return None


def no_tree(model: PreTrainedModel) -> str | None:
    """Why a model cannot follow a tree, as far as its class and config tell; None = nothing speaks against it."""
    name = type(model).__name__
    config = decoder_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT_WORDS))
    # Some hybrid classes can be configured without a recurrent layer; then the class flag says nothing.
    only_attention = bool(kinds) and all("attention" in kind for kind in kinds)
    if recurrent or (getattr(model, "_is_stateful", False) and not only_attention):
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "recurrent layers"
        return f"{name} has {what}, and a recurrent state cannot follow a tree"
    if is_seq2seq(model):
        return own_steps(model)
    if overrides_for(model):
        return None
    if any("local" in str(kind) for kind in getattr(config, "attention_layers", None) or ()):
        return f"{name} has local attention layers whose window is counted in cache slots, not in positions"
    if getattr(config, "alibi", False) is True:
        return f"{name} has ALiBi biases that are counted in cache slots, not in positions"
    if not takes_positions(type(model).forward):
        return f"{name}.forward takes no position_ids, so siblings of a tree cannot share a position"
    return None


def route(model: PreTrainedModel) -> tuple[Route, str | None]:
    """How a model is decoded.

    A model that no tree can pass may be tested with a few short passes the first time; the verdict is remembered for as
    long as the model lives.

    Returns:
        ``"tree"`` and None; ``"chain"`` (see `runtime.linear`) and why it is not a tree; or ``"plain"``, which
        means that transformers' own loop decodes it, and why it is not a chain either.
    """
    why = no_tree(model)
    if why is None:
        return "tree", None
    if is_seq2seq(model):
        return "plain", why
    error = chain_error(model)
    return ("chain", why) if error is None else ("plain", f"{why}, and {error}")


def verdict(model: PreTrainedModel) -> tuple[Route, str | None]:
    """How a model is decoded, and why not better: the checks of a call, and the self-test with its weights."""
    way, why = route(model)
    try:
        check_model(model)
    except LookaheadError as error:
        return "plain", str(error)
    error_of_trees = tree_error(model) if way == "tree" else None
    return (way, why) if error_of_trees is None else ("plain", error_of_trees)


def check_prompt(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse prompts that no text can follow.

    Raises:
        LookaheadError: an empty prompt, ids outside the vocabulary, right padding, more tokens than positions, or
            position_ids that are not ``[batch, token]``.
    """
    prefix = "decoder_" if is_seq2seq(model) else ""
    embeds = model_kwargs.get(f"{prefix}inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    position_ids = model_kwargs.get(f"{prefix}position_ids")
    prepare = "_prepare_position_ids_for_generation"
    own_axes = getattr(type(model), prepare, None) is not getattr(GenerationMixin, prepare)
    axes = position_ids is not None and position_ids.ndim != 2 and not (own_axes and position_ids.ndim == 3)
    if position_ids is not None and axes and no_tree(model) is None:
        raise LookaheadError(
            f"position_ids of shape {tuple(position_ids.shape)} are not supported: expected [batch, token]. "
            "Drop use_lookahead for this model."
        )
    if length == 0 or input_ids.shape[0] == 0:
        raise LookaheadError(
            f"The prompt is empty: got input_ids of shape {tuple(input_ids.shape)}, expected at least one token. "
            "Start with the model's begin-of-text token."
        )
    vocab = vocabulary(model)
    if input_ids.numel():
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= vocab:
            raise LookaheadError(
                f"Token id {low if low < 0 else high} is outside the vocabulary: expected 0 to {vocab - 1}. "
                "Was the prompt made by another model's tokenizer?"
            )
    mask = model_kwargs.get(f"{prefix}attention_mask")
    if mask is not None and mask.shape[-1] < length:
        raise LookaheadError(
            f"{prefix}attention_mask of shape {tuple(mask.shape)} does not cover the {length} tokens of the prompt: "
            "expected one column for each token."
        )
    if mask is not None and forgets_padding(model) and not bool(mask.all()):
        raise LookaheadError(
            f"{type(model).__name__} forgets decoder_attention_mask after the prompt, and rows then see their padding: "
            "give decoder prompts of one length, or drop use_lookahead."
        )
    if mask is not None and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise LookaheadError(
            f"Row {row} is padded on the right: new tokens follow the last column, so a batch must be padded on the "
            "left. Set tokenizer.padding_side = 'left'."
        )
    table = depth_limit(model)
    reach = length if position_ids is None else int(position_ids.max()) + 1
    if table is not None and table < reach:
        raise LookaheadError(
            f"The prompt reaches position {reach - 1}, and the model's position table ends at {table} "
            "(config.max_position_embeddings). Shorten the prompt."
        )


def depth_limit(model: PreTrainedModel) -> int | None:
    """The first position that does not exist: where a table of learned positions ends. None = there is no table."""
    return None if any(rope_settings(decoder_config(model))) else position_table(model)


def call_obstacle(
    route: Route,
    model: PreTrainedModel,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    cache: Any,
    new_tokens: int,
) -> str | None:
    """Why transformers' own loop decodes this call of a model that has another route; None = it need not.

    Args:
        route: the model's, ``"tree"`` or ``"chain"``.
        model: the model.
        input_ids: the prompt ``[batch, token]``.
        model_kwargs: as ``generate`` prepared them.
        cache: what ``generate`` prepared or the user gave.
        new_tokens: how many tokens will follow at most.
    """
    if route == "tree":
        name = type(model).__name__
        if isinstance(getattr(cache, "self_attention_cache", cache), StaticCache) and _sees_spare_slots(model):
            return f"{name} looks at slots of a static cache that hold no text"
        if model_kwargs.get("use_cache") is False and position_limit(model) is not None and not is_seq2seq(model):
            change = _change_within(model, input_ids, model_kwargs, new_tokens)
            if change is not None:
                return f"{change}, and without a cache each pass recomputes all of it"
        if cache is not None and holds_text(cache) and windows_of_the_cache(model):
            return f"{name} leaves its windows to the cache, and a cache is continued that has dropped tokens"
        if _sees_images(model, model_kwargs, cache):
            return f"{name} keeps what its cross-attention layers know of images in the cache of the text"
        return None  # where a tree's model changes, its passes change too
    return _change_within(model, input_ids, model_kwargs, new_tokens)


def _sees_spare_slots(model: PreTrainedModel) -> bool:
    """Whether transformers' own passes over one token mask nothing in a static cache; no other pass equals them."""
    return any(type(module).__name__ in _UNMASKED for module in model.modules())


def _change_within(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any], new_tokens: int
) -> str | None:
    """Why a causal model's passes change within a text; None = they do not."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    length = max(part.shape[1] for part in (input_ids, embeds, mask) if part is not None)
    last = length - 1 if positions is None else int(positions.max())
    change = boundary(model, length, [last])
    return None if change is None or change[0] >= length + new_tokens else f"{change[1]}, within this text"


def _sees_images(model: PreTrainedModel, model_kwargs: dict[str, Any], cache: Any) -> bool:
    """Whether layers of cross-attention (Mllama's) have anything to attend to in a call."""
    crossing = getattr(decoder_config(model), "cross_attention_layers", None)
    if not crossing or is_seq2seq(model):
        return False
    names = ("pixel_values", "cross_attention_states")
    held = [] if cache is None else [layer for index, layer in enumerate(cache.layers) if index in crossing]
    return any(model_kwargs.get(name) is not None for name in names) or any(
        layer.is_initialized and int(layer.get_seq_length()) > 0 for layer in held
    )


def self_test(model: PreTrainedModel) -> None:
    """Check once per model that it heeds tree masks and positions (:func:`lookahead.support.self_test.tree_error`).

    On a CPU the conformance record answers for transformers' own classes, as long as nobody has changed the model.

    Raises:
        LookaheadError: the branches disturb each other.
    """
    error = None if is_on_record(model) else tree_error(model)
    if error is not None:
        raise LookaheadError(error)

"""By which route a model is decoded, and why not by a better one: each refusal names the culprit and the way out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.conformance import recorded
from lookahead.models.dropout import drops_out
from lookahead.models.families.decoders import own_steps
from lookahead.models.families.registry import overrides_for
from lookahead.models.traits import ModelTraits, tensor_parallel_group
from lookahead.support.caches import check_cache_of_linear, check_cache_of_trees
from lookahead.support.call import change_within, check_prompt, tree_obstacle
from lookahead.support.passes import linear_obstacle
from lookahead.support.self_test import drafts_error, is_judged, is_on_record, linear_error, tree_error

Route = Literal["tree", "chain", "plain"]

_ATTENTION = ("sdpa", "eager", "flex_attention")
_RECURRENT_WORDS = ("linear", "mamba", "conv", "recurrent", "hybrid")


@dataclass(frozen=True, slots=True)
class Plan:
    route: Route  # "chain" = one branch a pass, "plain" = transformers' own loop
    reason: str | None = None  # why it is no tree
    test: Callable[[], str | None] | None = None  # what is wrong with linear drafts, to be found out before the first


def check(model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse a model that cannot be decoded with lookahead, and prompts that no text can follow."""
    check_model(model, traits)
    positions = model_kwargs.get("decoder_position_ids" if traits.is_encoder_decoder else "position_ids")
    tree = positions is not None and positions.ndim != 2 and no_tree(model, traits) is None
    check_prompt(model, traits, input_ids, model_kwargs, tree=tree)


def plan(
    model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Any, room: int
) -> Plan:
    """How a call is decoded that writes up to ``room`` tokens; an error if its cache cannot follow the route."""
    chance = drops_out(model)
    if chance is not None:
        reason = f"{traits.name} is in training mode, where no two passes are alike ({chance}); call model.eval()"
        return Plan("plain", reason)
    found = _route(model, traits, later=isinstance(cache, DynamicCache))
    if found.route == "chain" and traits.is_sharded:
        return Plan("plain", f"{found.reason}; linear drafts are not told to the ranks of a sharded model")
    way, why = found.route, found.reason
    if way == "plain":
        return found
    if way == "chain":
        obstacle = change_within(traits, input_ids, model_kwargs, room)
    else:
        obstacle = tree_obstacle(model, traits, input_ids, model_kwargs, cache, room)
    if obstacle is not None:
        return Plan("plain", obstacle if why is None else f"{why}; {obstacle}")
    if way == "chain":
        check_cache_of_linear(traits, cache, len(input_ids))
    else:
        check_cache_of_trees(traits, cache, len(input_ids), input_ids.shape[1] + room - 1)
    return found


def route(
    model: PreTrainedModel, traits: ModelTraits | None = None, *, tested: bool = False
) -> tuple[Route, str | None]:
    """A model's route, and why it is no tree. One that no tree can pass is tested with linear drafts, once, unless the
    record answers for it; ``tested``: in any case."""
    found = _route(model, traits or ModelTraits.of(model), tested=tested)
    return found.route, found.reason


def _route(model: PreTrainedModel, traits: ModelTraits, *, tested: bool = False, later: bool = False) -> Plan:
    """:func:`route`; the test can be left for ``later``."""
    why = no_tree(model, traits)
    if why is None:
        return Plan("tree")
    if traits.is_encoder_decoder:
        return Plan("plain", why)
    known = not tested and is_on_record(model, traits, "chain")
    if not (known or tested) and is_on_record(model, traits, "plain"):
        return Plan("plain", recorded(model)[0]["reason"])
    error, test = linear_obstacle(model, traits, known), None
    if error is None and not known:
        test = partial(linear_error, model, traits)
        if not later or is_judged(model, traits):
            error, test = test(), None
    return Plan("chain", why, test) if error is None else Plan("plain", f"{why}, and {error}")


def verdict(model: PreTrainedModel) -> tuple[Route, str | None]:
    """How a model is decoded, and why not better: the checks of a call, and the self-test with its weights."""
    traits = ModelTraits.of(model)
    way, why = route(model, traits, tested=True)
    try:
        check_model(model, traits)
        error_of_trees = tree_error(model, traits) if way == "tree" else None
    except LookaheadError as error:
        return "plain", str(error)
    return (way, why) if error_of_trees is None else ("plain", error_of_trees)


def check_model(model: PreTrainedModel, traits: ModelTraits | None = None, attention: str | None = None) -> None:
    """Refuse a sharded model, one with a decoding loop of its own, and ``attention`` (None = its own) without masks."""
    traits = traits or ModelTraits.of(model)
    if traits.own_loop is not None:
        raise LookaheadError(
            f"{traits.name} writes in a decoding loop of its own ({traits.own_loop}._sample), and lookahead cannot "
            "take its place. Drop use_lookahead for this model."
        )
    if traits.is_sharded and tensor_parallel_group(model) is None:
        raise LookaheadError(
            f"{traits.name} is sharded over several processes (tensor parallelism), but they cannot be told trees: "
            "expected torch.distributed to be initialised, as torchrun and from_pretrained(tp_plan='auto') leave it. "
            "Load it without tp_plan and distributed_config, or drop use_lookahead."
        )
    attention = attention or traits.attention
    if attention not in _ATTENTION and no_tree(model, traits) is None:
        raise LookaheadError(
            f"Attention implementation {attention!r} takes no custom mask: expected one of {', '.join(_ATTENTION)}. "
            "Decode with Lookahead(attention='sdpa'), which switches for the call, call "
            "model.set_attn_implementation('sdpa') first, or drop use_lookahead."
        )


def no_tree(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why a model cannot follow a tree, as far as its class and config tell; None = nothing speaks against it."""
    name, config = traits.name, traits.config
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT_WORDS))
    # Some hybrid classes can be configured without a recurrent layer; then the class flag says nothing.
    only_attention = bool(kinds) and all("attention" in kind for kind in kinds)
    if recurrent or (traits.is_stateful and not only_attention):
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "recurrent layers"
        return f"{name} has {what}, and a recurrent state cannot follow a tree"
    if traits.is_encoder_decoder:
        return own_steps(model)
    if traits.counts_slots and overrides_for(model):
        return None
    if any("local" in str(kind) for kind in getattr(config, "attention_layers", None) or ()):
        return f"{name} has local attention layers whose window is counted in cache slots, not in positions"
    if getattr(config, "alibi", False) is True:
        return f"{name} has ALiBi biases that are counted in cache slots, not in positions"
    if not traits.takes_positions:
        return f"{name}.forward takes no position_ids, so siblings of a tree cannot share a position"
    return None


def self_test(model: PreTrainedModel, traits: ModelTraits | None = None, *, drafts: bool = False) -> None:
    """Raise a LookaheadError if a model does not keep branches apart; tested once, unless the record answers for it.
    Of one that only ``drafts`` it is not asked that it rounds alike in all passes."""
    traits = traits or ModelTraits.of(model)
    error = None if is_on_record(model, traits) else (drafts_error if drafts else tree_error)(model, traits)
    if error is not None:
        raise LookaheadError(error)

"""By which route a model is decoded, and why not by a better one: each refusal names the culprit and the way out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationMixin, PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.code_safety import replaced_step
from lookahead.models.conformance import recorded
from lookahead.models.families.decoders import own_steps
from lookahead.models.families.registry import overrides_for
from lookahead.models.families.scans import scanned_layers, unscanned
from lookahead.models.names import CACHE, CACHES, STATE
from lookahead.models.traits import ModelTraits, parameters, tensor_parallel_group
from lookahead.support.call import (
    change_within,
    check_cache_of_linear,
    check_cache_of_trees,
    check_prompt,
    tree_obstacle,
)
from lookahead.support.self_test import is_on_record, layers_error, linear_error, linear_obstacle, tree_error

Route = Literal["tree", "chain", "plain"]

_ATTENTION = ("sdpa", "eager", "flex_attention")
_SWITCH = (
    "decode with Lookahead(attention='sdpa'), which switches for the call, or call "
    "model.set_attn_implementation('sdpa') first"
)
_RECURRENT_WORDS = ("linear", "mamba", "conv", "recurrent", "hybrid")
_WORDS = ("drop", "jitter")  # in names of rates: attention_dropout, attn_pdrop, drop_prob, layerdrop, jitter_noise
_OF_CONFIGS = ("dropout", "attention_dropout", "hidden_dropout")  # which layers read there


@dataclass(frozen=True, slots=True)
class Routed:
    """By which route a model is decoded."""

    route: Route  # "chain" = one branch a pass, "plain" = transformers' own loop
    reason: str | None = None  # why it is no tree


def check(model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse a model that cannot be decoded with lookahead, and prompts that no text can follow."""
    check_model(model, traits)
    positions = model_kwargs.get("decoder_position_ids" if traits.is_encoder_decoder else "position_ids")
    tree = positions is not None and positions.ndim != 2 and no_tree(model, traits) is None
    check_prompt(model, traits, input_ids, model_kwargs, tree=tree)


def plan(
    model: PreTrainedModel, traits: ModelTraits, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Any, room: int
) -> Routed:
    """Route of a call that writes up to ``room`` tokens; an error if its cache cannot follow the route."""
    unlike = training_obstacle(model)
    if unlike is not None:
        return Routed("plain", f"{traits.name} {unlike}")
    found = _route(model, traits)
    if found.route == "chain" and traits.is_sharded:
        return Routed("plain", f"{found.reason}; linear drafts are not told to the ranks of a sharded model")
    way, why = found.route, found.reason
    if way == "plain":
        return found
    if way == "chain":
        obstacle = change_within(traits, input_ids, model_kwargs, room)
    else:
        obstacle = tree_obstacle(model, traits, input_ids, model_kwargs, cache, room)
    if obstacle is not None:
        return Routed("plain", obstacle if why is None else f"{why}; {obstacle}")
    if way == "chain" or scanned_layers(model, traits.config):
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


def _route(model: PreTrainedModel, traits: ModelTraits, *, tested: bool = False) -> Routed:
    step = replaced_step(model)
    if step is not None:
        return Routed("plain", f"{traits.name}.{step} was replaced, and only plain passes are sure to follow it")
    if traits.attention == "flex_attention" and traits.device.type == "cpu":
        return Routed("plain", f"on a CPU flex_attention compiles a kernel for every shape of a tree; {_SWITCH}")
    why = no_tree(model, traits) or _lost_states(model, traits)
    if why is None:
        return Routed("tree")
    if traits.is_encoder_decoder:
        return Routed("plain", why)
    known = not tested and is_on_record(model, traits, "chain")
    if not (known or tested) and is_on_record(model, traits, "plain"):
        return Routed("plain", recorded(model)[0]["reason"])
    error = linear_obstacle(model, traits, known) or (None if known else linear_error(model, traits))
    return Routed("chain", why) if error is None else Routed("plain", f"{why}, and {error}")


def _lost_states(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why the states of a model do not follow a tree, by its self-test; None = they do, or there are none."""
    if not scanned_layers(model, traits.config) or is_on_record(model, traits) or tree_error(model, traits) is None:
        return None
    return f"{traits.name} has recurrent layers, and by its self-test a recurrent state cannot follow a tree"


def verdict(model: PreTrainedModel) -> tuple[Route, str | None]:
    """Route of a model, and why it is no better one: the checks of a call, and the self-test with its weights."""
    traits = ModelTraits.of(model)
    way, why = route(model, traits, tested=True)
    try:
        check_model(model, traits)
        error_of_trees = (layers_error(model, traits) or tree_error(model, traits)) if way == "tree" else None
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
    kind, taken = type(model), parameters(type(model).forward) & CACHES
    prepares = GenerationMixin.prepare_inputs_for_generation
    if taken and not taken & {CACHE, STATE} and getattr(kind, "prepare_inputs_for_generation", prepares) is prepares:
        raise LookaheadError(
            f"{traits.name}.forward takes its KV cache as {', '.join(sorted(taken))}, but transformers "
            f"{transformers.__version__} gives it as {CACHE}: even plain generate writes each token without what came "
            f"before it. Rename the parameter to {CACHE}."
        )
    attention = attention or traits.attention
    if attention not in _ATTENTION and no_tree(model, traits) is None:
        raise LookaheadError(
            f"Attention implementation {attention!r} takes no custom mask: expected one of {', '.join(_ATTENTION)}. "
            f"{_SWITCH[0].upper()}{_SWITCH[1:]}, or drop use_lookahead."
        )


def no_tree(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why a model cannot follow a tree, as far as its class and config tell; None = nothing speaks against it."""
    name, config = traits.name, traits.config
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT_WORDS))
    # Some hybrid classes can be configured without a recurrent layer; then the class flag says nothing.
    only_attention = bool(kinds) and all("attention" in kind for kind in kinds)
    if recurrent or (traits.is_stateful and not only_attention):
        why = unscanned(model, traits)
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "recurrent layers"
        return None if why is None else f"{name} has {what}, and {why}"
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


def self_test(model: PreTrainedModel, traits: ModelTraits | None = None, *, drafts: bool = False) -> str | None:
    """Why a model is left to plain decoding after all: a pass changes the number of its cache's layers; None = it is
    not. Tested once, as is whether it keeps branches apart, unless the record answers for it.

    Args:
        drafts: it only drafts, and need not round alike in all passes.

    Raises:
        LookaheadError: it does not keep branches apart.
    """
    traits = traits or ModelTraits.of(model)
    if is_on_record(model, traits):
        return None
    changed = layers_error(model, traits)
    error = None if changed is not None else tree_error(model, traits, drafts)
    if error is not None:
        raise LookaheadError(error)
    return changed


def training_obstacle(model: PreTrainedModel) -> str | None:
    """Why passes of a model in training mode cannot be drafted for; None = they can, or it is not in that mode."""
    training = [module for module in model.modules() if module.training]
    if any(vars(module).get("gradient_checkpointing") for module in training):
        return "checkpoints gradients in training mode, where layers keep no KV cache; call model.eval()"
    chance = next((found for module in training for found in _chances(module)), None)
    if chance is not None:
        return f"is in training mode, where no two passes are alike ({chance}); call model.eval()"
    return None


def _chances(module: nn.Module) -> Iterator[str]:
    name, own = type(module).__name__, vars(module)
    if isinstance(module, _DropoutNd) and module.p > 0:
        yield f"{name}(p={module.p})"
    rates = (each for each in own if any(word in each for word in _WORDS))
    yield from (f"{rate} of {name}" for rate in _rates(own, rates))
    if (config := own.get("config")) is not None:
        yield from (f"{rate} of {name}'s config" for rate in _rates(vars(config), _OF_CONFIGS))


def _rates(values: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield f"{name}={value}"

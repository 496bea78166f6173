"""Which overrides a model needs: a row for every kind of module that counts positions by itself.

A new family is a row here: how its module is recognised, which attribute counts, and a stand-in that reads the pass's
positions in its place, in a module beside this one. ``tests/models/test_overrides.py`` shows how to test it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lookahead.models.families import decoders, slot_counters
from lookahead.models.families.overrides import Override, file_of
from lookahead.models.names import CACHE_LENGTH
from lookahead.models.traits import parameters


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of module."""

    models: str  # that have it, and their kin; for readers
    attribute: str  # what counts: a method, or a value
    stand_in: Callable[[Any, Any], Any]  # takes its place: stand_in(module or file, original)
    matches: Callable[[str, Any], bool]  # whether a module, given its name and itself, is of this kind
    in_file: bool = False  # the attribute is a function of the file that defines the module's class


def _defines(attribute: str) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: hasattr(type(module), attribute)


def _is_falcon_with_alibi(_: str, module: Any) -> bool:
    return vars(module).get("use_alibi") is True and hasattr(file_of(module), "build_alibi_tensor")


def _is_gpt_neo(_: str, module: nn.Module) -> bool:
    return type(module).__name__ == "GPTNeoSelfAttention" and "bias" in module._buffers


def _is_llama4_without_rope(_: str, module: Any) -> bool:
    settings = vars(module)  # much faster to ask than a module whose attribute is missing
    return bool(settings.get("attn_temperature_tuning")) and not settings.get("use_rope", True)


def _embeds_positions(name: str, module: nn.Module) -> bool:
    return name.endswith("embed_positions") and CACHE_LENGTH in parameters(type(module).forward)


def _biases_distances(_: str, module: Any) -> bool:
    counted = {"query_length", "key_length", "past_seen_tokens"}
    biased = bool(vars(module).get("has_relative_attention_bias"))
    return biased and counted <= parameters(type(module).compute_bias)


def _has_capacity(_: str, module: Any) -> bool:
    return isinstance(vars(module).get("expert_capacity"), int)


_COUNT = "create_position_ids_from_input_ids"
FAMILIES = (
    Family("BLOOM", "build_alibi_tensor", slot_counters.alibi_by_tokens, _defines("build_alibi_tensor")),
    Family("MPT", "build_mpt_alibi_tensor", slot_counters.alibi_by_slots, _defines("build_mpt_alibi_tensor")),
    Family("Falcon", "build_alibi_tensor", slot_counters.alibi_by_tokens, _is_falcon_with_alibi, in_file=True),
    Family("GPT-Neo", "bias", slot_counters.WindowTable, _is_gpt_neo),
    Family("Llama 4", "attn_scale", slot_counters.ScaleFactor, _is_llama4_without_rope),
    Family("BART, Marian, M2M100, Whisper", "forward", decoders.position_embeddings, _embeds_positions),
    Family("T5", "compute_bias", decoders.relative_biases, _biases_distances),
    Family("RoBERTa", _COUNT, decoders.position_ids, _defines(_COUNT)),
    Family("NLLB-MoE", "forward", decoders.expert_router, _has_capacity),
)


def overrides_for(model: nn.Module) -> list[Override]:
    """Overrides for every pass over a causal model whose traits say that it counts slots by itself, or over an
    encoder-decoder's decoder: of each module, by the first row that it matches."""
    found: list[Override] = []
    for name, module in model.named_modules():
        family = next((family for family in FAMILIES if family.matches(name, module)), None)
        if family is not None:
            owner = file_of(module) if family.in_file else module
            found.append(Override(owner, family.attribute, family.stand_in))
    return found

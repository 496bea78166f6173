"""What the library relies on inside transformers, beyond what is documented: checked by name and parameters, once.

A change in one of these would show as an odd failure in the middle of a call, or not at all.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import transformers

from jacobi import LookaheadError

SUPPORTED = "a version from 5.20 up, below 6"


@dataclass(frozen=True, slots=True)
class Private:
    """One thing that is relied on.

    Attributes:
        home: module of transformers, without ``transformers.``.
        path: name in it, with dots.
        passed: parameters that are given by position, in this order, after ``self``.
        named: parameters that are given by name.
    """

    home: str
    path: str
    passed: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


_MIXIN = "generation.utils"
PRIVATES = (
    Private(
        _MIXIN,
        "GenerationMixin._sample",
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        ("synced_gpus", "streamer"),
    ),
    Private(
        _MIXIN,
        "GenerationMixin._validate_generation_mode",
        ("generation_mode", "generation_config", "generation_mode_kwargs"),
    ),
    Private(_MIXIN, "GenerationMixin._prefill", ("input_ids", "generation_config", "model_kwargs")),
    Private(
        _MIXIN,
        "GenerationMixin._update_model_kwargs_for_generation",
        ("outputs", "model_kwargs"),
        ("is_encoder_decoder", "num_new_tokens"),
    ),
    Private(
        _MIXIN,
        "GenerationMixin.prepare_inputs_for_generation",
        ("input_ids",),
        ("next_sequence_length", "past_key_values", "attention_mask"),
    ),
    Private(
        "masking_utils",
        "create_masks_for_generate",
        (),
        ("config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"),
    ),
    Private("masking_utils", "AttentionMaskInterface._global_mapping"),
    Private("modeling_utils", "AttentionInterface._global_mapping"),
    Private("configuration_utils", "PreTrainedConfig._attn_implementation"),
    Private("cache_utils", "DynamicLayer.update", ("key_states", "value_states")),
    Private("cache_utils", "DynamicLayer.lazy_initialization", ("key_states", "value_states")),
    Private("cache_utils", "DynamicLayer.get_mask_sizes", ("query_length",)),
    Private("cache_utils", "DynamicLayer.get_seq_length"),
    Private("cache_utils", "DynamicSlidingWindowLayer.update", ("key_states", "value_states")),
    Private("cache_utils", "Cache.update", ("key_states", "value_states", "layer_idx")),
    Private("cache_utils", "Cache.get_mask_sizes", ("query_length", "layer_idx")),
    Private("cache_utils", "Cache.crop", ("tokens_to_remove",)),
    Private("cache_utils", "Cache.activate_past_recording"),
    Private("cache_utils", "StaticLayer.update", ("key_states", "value_states")),
)


def check_privates() -> None:
    """Refuse a transformers that does not have what is relied on.

    Raises:
        LookaheadError: something is missing, or is called in another way; it is named.
    """
    for private in PRIVATES:
        error = _error(private)
        if error is not None:
            raise LookaheadError(
                f"This transformers ({transformers.__version__}) has {error}: expected {SUPPORTED}. Install one, or "
                "decode without use_lookahead."
            )


def _error(private: Private) -> str | None:
    found: Any = importlib.import_module(f"transformers.{private.home}")
    for part in private.path.split("."):
        if not hasattr(found, part):
            return f"no {private.path}"
        found = getattr(found, part)
    if not (private.passed or private.named):
        return None
    signature = inspect.signature(found)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) and not private.passed
    missing = [name for name in private.named if name not in parameters and not open_ended]
    if missing or tuple(parameters[: len(private.passed)]) != private.passed:
        wanted = ", ".join((*private.passed, *(f"{name}=" for name in private.named)))
        return f"another {private.path}, whose parameters are ({', '.join(parameters)}), where ({wanted}) are passed"
    return None

"""A decoder of one layer, of a model's own class, from a checkpoint's tensors: attention, experts, norms and RoPE are
then the model's own code, whatever its family."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.models.traits import ModelTraits, decoder_config

_FIRST = "layers.0."
_PREFERRED = ("full_attention", "hybrid")


class OneLayer(NamedTuple):
    """A decoder, and what was wrong with the tensors: names of those that it lacks, that it has no use for, and those
    of another shape ``(name, shape, expected shape)``."""

    decoder: PreTrainedModel
    missing: list[str]
    foreign: list[str]
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def one_layer(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], norm: Tensor, index: int, dtype: torch.dtype
) -> OneLayer:
    """The decoder of ``model`` with one layer of ``tensors``, named as its family's checkpoints name a layer's, and
    ``norm`` for its final one. ``index`` counts MTP layers, of which configs may give the types."""
    kind, config = type(model.get_decoder()), _one_layer_config(model, tensors, index)
    stored = {_FIRST + name: tensor for name, tensor in tensors.items()}
    stored |= {"norm.weight": norm, "embed_tokens.weight": norm.new_zeros((1, len(norm)))}
    eager = ModelTraits.of(model).attention == "eager" or not kind._supports_sdpa
    how = {"attn_implementation": "eager" if eager else "sdpa"}  # kernels that take masks
    if (experts := getattr(decoder_config(model), "_experts_implementation", None)) is not None:
        how["experts_implementation"] = experts
    decoder, told = kind.from_pretrained(
        None,
        config=config,
        state_dict=stored,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **how,
    )
    missing, foreign = (
        sorted(name.removeprefix(_FIRST) for name in told[f"{which}_keys"] if name.startswith(_FIRST))
        for which in ("missing", "unexpected")
    )
    shapes = [(name.removeprefix(_FIRST), tuple(got), tuple(wanted)) for name, got, wanted in told["mismatched_keys"]]
    return OneLayer(decoder, missing, foreign, sorted(shapes))


def _one_layer_config(model: PreTrainedModel, tensors: Mapping[str, Tensor], index: int) -> Any:
    """The decoder's config for one layer, dense or of experts as the tensors say, and of the type that fits them."""
    config = copy.deepcopy(decoder_config(model))
    sparse = any(".experts." in f".{name}" for name in tensors)
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "pad_token_id": None,
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "per_layer_config": None,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return config
    told = getattr(config, "mtp_layer_types", None) or []
    given = [told[index]] if index < len(told) else []
    known = dict.fromkeys([*given, *(kind for kind in _PREFERRED if kind in kinds), *kinds])
    found = [kind for kind in known if _fits(type(model.get_decoder()), config, kind, tensors)]
    config.layer_types = [(found or list(known))[0]]
    return config


def _fits(decoder: type, config: Any, kind: str, tensors: Mapping[str, Tensor]) -> bool:
    """True if attention of a layer of this type has the shapes of ``tensors``."""
    config.layer_types = [kind]
    with torch.device("meta"):
        expected = decoder(copy.deepcopy(config)).state_dict()
    own, given = (
        {name: tensor.shape for name, tensor in held.items() if name.startswith(_FIRST + "self_attn.")}
        for held in (expected, {_FIRST + name: tensor for name, tensor in tensors.items()})
    )
    return own == given

"""Heads from files and to files, in SafeAILab's format of EAGLE-1, -2 and -3, and in that of speculators."""

import re
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor

from jacobi import LookaheadError
from lookahead._version import __version__
from lookahead.heads.eagle.network import EagleNetwork, EagleSizes
from lookahead.heads.eagle.sizes import FIRST, sizes_of
from lookahead.heads.storage import fill, offsets_of, read_head, write_head
from lookahead.models.compat import MODEL_ERRORS

_LAYER, _FUSION = re.compile(r"^(?:midlayer|transformer)\."), re.compile(r"^fusion_fc\.")
_NOT_READ = re.compile(r"(?:^|\.)(?:verifier_|rotary_emb\.|mask_token|lm_head\.bias)")
Format = Literal["safeailab", "speculators"]
FORMATS: tuple[Format, ...] = ("safeailab", "speculators")
_SPECULATED = 5  # tokens that speculators' default proposal drafts


def read(
    source: str | PathLike[str], hub: Mapping[str, Any], channels: int | None, features: int | None
) -> EagleNetwork:
    """The head that ``source`` holds, as :func:`.sizes_of` tells it: a folder, a file in it, or a repository of the
    hub. A LookaheadError names what is missing or foreign; no code from a file is run."""
    stored, config = read_head(source, hub, "EAGLE head", _NOT_READ)
    names = {each: _FUSION.sub("fc.", _LAYER.sub(FIRST, each.removeprefix("model."))) for each in stored}
    tensors, name = {names[each]: tensor for each, tensor in stored.items()}, str(source)
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    sizes = sizes_of(tensors, config, name, channels, features)
    offsets = offsets_of(offsets, mask, sizes.draft_vocab_size, name)
    if offsets is not None and sizes.draft_vocab_size is None:  # it takes these rows of the model's output layer
        sizes = replace(sizes, draft_vocab_size=len(offsets))
    sizes = replace(sizes, vocab_size=_vocabulary(sizes, mask, offsets))
    try:
        with torch.device("meta"):
            network = EagleNetwork(sizes)
    except MODEL_ERRORS as error:
        raise LookaheadError(
            f"{source}: RoPE cannot be as config.json says, {sizes.rope}: {error!r}. Mend it."
        ) from error
    if sizes.feature_norms == "all":
        tensors["fc_norm.0.weight"] = tensors.pop("input_norm.weight")
    fill(network, tensors, name, f"head of EAGLE-{sizes.version}")
    network.rotary = type(network.rotary)(network.rotary.config)  # its table is in no file
    network.d2t = offsets
    return network


def _vocabulary(sizes: EagleSizes, mask: Tensor | None, offsets: Tensor | None) -> int | None:
    """How many tokens the head's model has. The config is asked last, and not believed against the tensors."""
    if mask is not None:
        return len(mask)
    if offsets is None:
        return sizes.draft_vocab_size or sizes.own_embeddings or sizes.vocab_size
    most = int((offsets + torch.arange(len(offsets))).max())
    return sizes.vocab_size if sizes.vocab_size is None or sizes.vocab_size > most else None


def write(network: EagleNetwork, folder: str | PathLike[str], form: Format, bits: int = 16) -> None:
    """Write a head in a format, beside what else is in a folder."""
    tensors = {_named(name, form, network.sizes): tensor for name, tensor in network.state_dict().items()}
    if network.d2t is not None:
        ids, vocab = network.scored().cpu(), network.sizes.vocab_size
        if vocab is None or int(ids.max()) >= vocab:
            raise LookaheadError(
                f"The head scores {len(ids)} tokens up to {int(ids.max())} of a vocabulary of "
                f"{vocab or 'unknown size'}, and both formats say of every token whether it does. Read the head with "
                "model=."
            )
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter(0, ids, True)  # which tokens the head scores
    config = (_safeailab if form == "safeailab" else _speculators)(network.sizes)
    config["torch_dtype"] = str(network.fc.weight.dtype).removeprefix("torch.")
    write_head(folder, tensors, config, bits)


def _named(name: str, form: Format, sizes: EagleSizes) -> str:
    """The name of one of the network's tensors in a format."""
    if sizes.feature_norms == "all" and name == "fc_norm.0.weight":
        return "input_norm.weight"
    if sizes.version == 3:
        return name.replace(FIRST, "midlayer.") if form == "safeailab" else name
    return name if form == "safeailab" else name.replace(FIRST, "transformer.").replace("fc.", "fusion_fc.")


def _layer(sizes: EagleSizes) -> dict[str, Any]:
    """What both formats say of the draft layer, as a config of Llama or Qwen3."""
    rope = dict(sizes.rope)
    theta, kind = rope.pop("rope_theta", 10000.0), rope.pop("rope_type", "default")
    return {
        "model_type": "qwen3" if sizes.query_key_norm else "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "num_hidden_layers": sizes.layers,
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "attention_bias": sizes.attention_bias,
        "rms_norm_eps": sizes.eps,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "max_position_embeddings": sizes.max_positions,
        "vocab_size": sizes.vocab_size,
    }


def _variants(sizes: EagleSizes) -> dict[str, Any]:
    return {
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": sizes.feature_norms == "all",
        "fc_norm": sizes.feature_norms == "each",
        "norm_output": sizes.norm_output,
        "target_hidden_size": sizes.target_size,
    }


def _safeailab(sizes: EagleSizes) -> dict[str, Any]:
    config = _layer(sizes) | {"base_model_name_or_path": sizes.base_model}
    if sizes.version != 3:
        return config | {"architectures": ["LlamaForCausalLM"], "bias": sizes.fusion_bias}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": sizes.draft_vocab_size or sizes.vocab_size,
    }
    config |= {name: value for name, value in _variants(sizes).items() if value}
    if sizes.feature_layers:
        ids = list(sizes.feature_layers)
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return config


def _speculators(sizes: EagleSizes) -> dict[str, Any]:
    three = sizes.version == 3
    proposal = {"proposal_type": "greedy", "speculative_tokens": _SPECULATED, "verifier_accept_k": 1}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if three else "EagleSpeculator"],
        "speculators_model_type": "eagle3" if three else "eagle",
        "speculators_version": f"lookahead {__version__}",
        "speculators_config": {
            "algorithm": "eagle3" if three else "eagle",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": sizes.base_model, "architectures": []},
        },
        "transformer_layer_config": _layer(sizes),
    }
    if not three:
        return config | {"fusion_bias": sizes.fusion_bias, "layernorms": False}
    ids = list(sizes.feature_layers) or None
    config |= {"draft_vocab_size": sizes.draft_vocab_size or sizes.vocab_size, "embed_requires_grad": False}
    return config | _variants(sizes) | {"eagle_aux_hidden_state_layer_ids": ids}

"""Heads to files, in SafeAILab's format or in that of speculators; ``reading`` reads both."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from jacobi import LookaheadError
from lookahead._version import __version__
from lookahead.sources.eagle.network import EagleNetwork, EagleSizes

Format = Literal["safeailab", "speculators"]
FORMATS: tuple[Format, ...] = ("safeailab", "speculators")

_SPECULATED = 5  # tokens that speculators' default proposal drafts


def write(network: EagleNetwork, folder: Path, form: Format) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder that is there."""
    tensors = {_named(name, form, network.sizes): tensor for name, tensor in network.state_dict().items()}
    if network.d2t is not None:
        tensors["t2d"] = _mask(network)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config = (_safeailab if form == "safeailab" else _speculators)(network.sizes)
    config["torch_dtype"] = str(network.fc.weight.dtype).removeprefix("torch.")
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _named(name: str, form: Format, sizes: EagleSizes) -> str:
    """The name of one of the network's tensors in a format."""
    if sizes.feature_norms == "all" and name == "fc_norm.0.weight":
        return "input_norm.weight"
    if sizes.version == 3:
        return name.replace("layers.0.", "midlayer.") if form == "safeailab" else name
    if form == "safeailab":
        return name
    return (
        name.replace("layers.0.", "transformer.") if name.startswith("layers.0.") else name.replace("fc.", "fusion_fc.")
    )


def _mask(network: EagleNetwork) -> Tensor:
    """Which of the model's tokens the head scores, bool ``[vocab]``."""
    assert network.d2t is not None
    ids = network.d2t.cpu() + torch.arange(len(network.d2t))
    vocab = network.sizes.vocab_size
    if vocab is None or int(ids.max()) >= vocab:
        raise LookaheadError(
            f"The head scores {len(ids)} tokens up to {int(ids.max())} of a vocabulary of {vocab or 'unknown size'}, "
            "and both formats say of every token whether it does. Read the head with model=."
        )
    return torch.zeros(vocab, dtype=torch.bool).scatter(0, ids, True)


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

"""Random EAGLE heads for tiny models, and their files."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers.models import VOCAB
from safetensors.torch import save_file
from torch import Tensor

from lookahead.heads.eagle.network import EagleNetwork, EagleSizes

BASE = {"hidden_size": 32, "target_size": 32, "heads": 4, "key_heads": 2, "head_size": 8, "feed_forward": 48}


def random_network(version: int, seed: int = 0, **changes: Any) -> EagleNetwork:
    """A random head in float64; EAGLE-3's scores all tokens, or of a small vocabulary every second one."""
    sizes: dict[str, Any] = BASE | {"version": version, "features": 3 if version == 3 else 1}
    if version == 3:
        sizes |= {"draft_vocab_size": VOCAB, "own_output": True, "final_norm": True, "vocab_size": VOCAB}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = EagleNetwork(EagleSizes(**sizes | changes)).double()
        with torch.no_grad():
            for weight in network.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
    scored = network.sizes.draft_vocab_size or VOCAB
    if 2 * scored <= VOCAB:
        network.d2t = torch.arange(scored)
    return network.eval()


def tensors_of(network: EagleNetwork) -> dict[str, Tensor]:
    """Its tensors under the names of SafeAILab's files."""
    first = "midlayer." if network.sizes.version == 3 else "layers.0."
    return {name.replace("layers.0.", first): tensor.contiguous() for name, tensor in network.state_dict().items()}


def write_head(folder: Path, network: EagleNetwork, *, binary: bool = False, speculators: bool = False) -> Path:
    """Write a folder as SafeAILab or speculators publish it."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes, tensors = network.sizes, tensors_of(network)
    layer: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "head_dim": sizes.head_size,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope["rope_theta"],
    }
    config = layer | {"draft_vocab_size": sizes.draft_vocab_size}
    if sizes.feature_layers:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(sizes.feature_layers)}
    if speculators:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": sizes.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(sizes.feature_layers) or None,
            "speculators_config": {"verifier": {"name_or_path": "some/model"}},
        }
    if sizes.version == 3:
        ids = torch.arange(sizes.draft_vocab_size or VOCAB) if network.d2t is None else network.scored()
        tensors["t2d"] = torch.zeros(max(VOCAB, len(ids)), dtype=torch.bool).scatter(0, ids, True)
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Random block drafters for tiny models, and their files in each layout."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers.models import VOCAB
from safetensors.torch import save_file
from torch import Tensor

from lookahead.heads.block.network import BlockNetwork, BlockSizes

OUTPUT_LINES = "lines of the model's output"
BASE: dict[str, Any] = {"hidden_size": 32, "target_size": 32, "feature_layers": (1, 3), "block_size": 4}
BASE |= {"anchor_first": True, "mask_token": 47, "heads": 4, "key_heads": 2, "head_size": 8, "feed_forward": 48}
BASE |= {"sights": ((None, False), (3, True)), "vocab_size": VOCAB}
MARKOV: dict[str, Any] = {"rank": 6, "confidence": 38}
OWN: dict[str, Any] = MARKOV | {"markov": "vanilla", "own_embeddings": VOCAB, "own_output": True}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"anchor_first": False},
    "anchor first": {"sights": ((None, False), (None, False))},
    "jetspec": {"anchor_first": False, "sights": ((None, True), (None, True))},
    "vanilla": OWN | {"draft_vocab_size": VOCAB},
    "gated": MARKOV | {"markov": "gated", "confidence": 32},
    "rnn": MARKOV | {"markov": "rnn", "sights": ((3, False), (3, False)), "softcap": 5.0, "input_scale": 0.7},
    "small vocabulary": OWN | {"draft_vocab_size": 20},
    OUTPUT_LINES: MARKOV | {"markov": "vanilla", "draft_vocab_size": 20},
}


def random_network(kind: str, seed: int = 0, **changes: Any) -> BlockNetwork:
    """A random drafter in float64; of a small vocabulary it scores every second token."""
    sizes = BlockSizes(**BASE | KINDS[kind] | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = BlockNetwork(sizes, VOCAB).double()
        with torch.no_grad():
            for weight in network.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
    if sizes.draft_vocab_size == 20:
        network.d2t = torch.arange(20)
    return network.eval()


def depth_of(network: BlockNetwork) -> int:
    """Tokens that a block drafts."""
    return network.sizes.block_size - (not network.sizes.anchor_first)


def layer_config(sizes: BlockSizes) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "qwen3", "hidden_size": sizes.hidden_size, "rms_norm_eps": sizes.eps}
    config |= {"rope_theta": 10000.0, "vocab_size": VOCAB}
    config["layer_types"] = ["sliding_attention" if window else "full_attention" for window, _ in sizes.sights]
    return config | {"sliding_window": next((window for window, _ in sizes.sights if window), None)}


def write_head(folder: Path, network: BlockNetwork, layout: str, **changes: Any) -> Path:
    """Write a folder as z-lab, DeepSpec, SpecForge or speculators publish it; of ``changes``, tensors have dots for
    ``__``, and what is None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes, tensors = network.sizes, dict(network.state_dict())
    ids = list(sizes.feature_layers)
    lower, config = [index - 1 for index in ids], layer_config(sizes)
    more = {"block_size": sizes.block_size, "mask_token_id": sizes.mask_token}
    more |= {"final_logit_softcapping": sizes.softcap, "input_embedding_scale": sizes.input_scale}
    if layout == "z-lab":
        causal = all(causal for _, causal in sizes.sights)
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": more | {"target_layer_ids": lower}}
        config["dflash_config"]["causal_head"] = causal or None
    elif layout == "specforge":
        tensors = {f"logit_head.{name}" if "head" in name else name: each for name, each in tensors.items()}
        config["dflash_config"] = more | {"target_layer_ids": lower, "projector_type": "dspark"}
    elif layout == "deepspec":
        config |= more | {"target_layer_ids": lower, "markov_rank": sizes.rank, "markov_head_type": sizes.markov}
        config |= {"is_causal": False} if sizes.sights == ((3, False),) * 2 else {}
    else:
        config = more | {"speculators_model_type": "dspark" if sizes.markov else "dflash"}
        config |= {"transformer_layer_config": layer_config(sizes), "aux_hidden_state_layer_ids": ids}
        methods = {"proposal_methods": [{"speculative_tokens": depth_of(network)}]}
        config["speculators_config"] = methods | {"verifier": {"name_or_path": "some/model"}}
        config["sliding_window_non_causal"] = sizes.sights == ((3, False),) * 2
        if network.d2t is not None:
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, network.scored(), True)
    for name, value in changes.items():
        (tensors if isinstance(value, Tensor) or "__" in name else config).pop(name.replace("__", "."), None)
        if value is not None:
            (tensors if isinstance(value, Tensor) else config)[name.replace("__", ".")] = value
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder

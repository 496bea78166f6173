"""Tiny models of every recurrent and hybrid family, and how each is decoded."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from helpers.models import F32, SIZES, VOCAB, initialised, judged
from transformers import CONFIG_MAPPING, Cache

_DENSE = SIZES | {"hidden_size": 48}
_MOE = {name: value for name, value in _DENSE.items() if name != "intermediate_size"}
_OF_ATTENTION = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_SIZES = {name: value for name, value in _MOE.items() if name not in _OF_ATTENTION}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_DELTA = _MIXED | {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 16}
_LATENT = _MIXED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_INKLING = {
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "sliding_window_size": 6,
    "rel_extent": 64,
    "d_rel": 4,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4}

# Fields of configs. A state is restored and tokens are fed again, or (convolutions only) the cache is cropped.
CHAIN: dict[str, dict[str, Any]] = {
    "qwen3_next": _DENSE | _DELTA | _SHARED,
    "qwen3_5": _DENSE | _DELTA,
    "qwen3_5_moe": _MOE | _DELTA | _SHARED,
    "olmo_hybrid": _DENSE
    | _MIXED
    | {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    | {f"linear_{part}_head_dim": 8 for part in ("key", "value")},
    "kimi_linear": _DENSE | _LATENT | _LOCAL_EXPERTS | {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": _DENSE | _LATENT | _LOCAL_EXPERTS | {"head_dim": 8},
    "falcon_h1": _DENSE | _MAMBA2 | {"mamba_d_ssm": 96},
    "granitemoehybrid": _DENSE
    | _MAMBA2
    | _LOCAL_EXPERTS
    | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "bamba": _DENSE | _MAMBA2 | {"attn_layer_indices": [1]},
    "mamba2": _SIZES | {"state_size": 8, "num_heads": 4, "head_dim": 24, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {key: value for key, value in _DENSE.items() if key != "num_hidden_layers"}
    | {"layers_block_type": ["mamba", "attention"], "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4}
    | {"mamba_head_dim": 24, "n_groups": 1, "chunk_size": 16, "use_mamba_kernels": False, "pad_token_id": 0},
    "zamba2": _DENSE
    | _HYBRID
    | {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 16, "adapter_rank": 4, "pad_token_id": 0},
    "zaya": _MOE
    | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    | {"router_hidden_size": 8, "pad_token_id": 0},
    "inkling": _DENSE | _INKLING | {"mlp_layer_types": ["dense", "sparse"]},
    "inkling2": _MOE | _INKLING | {"unpadded_vocab_size": VOCAB},
    "lfm2": _DENSE | _CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _DENSE | _CONV | _EXPERTS | {"num_dense_layers": 1},
    "lfm3": _DENSE | _CONV | {"head_dim": 8},
}
# Which take trees: gated delta rules, Mamba-2 beside keys, convolutions.
SCANNED = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"}
SCANNED |= {"granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "zamba2"} | {"lfm2", "lfm2_moe", "lfm3"}
if not hasattr(Cache, "get_conv_state"):  # older versions, where these two write to the state in passes over one token
    SCANNED -= {"kimi_linear", "bailing_hybrid"}
# No known scans, or no keys beside them: tokens of a draft that is cut short are fed again.
REPLAYED = CHAIN.keys() - SCANNED - {"inkling", "inkling2"}

# transformers' own continuation with several tokens is not that with one token after the other, or there is none.
PLAIN: dict[str, dict[str, Any]] = {
    "mamba": _SIZES | {"state_size": 8},
    "falcon_mamba": _SIZES | {"state_size": 8},
    "jamba": _DENSE
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "num_experts": 2}
    | {"mamba_d_state": 8, "use_mamba_kernels": False, "pad_token_id": 0},
    "zamba": _DENSE | _HYBRID | {"mamba_d_state": 8, "use_mamba_kernels": False, "pad_token_id": 0},
    "recurrent_gemma": {key: value for key, value in _DENSE.items() if key != "max_position_embeddings"}
    | {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 16, "pad_token_id": 0},
    "minimax": _DENSE | _MIXED | _LOCAL_EXPERTS | {"head_dim": 8, "block_size": 16},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 64},
}

_ALL = CHAIN | PLAIN
_OUT = re.compile(r"(o_proj|out_proj|down_proj|w2|dense|fc2)(\.linear)?(\.weight)?$")


def _class_of(name: str) -> Any:
    """The config's class, None where this transformers has none: of models that see, too, the text's."""
    return next((CONFIG_MAPPING[kind] for kind in (f"{name}_text", name) if kind in CONFIG_MAPPING), None)


def known(families: Iterable[str]) -> list[str]:
    """Those that this transformers has."""
    return [name for name in families if _class_of(name) is not None]


def fresh_hybrid(name: str, seed: int = 0, dtype: torch.dtype = F32, **changes: Any) -> Any:
    """A tiny model of the test's own."""
    return initialised(_class_of(name)(**_ALL[name] | changes), seed, dtype)


@cache
def hybrid(name: str) -> Any:
    """The tiny model ``name``, the same object each time it is asked for; tests must leave it as it is."""
    return judged(fresh_hybrid(name))


def counting_hybrid(name: str, period: int = 7) -> Any:
    """Writes 1 2 ... period 1 2 ..., whatever came before the last token: drafts are soon right. States still count."""
    model = fresh_hybrid(name)
    share = 0.0 if name == "inkling2" else 0.01  # whose layers choose among those before, however little each adds
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if _OUT.search(part):  # what a layer adds must not drown the token
                weight.mul_(share)
        model.get_input_embeddings().weight.copy_(60.0 * torch.eye(VOCAB))
        head = model.get_output_embeddings().weight
        head.mul_(0.02)
        for token in range(VOCAB):
            head[token % period + 1, token] += 8.0
    return judged(model)

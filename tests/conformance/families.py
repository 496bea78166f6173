"""Tiny random models of every causal family that transformers knows, from its own mapping and default configs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 64
OVERRIDES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "overrides.json").read_text())

# The first pattern that a field's whole name matches decides its value; "tiny" numbers that fit each other.
_SIZES: list[tuple[str, Any]] = [
    (r"vocab_size|n_vocab|.*_vocab_size", VOCAB),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|word_embed_proj_dim|n_embed", 32),
    (r".*intermediate_size.*|ffn_dim|.*_ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_ff|feed_forward_size|d_inner", 48),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|depth|num_blocks", 2),
    (r"num_attention_heads|n_heads?|num_heads|.*attention_heads", 4),
    (r"num_key_value_heads|.*_num_key_value_heads|num_kv_heads|.*_num_kv_heads|multi_query_group_num", 2),
    (r"head_dim|.*_head_dim|attention_head_dim|d_kv|.*_head_size|kv_channels|head_size|dim_head", 8),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank|.*_rank", 16),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length", 128),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|.*num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|.*experts_per_tok|moe_top_k|num_selected_experts", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|.*n_groups?", 1),
    (r"sliding_window|.*_window_size|window_size|attention_chunk_size|.*sliding_window", 6),
    (r"initializer_range|init_std|.*initializer_range", 0.3),
    (r"num_nextn_predict_layers|num_mtp_layers|first_k_dense_replace|num_dense_layers", 0),
    (r".*dropout.*|.*_pdrop", 0),
    (r"image_size", 8),
    (r"patch_size", 4),
]
_ALWAYS = {"head_dim": 8, "num_key_value_heads": 2}  # where the default None means "like another field"
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|decoder_layers")


@dataclass(frozen=True)
class Family:
    """One entry of transformers' causal mapping: a model type and the class it names."""

    name: str
    architecture: str


FAMILIES = [
    Family(name, classes if isinstance(classes, str) else classes[0])
    for name, classes in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
]


def _tiny_list(name: str, value: list[Any], layers: int, default_layers: int | None) -> list[Any]:
    """A per-layer list for fewer layers: one of each kind if there is room, else the first ones."""
    if default_layers is None or len(value) != default_layers:
        return value
    kinds = list(dict.fromkeys(str(item) for item in value))
    first = {str(item): item for item in reversed(value)}
    chosen = [first[kind] for kind in kinds][:layers]
    return chosen + value[len(chosen) : layers] if len(chosen) < layers else chosen


def _member(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some fields differ from layer to layer, and refuse to be read
        return None


def _number(name: str, value: Any, layers: int) -> Any:
    """A tiny number for a field; ``...`` where its name says nothing."""
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), ...)
    if size is ... or not isinstance(value, int | float) or isinstance(value, bool):
        return ...
    size = layers if size == 2 and _LAYERS.fullmatch(name) else size
    return float(size) if isinstance(value, float) else size


def tiny_fields(config: PretrainedConfig, layers: int = 2, *, derived: bool = True) -> dict[str, Any]:
    """Constructor arguments that make a config of this one's class tiny.

    Args:
        config: with its defaults.
        layers: of each stack.
        derived: also pass on the fields that need no change; without, the class derives them from the others.
    """
    given = config.to_dict()
    default_layers = next((v for k, v in given.items() if _LAYERS.fullmatch(k) and isinstance(v, int)), None)
    latent = "kv_lora_rank" in given  # latent attention expands one latent to all heads
    fields: dict[str, Any] = {}
    special = VOCAB
    for name, value in given.items():
        if name in ("model_type", "transformers_version", "architectures", "_name_or_path", "dtype"):
            continue
        sub = _member(config, name)
        if isinstance(sub, PretrainedConfig):
            fields[name] = tiny_fields(sub, layers, derived=derived) | {"model_type": sub.model_type}
        elif re.fullmatch(r".*_token_(id|index)|pad_idx", name) and isinstance(value, int | list):
            special -= 1
            fields[name] = value if isinstance(value, int) and value < 4 else special
        elif name in _ALWAYS and not isinstance(value, list):
            fields[name] = 4 if latent and name == "num_key_value_heads" else _ALWAYS[name]
        elif isinstance(value, list) and default_layers and len(value) == default_layers:
            if derived or name == "layer_types":
                fields[name] = _tiny_list(name, value, layers, default_layers)
        else:
            number = _number(name, value, layers)
            if number is not ... or derived:
                fields[name] = value if number is ... else number
    return fields


def _configs(family: Family) -> Iterator[PretrainedConfig]:
    """Small configs of the family, the one with the most default fields first."""
    kind = CONFIG_MAPPING[family.name]
    changes = dict(OVERRIDES.get(family.name, {}))
    layers = changes.pop("_layers", 2)
    for derived in (True, False):
        fields = tiny_fields(kind(), layers, derived=derived)
        for name, value in changes.items():
            old = fields.get(name)
            fields[name] = old | value if isinstance(value, dict) and isinstance(old, dict) else value
        fields = {name: value for name, value in fields.items() if value != "derived"}
        try:
            config = kind(**fields)
        except Exception as error:
            failed = error
            continue
        yield config
        text = config.get_text_config()
        if text is not config:  # the class may be the text model's alone
            yield text
        failed = None
    if failed is not None:
        raise failed


def build(family: Family, seed: int = 0, attention: str | None = None) -> Any:
    """A tiny random model of the family that can run a pass; nothing ends its texts.

    Raises:
        Exception: whatever transformers raised for the last small config that was tried.
    """
    kind = getattr(transformers, family.architecture)
    failed: Exception = RuntimeError("no config")
    configs = _configs(family)
    while True:
        try:
            config = next(configs)
        except StopIteration:
            raise failed from None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                model = kind._from_config(config, attn_implementation=attention).eval()
                with torch.no_grad():
                    model(input_ids=torch.arange(1, 9)[None])
            except Exception as error:
                failed = error
                continue
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return model

"""Tiny models with MTP layers in their checkpoints, in every published layout."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.hybrids import fresh_hybrid
from helpers.models import F32, F64, SIZES, Tiny, fresh_model, initialised, judged, made
from safetensors.torch import load_file, save_file
from torch import Tensor

_MHA = SIZES | {"num_key_value_heads": 4}
_KINDS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "head_dim": 8}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERT = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_EXPERTS = _EXPERT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_INDEX = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}  # picks all keys
_MELLUM = {"mlp_layer_types": ["dense", "sparse"], "num_experts": 4, "num_nextn_predict_layers": 1}
MODELS = {
    "deepseek_v3": Tiny("DeepseekV3Config", _MHA | _LATENT | _EXPERTS | {"first_k_dense_replace": 1}),
    "deepseek_v32": Tiny("DeepseekV32Config", _MHA | _LATENT | _EXPERTS | _INDEX, F32, None),
    "glm4_moe": Tiny("Glm4MoeConfig", SIZES | _EXPERTS | {"first_k_dense_replace": 1, "head_dim": 8}),
    "mellum": Tiny("MellumConfig", SIZES | _KINDS | _EXPERT | _MELLUM, F32, None),
    "mimo_v2": Tiny("MiMoV2FlashConfig", SIZES | _EXPERTS | _KINDS | {"v_head_dim": 4}, F32, None),
}


def of_family(name: str, **changes: Any) -> Any:
    """A tiny model of the test's own, of a family in :data:`MODELS`."""
    model = made(MODELS[name], **changes)
    if model.dtype is F64:
        model.set_experts_implementation("eager")  # others have no kernel in float64
    return model


deepseek = partial(of_family, "deepseek_v3")


def qwen3_5_with_images() -> Any:
    """The model that Qwen3.5 is published as; its MTP layers are the text's."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    text = fresh_hybrid("qwen3_5").config.to_dict()
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    return initialised(config, dtype=F32, kind=transformers.Qwen3_5ForConditionalGeneration)


def layer_tensors(model: Any, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Random weights of one decoder layer of the model's kind, experts stored one by one."""
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers = 1
    for name, value in {"first_k_dense_replace": 0, **changes}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = type(model.get_decoder())(config).layers[0].state_dict()
    tensors = {name: _random(value.shape, generator) for name, value in shapes.items()}
    for name in [name for name in tensors if name.startswith("mlp.experts.")]:
        for index, expert in enumerate(tensors.pop(name)):
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            parts = parts if name.endswith("gate_up_proj") else {"down_proj": expert}
            tensors |= {f"mlp.experts.{index}.{part}.weight": weight for part, weight in parts.items()}
    return tensors


def _random(shape: Any, generator: torch.Generator) -> Tensor:
    wide = torch.randn(shape, generator=generator, dtype=F64) * 0.3
    return wide + 1.0 if len(shape) == 1 else wide


def other_tensors(model: Any, names: tuple[str, str, str, str], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the rest, by the layout's names for fc and the norms of embedding, hidden state and output."""
    size, generator = model.config.get_text_config().hidden_size, torch.Generator().manual_seed(100 + seed)
    shapes = ((size, 2 * size), (size,), (size,), (size,))
    return {f"{name}.weight": _random(shape, generator) for name, shape in zip(names, shapes, strict=True)}


def behind(
    model: Any, layers: int = 1, norm: str = "shared_head.norm", kind: str = "full_attention"
) -> dict[str, Tensor]:
    """The layout of DeepSeek-V3, GLM-4 and, with another norm, Ling."""
    names = ("eh_proj", "enorm", "hnorm", norm)
    first = model.config.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        kinds = {"layer_types": [kind], "mlp_layer_types": ["sparse"]}
        own = layer_tensors(model, index, **kinds) | other_tensors(model, names, index)
        own |= {"embed_tokens.weight": model.get_input_embeddings().weight.detach()}
        own |= {"shared_head.head.weight": model.lm_head.weight.detach()}
        tensors |= {f"model.layers.{first + index}.{name}": tensor for name, tensor in own.items()}
    return tensors


def qwen(model: Any, layers: int = 1, kind: str = "full_attention") -> dict[str, Tensor]:
    """The layout of Qwen3-Next, Qwen3.5 and Mellum: one fc and its norms, for all layers."""
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    tensors = other_tensors(model, names)
    for index in range(layers):
        own = layer_tensors(model, index, layer_types=[kind], mlp_layer_types=["sparse"])
        tensors |= {f"mtp.layers.{index}.{name}": tensor for name, tensor in own.items()}
    return tensors


def mimo(model: Any, layers: int = 1, prefix: str = "model.mtp_layers") -> dict[str, Tensor]:
    """MiMo's layout; without ``model.`` that of speculators."""
    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        own = layer_tensors(model, index, layer_types=["full_attention"]) | other_tensors(model, names, index)
        tensors |= {f"{prefix}.{index}.{name}": tensor for name, tensor in own.items()}
    return tensors


def mimo_v2(model: Any, layers: int = 1) -> dict[str, Tensor]:
    """MiMo-V2's layout: dense layers with a window."""
    names = ("eh_proj", "enorm", "hnorm", "final_layernorm")
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        kind = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
        own = layer_tensors(model, index, **kind) | other_tensors(model, names, index)
        own = {name.replace("post_attention_layernorm", "pre_mlp_layernorm"): each for name, each in own.items()}
        tensors |= {f"model.mtp.layers.{index}.{name}": tensor for name, tensor in own.items()}
    return tensors


_INKLING = {
    **{
        f"self_attn.{part}_proj.": f"attn.w{part}_{how}."
        for part, how in zip("qkvro", ("du", "dv", "dv", "du", "ud"), strict=True)
    },
    **{f"self_attn.{part}_sconv.conv1d.": f"attn.{part}_sconv." for part in "kv"},
    "self_attn.": "attn.",
    "_sconv.conv1d.": "_sconv.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "mlp.down_proj.": "mlp.w2_md.",
}


def inkling(model: Any, layers: int = 1, published: bool = True) -> dict[str, Tensor]:
    """Inkling's layout; if not ``published``, with the names in the layers that transformers' class has."""
    names = ("input_proj", "embed_norm", "hidden_norm", "chain_norm")
    tensors: dict[str, Tensor] = {}
    for index in range(layers):
        own = layer_tensors(model, index, layer_types=["hybrid"], mlp_layer_types=["dense"])
        others = other_tensors(model, names, index)
        tensors["model.mtp.chain_norm.weight"] = others.pop("chain_norm.weight")
        if published:
            pair = [own.pop(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
            own["mlp.w13_dn.weight"] = torch.stack(pair, dim=1).flatten(0, 1)
            for name, theirs in _INKLING.items():
                own = {key.replace(name, theirs): tensor for key, tensor in own.items()}
        own = {f"transformer_block.{name}": tensor for name, tensor in own.items()} | others
        tensors |= {f"model.mtp.layers.{index}.{name}": tensor for name, tensor in own.items()}
    return tensors


def written(folder: Path, model: Any, tensors: dict[str, Tensor]) -> Path:
    """Save a model with more tensors than its class knows."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(
        load_file(file) | {name: each.contiguous().clone() for name, each in tensors.items()}, file, {"format": "pt"}
    )
    return folder


def loaded(folder: Path, model: Any) -> Any:
    """The model as transformers reads it back."""
    read = type(model).from_pretrained(folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    if model.dtype is F64 and hasattr(model.config, "_experts_implementation"):
        read.set_experts_implementation("eager")
    read.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return judged(read.eval())


# A model and its MTP layers' tensors, by the layout of its family.
FAMILIES: dict[str, tuple[Callable[[], Any], Callable[..., dict[str, Tensor]]]] = {
    "deepseek_v3": (deepseek, behind),
    "deepseek_v32": (partial(of_family, "deepseek_v32"), partial(behind, kind="indexed_attention")),
    "glm4_moe": (partial(of_family, "glm4_moe"), behind),
    "qwen3_next": (partial(fresh_hybrid, "qwen3_next"), qwen),
    "qwen3_5": (partial(fresh_hybrid, "qwen3_5"), qwen),
    "qwen3_5_moe": (partial(fresh_hybrid, "qwen3_5_moe"), qwen),
    "qwen3_5, images": (qwen3_5_with_images, qwen),
    "mellum": (partial(of_family, "mellum"), partial(qwen, kind="sliding_attention")),
    "bailing_hybrid": (partial(fresh_hybrid, "bailing_hybrid"), partial(behind, norm="final_layernorm")),
    "mimo": (partial(fresh_model, "qwen2"), mimo),
    "mimo_v2": (partial(of_family, "mimo_v2"), mimo_v2),
    "inkling": (partial(fresh_hybrid, "inkling"), inkling),
    "inkling, renamed": (partial(fresh_hybrid, "inkling"), partial(inkling, published=False)),
    "speculators": (partial(fresh_model, "qwen3"), partial(mimo, prefix="mtp_layers")),
}
_NEEDED = {
    "deepseek_v32": "DeepseekV32Config",
    "mellum": "MellumConfig",
    "mimo_v2": "MiMoV2FlashConfig",
    "bailing_hybrid": "BailingHybridConfig",
    "inkling": "InklingTextConfig",
    "inkling, renamed": "InklingTextConfig",
}
for _family, _config in _NEEDED.items():
    if not hasattr(transformers, _config):  # an older version
        del FAMILIES[_family]


def with_layers(folder: Path, family: str, layers: int = 1, change: Callable[[Any], None] | None = None) -> Any:
    """A family's model as it is loaded from a checkpoint with so many MTP layers; ``change`` it before."""
    make, layout = FAMILIES[family]
    model = make()
    if change is not None:
        change(model)
    tensors = {name: tensor.to(model.dtype) for name, tensor in layout(model, layers).items()}
    return loaded(written(folder, model, tensors), model)

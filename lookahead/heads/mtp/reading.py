"""MTP layers from checkpoints, in every published layout. The names of the tensors decide which it is::

    DeepSeek-V3, GLM-4.5   model.layers.61.{enorm, hnorm, eh_proj, shared_head.norm, self_attn..}  behind the model's
    Qwen3-Next, Qwen3.5    mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm}, mtp.layers.0.{self_attn..}
    MiMo                   model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm, ..}
    MiMo-V2                model.mtp.layers.0.{enorm, hnorm, eh_proj, pre_mlp_layernorm, final_layernorm, ..}
    Inkling                model.mtp.layers.0.{embed_norm, hidden_norm, input_proj, transformer_block..}, mtp.chain_norm
    speculators            mtp_layers.0.{..}, as MiMo's

``fc`` reads [embedding, hidden], except MiMo's and Inkling's, which read [hidden, embedding].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError
from lookahead.heads.storage import WHOLE_MODELS, StoredTensors, locate, some
from lookahead.models.output_layer import COMPUTE_DTYPES

_BEHIND = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)")
_APART = re.compile(r"(?:model\.)?(?:mtp\.layers|mtp_layers)\.(\d+)\.(.+)")
_SHARED = re.compile(r"(?:model\.)?mtp\.((?:fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm|chain_norm)\.weight)")
_PARTS = {
    **dict.fromkeys(("eh_proj", "input_proj", "fc"), "fc"),
    **dict.fromkeys(("enorm", "token_layernorm", "embed_norm", "pre_fc_norm_embedding"), "embed_norm"),
    **dict.fromkeys(("hnorm", "hidden_layernorm", "hidden_norm", "pre_fc_norm_hidden"), "hidden_norm"),
    **dict.fromkeys(("shared_head.norm", "final_layernorm", "post_norm", "norm", "chain_norm"), "norm"),
    "embed_tokens": "embed",
    "shared_head.head": "head",
}
_SCALE = "weight_scale_inv"
_BLOCK = re.compile(r"^(?:transformer_block|mtp_block)\.")
# Names in Inkling's checkpoints, which transformers knows for the whole model only.
_INKLING = (
    (re.compile(r"^attn\.w([qkvro])_(?:du|dv|ud)\."), r"self_attn.\1_proj."),
    (re.compile(r"^attn\.([kv]_sconv)\."), r"self_attn.\1.conv1d."),
    (re.compile(r"^attn\."), "self_attn."),
    (re.compile(r"^((?:attn|mlp)_sconv)\.weight"), r"\1.conv1d.weight"),
    (re.compile(r"^attn_norm\."), "input_layernorm."),
    (re.compile(r"^mlp_norm\."), "post_attention_layernorm."),
    (re.compile(r"^mlp\.w2_md\."), "mlp.down_proj."),
)
_GATE_AND_UP = "mlp.w13_dn.weight"  # their rows take turns


@dataclass(frozen=True)
class LayerTensors:
    """A layer's ``parts`` (fc, embed_norm, hidden_norm; perhaps norm, embed, head), and those of its decoder layer."""

    parts: dict[str, Tensor]
    block: dict[str, Tensor]
    hidden_first: bool  # of what fc reads


def read(source: str | Path, hub: Mapping[str, Any], decoder_layers: int, model: str) -> tuple[str, list[LayerTensors]]:
    """The MTP layers that ``source`` holds beside a ``model`` of so many decoder layers: a folder, a file in it, or a
    repository of the hub; and the file that was read, or the index of several. A LookaheadError names what is missing,
    foreign or quantised; no code from a file is run."""
    location = locate(source, hub)
    stored = location.tensors(WHOLE_MODELS, "MTP layers")
    looked_at = some(sorted({str(file) for file in stored.files.values()}))
    found = _found(stored, decoder_layers)
    if not found:
        raise LookaheadError(
            f"No MTP layers for {model} in {looked_at}: expected tensors like model.layers.{decoder_layers}.eh_proj."
            f"weight, mtp.fc.weight or mtp_layers.0.input_proj.weight, found {some(sorted(stored.files))}. Name a "
            "checkpoint that has them: Mtp(MtpHeads.from_pretrained(FOLDER, model=model))."
        )
    if sorted(found) != list(range(len(found))):
        raise LookaheadError(f"{looked_at}: MTP layers are numbered {sorted(found)}: expected all from 0 on.")
    block = (location.config().get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise LookaheadError(f"{looked_at}: weight_block_size in config.json must be two sizes: got {block!r}.")
    return looked_at, [_layer(stored, found[index], index, looked_at, tuple(block)) for index in sorted(found)]


def _found(stored: StoredTensors, decoder_layers: int) -> dict[int, dict[str, str]]:
    """The stored name of every tensor, by layer and by its name there."""
    found: dict[int, dict[str, str]] = {}
    shared: dict[str, str] = {}
    for name in stored.files:
        if match := _SHARED.fullmatch(name):
            shared[match[1]] = name
        elif match := _APART.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = name
        elif (match := _BEHIND.fullmatch(name)) and int(match[1]) >= decoder_layers:
            found.setdefault(int(match[1]) - decoder_layers, {})[match[2]] = name
    found = {index: shared | names for index, names in found.items()}
    joining = {f"{name}.weight" for name, part in _PARTS.items() if part == "fc"}
    return {index: names for index, names in found.items() if names.keys() & joining}  # not a longer model's own


def _layer(
    stored: StoredTensors, names: Mapping[str, str], index: int, file: str, fp8_block: tuple[int, int]
) -> LayerTensors:
    parts: dict[str, Tensor] = {}
    block: dict[str, Tensor] = {}
    for name, full in names.items():
        if name.endswith(("rotary_emb.inv_freq", _SCALE)):
            continue
        tensor = _floats(stored, full, file, fp8_block)
        if (part := _PARTS.get(name.removesuffix(".weight"))) is not None:
            parts[part] = tensor
        else:
            block[_BLOCK.sub("", name).replace("pre_mlp_layernorm", "post_attention_layernorm")] = tensor
    if missing := [part for part in ("fc", "embed_norm", "hidden_norm") if part not in parts]:
        told = [some(sorted(name for name, its in _PARTS.items() if its == part)) for part in missing]
        raise LookaheadError(f"{file}: MTP layer {index} lacks a weight: expected one of {'; and one of '.join(told)}.")
    mimo = any(full.startswith("model.mtp_layers.") and name == "input_proj.weight" for name, full in names.items())
    inkling = "embed_norm.weight" in names
    return LayerTensors(parts, inklings(block) if inkling else block, hidden_first=mimo or inkling)


def _floats(stored: StoredTensors, full: str, source: str, fp8_block: tuple[int, int]) -> Tensor:
    tensor, scale = stored.get(full), full.removesuffix("weight") + _SCALE
    if tensor.dtype is torch.float8_e4m3fn and tensor.ndim == 2 and scale in stored.files:
        tensor = unquantised(tensor, stored.get(scale), fp8_block, f"{source}: {full}")
    if tensor.dtype not in COMPUTE_DTYPES:
        raise LookaheadError(
            f"{source}: {full} is {tensor.dtype}: expected bfloat16, float16, float32, or FP8 with weight_scale_inv. "
            "Use a checkpoint whose MTP layers are not quantised in another way."
        )
    if not bool(tensor.isfinite().all()):
        raise LookaheadError(f"{source}: {full} holds infinite numbers or NaN: expected finite ones.")
    return tensor


def inklings(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """A decoder layer's tensors of Inkling's checkpoints under the names of transformers' class."""
    found: dict[str, Tensor] = {}
    for name, tensor in block.items():
        if name == _GATE_AND_UP:
            found |= {"mlp.gate_proj.weight": tensor[0::2], "mlp.up_proj.weight": tensor[1::2]}
            continue
        for pattern, usual_name in _INKLING:
            name = pattern.sub(usual_name, name)
        found[name] = tensor
    return found


def unquantised(weight: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """What an FP8 ``weight`` ``[out, in]`` stands for, in bfloat16: each ``block`` of it has a scale of its own
    (DeepSeek-V3: arXiv 2412.19437, section 3.3), or all of it has one."""
    wanted = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if scale.numel() == 1:
        wanted, scale, block = (1, 1), scale.reshape(1, 1), (weight.shape[0], weight.shape[1])
    if tuple(scale.shape) != wanted:
        raise LookaheadError(
            f"{name}_scale_inv is {list(scale.shape)}, expected {list(wanted)} for blocks of {list(block)} of "
            f"{list(weight.shape)}: check weight_block_size in config.json."
        )
    for axis, step in enumerate(block):
        scale = scale.repeat_interleave(step, dim=axis)
    return (weight.float() * scale[: weight.shape[0], : weight.shape[1]].float()).to(torch.bfloat16)

"""Tensors of MTP layers as transformers' classes take them: weights from FP8 blocks, and Inkling's names."""

import re

import torch
from torch import Tensor

from jacobi import LookaheadError

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

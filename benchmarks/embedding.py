"""A small model at a large one's cost: a real text, by passes that cost what a dense model of that shape costs.

A random large model writes noise, and passes of a small trained one cost next to nothing. So a small Llama is
*embedded* in a larger one: the larger one's first channels, heads and layers hold the small one, zeros keep the rest
out of the text, and no kernel skips zeros. It writes the small one's text, by transformers' own unchanged code::

    hidden state  [ small model's h channels | 0 0 0 ... ]      RMSNorm: weights times sqrt(h/H), eps times h/H
    query heads   [ small model's heads | random heads ]        whose columns of the output projection are zero
    feed-forward  [ small model's rows | random rows ]          whose columns of the down projection are zero
    layers        [ small model's layers | random layers ]      whose output and down projections are zero

The vocabulary stays the small model's, so the output layer is smaller than a real model's, and so is sampling. It is
for machines that no pretrained model reaches (``benchmarks.gpu``); ``benchmarks.real`` has those.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Shape(NamedTuple):
    """The sizes of the larger model; the head size is the small model's."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int


SHAPES = {
    "0.16B": Shape(768, 12, 12, 4, 3072),
    "0.36B": Shape(896, 24, 14, 2, 4864),  # Qwen2.5-0.5B's, but for its vocabulary
    "1.3B": Shape(1536, 28, 24, 4, 8960),
    "8B": Shape(4096, 32, 64, 16, 14336),
}
_STD = 0.02  # of random weights


@torch.no_grad()
def embedded(small: Any, shape: Shape, dtype: torch.dtype, device: Any = "cpu") -> Any:
    """A Llama of ``shape`` that writes what the Llama ``small`` writes, up to the rounding of sums in ``dtype``."""
    own, large = small.config, _empty(small.config, shape, dtype, device)
    hidden, scale = own.hidden_size, (own.hidden_size / shape.hidden) ** 0.5
    _place(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
    if not own.tie_word_embeddings:
        _place(large.lm_head.weight, small.lm_head.weight)
    _place(large.model.norm.weight, small.model.norm.weight * scale)
    for index, layer in enumerate(large.model.layers):
        for name, weight in layer.named_parameters():
            if "norm" not in name:
                weight.normal_(std=_STD)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        if index >= own.num_hidden_layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
            continue
        source = small.model.layers[index]
        _place(layer.input_layernorm.weight, source.input_layernorm.weight * scale)
        _place(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight * scale)
        _place_attention(layer.self_attn, source.self_attn, own, shape)
        rows = source.mlp.gate_proj.weight.shape[0]
        for name in ("gate_proj", "up_proj"):
            target = getattr(layer.mlp, name).weight
            target[:rows].zero_()
            target[:rows, :hidden] = getattr(source.mlp, name).weight.to(target)
        target = layer.mlp.down_proj.weight
        target[:hidden, :rows] = source.mlp.down_proj.weight.to(target)
    return large


def _empty(own: Any, shape: Shape, dtype: torch.dtype, device: Any) -> Any:
    """The larger model, its weights not yet filled."""
    group, its_group = shape.heads // shape.key_heads, own.num_attention_heads // own.num_key_value_heads
    fits = shape.key_heads >= own.num_key_value_heads and group >= its_group
    if not fits or shape.layers < own.num_hidden_layers or shape.feed_forward < own.intermediate_size:
        raise typer.BadParameter(f"{shape} cannot hold {own.num_hidden_layers} layers of {own.hidden_size} channels")
    settings = own.to_dict() | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "intermediate_size": shape.feed_forward,
        "head_dim": own.head_dim,
        "rms_norm_eps": own.rms_norm_eps * own.hidden_size / shape.hidden,
    }
    config = LlamaConfig(**{name: value for name, value in settings.items() if name not in ("dtype", "model_type")})
    with torch.device("meta"):
        large = LlamaForCausalLM(config).to(dtype)
    large.to_empty(device=device)
    large.tie_weights()
    large.model.rotary_emb = type(large.model.rotary_emb)(config).to(device)  # its table is no parameter
    return large.eval()


def _place(target: Tensor, source: Tensor) -> None:
    """The source in the first channels of the target, zeros behind them."""
    target.zero_()
    target[..., : source.shape[-1]] = source.to(target)


def _place_attention(target: nn.Module, source: nn.Module, own: Any, shape: Shape) -> None:
    size, hidden = own.head_dim, own.hidden_size
    group, its_group = shape.heads // shape.key_heads, own.num_attention_heads // own.num_key_value_heads
    places: dict[str, Sequence[int]] = {
        "q_proj": [head // its_group * group + head % its_group for head in range(own.num_attention_heads)],
        "k_proj": range(own.num_key_value_heads),
        "v_proj": range(own.num_key_value_heads),
    }
    for name, heads in places.items():
        weight, given = getattr(target, name).weight, getattr(source, name).weight
        for index, head in enumerate(heads):
            rows = weight[head * size : (head + 1) * size]
            rows.zero_()
            rows[:, :hidden] = given[index * size : (index + 1) * size].to(weight)
    out, given = target.o_proj.weight, source.o_proj.weight
    for index, head in enumerate(places["q_proj"]):
        out[:hidden, head * size : (head + 1) * size] = given[:, index * size : (index + 1) * size].to(out)

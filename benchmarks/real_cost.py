"""Every way to decode at a large model's cost: a real text, by passes that cost what a dense model of that shape costs.

    python -m benchmarks.real_cost --shapes 0.36B --dtypes bfloat16 --sets code,no-loop --out build/real_cost.json

A random large model writes noise, and passes of a small trained one cost next to nothing. So a small Llama is
*embedded* in a larger one: the larger one's first channels, heads and layers hold the small one, zeros keep the rest
out of the text, and no kernel skips zeros. It writes the small one's text, by transformers' own unchanged code::

    hidden state  [ small model's h channels | 0 0 0 ... ]      RMSNorm: weights times sqrt(h/H), eps times h/H
    query heads   [ small model's heads | random heads ]        whose columns of the output projection are zero
    feed-forward  [ small model's rows | random rows ]          whose columns of the down projection are zero
    layers        [ small model's layers | random layers ]      whose output and down projections are zero

The vocabulary stays the small model's, so the output layer is smaller than a real model's, and so is sampling.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from benchmarks import options, race
from benchmarks.contenders import HEADED, NAMES, SETS, methods, prompt_sets
from benchmarks.harness import Run, load, quiet_console
from benchmarks.options import DTYPES, MODES, chosen, whole_numbers
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.eagle import EagleHead
from lookahead.sources.eagle.network import EagleNetwork


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


def shaped(small: Any, shape: str, dtype: str, device: Any = "cpu") -> Any:
    """``small`` in one of ``SHAPES``, generating as it does."""
    model = embedded(small, SHAPES[shape], getattr(torch, dtype), device)
    model.generation_config = small.generation_config
    return model


@torch.no_grad()
def embedded_head(head: EagleHead, small: Any, shape: Shape, dtype: torch.dtype, device: Any = "cpu") -> EagleHead:
    """An EAGLE-3 head of the Llama ``small`` beside the larger one, as large as one that was trained for it. It scores
    by the model's output layer, reads the model's embeddings, and has as many heads of attention as ``small``."""
    source, own = head.network, head.network.sizes
    hidden, scale = own.hidden_size, (own.hidden_size / shape.hidden) ** 0.5
    sizes = {"heads": shape.heads, "key_heads": shape.key_heads, "feed_forward": shape.feed_forward}
    widths = {"hidden_size": shape.hidden, "target_size": shape.hidden, "eps": own.eps * scale**2}
    network = EagleNetwork(replace(own, **sizes, **widths)).to(device=device, dtype=dtype)
    for name, weight in network.named_parameters():
        given = source.get_parameter(name)
        weight.zero_()
        if weight.ndim == 1:
            weight[:hidden] = given.to(weight) * scale
        elif "self_attn" not in name:
            for part in range(given.shape[1] // hidden if name == "fc.weight" else 1):
                columns = given[:, part * hidden : (part + 1) * hidden] if name == "fc.weight" else given
                start = part * shape.hidden
                weight[: len(given), start : start + columns.shape[1]] = columns.to(weight)
    _place_attention(network.layers[0].self_attn, source.layers[0].self_attn, small.config, shape)
    return EagleHead(network.eval(), head.feature_layers)


@torch.no_grad()
def disturbed(small: Any, noise: float, seed: int = 0) -> Any:
    """A copy whose matrices have random noise of so many of their standard deviations: a draft model that is often
    right. At 0.18 the argmax of the bundled model's copy is its own in 72 % of the places of code prompts."""
    draft, random = copy.deepcopy(small), torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        if weight.ndim > 1:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=random)
    return draft


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
            for part in range(given.shape[1] // hidden):  # an EAGLE-3 head reads an embedding and a feature
                columns = given[index * size : (index + 1) * size, part * hidden : (part + 1) * hidden]
                rows[:, part * shape.hidden : part * shape.hidden + hidden] = columns.to(weight)
    out, given = target.o_proj.weight, source.o_proj.weight
    for index, head in enumerate(places["q_proj"]):
        out[:hidden, head * size : (head + 1) * size] = given[:, index * size : (index + 1) * size].to(out)


def main(
    model_dir: options.ModelDir = None,
    shapes: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(SHAPES)}.")] = "0.16B,0.36B,1.3B",
    prompts: options.Prompts = 4,
    sets: Annotated[
        str, typer.Option(help=f"Comma-separated, or all: {', '.join(SETS)}; or .jsonl files.")
    ] = "no-loop",
    modes: options.Modes = "greedy,penalty,t0.7,t0.8,t1.0,t1.5",
    dtypes: options.Dtypes = "bfloat16,float32",
    batches: Annotated[str, typer.Option(help="Comma-separated sequences of a call.")] = "1",
    names: Annotated[str, typer.Option("--methods", help=f"Comma-separated: {', '.join(NAMES)}.")] = (
        "lookup2,auto,untraced,w7"
    ),
    new_tokens: options.NewTokens = 96,
    rounds: options.Rounds = 1,
    threads: options.Threads = None,
    device: str = "cpu",
    draft_noise: Annotated[
        float | None,
        typer.Option(help="Draft with the small model, noise on its weights: so many of their standard deviations."),
    ] = None,
    head_dir: Annotated[
        Path, typer.Option("--head", help="An EAGLE-3 head of the small model; it grows with the model.")
    ] = BUNDLED_EAGLE,
    out: options.Out = None,
) -> None:
    """Race every method on the small model's prompts at each shape's cost."""
    console = quiet_console(threads)
    asked = race.Asked(
        prompt_sets(sets), chosen(modes, MODES, "mode"), whole_numbers(batches), prompts, new_tokens, rounds
    )
    wanted_shapes, wanted_dtypes = chosen(shapes, SHAPES, "shape"), chosen(dtypes, DTYPES, "dtype")
    wanted_methods = chosen(names, NAMES, "method")
    methods(wanted_methods, device)  # a strategy that cannot be made raises before a model is loaded
    lookahead.augment_all()
    settings = {"model": model_dir, "device": device, "new_tokens": new_tokens, "prompts": prompts, "rounds": rounds}
    run = Run("real cost", out, **settings, draft_noise=draft_noise, theory={}, rows=[], skipped=[])
    small, tokenizer = load(model_dir, "float32")
    for name in wanted_shapes:
        for dtype in wanted_dtypes:
            model, draft = shaped(small, name, dtype, device), None
            if draft_noise is not None:
                draft = disturbed(small, draft_noise).to(device=device, dtype=model.dtype)
            head = None
            if HEADED.keys() & set(wanted_methods):
                head = embedded_head(EagleHead.from_pretrained(head_dir), small, SHAPES[name], model.dtype, device)
            place = {"shape": name, "dtype": dtype}
            loaded = (model, tokenizer)
            race.race_model(console, run, loaded, wanted_methods, asked, place, assistant=draft, head=head)
            del model
    run.finish()


if __name__ == "__main__":
    typer.run(main)

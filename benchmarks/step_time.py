"""The latency curve: what a tree forward over T nodes costs against a pass over one, with random weights.

Passes go through the library's own tree forward, over a binary tree of T nodes; keys and values in the KV cache repeat
those of a few tokens. Sizes are interleaved; reported are medians. ``lookahead tune`` measures a model of yours.
"""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks.harness import in_turn, timed
from lookahead.models.names import CACHE
from lookahead.runtime.session import bare_model
from lookahead.tuning import bushy_tree

WIDTHS = (1, 8, 16, 32, 64, 96, 128)
_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_FIELDS += ("vocab_size", "tie_word_embeddings", "head_dim")


def random_model(sizes: Sequence[int], dtype: torch.dtype, device: str) -> Any:
    """A Llama of the given sizes, in the order of ``_FIELDS``, with small random weights, made where it is needed."""
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape: dict[str, Any] = dict(zip(_FIELDS, sizes, strict=True))
    config = LlamaConfig(**shape, max_position_embeddings=32768, **no_tokens)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its table is no parameter
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model.eval()


@torch.no_grad()
def after(context: int, model: Any, batch: int, room: int, static: bool | None = None) -> AbstractContextManager[Any]:
    """The library's view of a model after ``context`` tokens; all but a few of the keys and values are copies."""
    vocab = model.get_input_embeddings().weight.shape[0]
    seen = torch.arange(min(32, context - 1), device=model.device).repeat(batch, 1) % vocab
    past = DynamicCache()
    model(input_ids=seen, use_cache=True, **{CACHE: past})
    copies = 1, 1, -(-context // seen.shape[1]), 1
    for layer in past.layers:
        layer.keys, layer.values = (kept.repeat(copies)[:, :, : context - 1] for kept in (layer.keys, layer.values))
    last = torch.full((batch, 1), context - 1, device=model.device)
    return bare_model(model, last % vocab, room, static=static, past=past)


@torch.no_grad()
def curve(
    model: Any, context: int, widths: Sequence[int] = WIDTHS, batch: int = 1, rounds: int = 9, static: Any = None
) -> dict[int, float]:
    """Median milliseconds of a pass by its nodes a sequence."""
    vocab = model.get_input_embeddings().weight.shape[0]
    times: dict[int, list[float]] = {width: [] for width in widths}
    trees = {width: [bushy_tree(width, vocab)] * batch for width in widths}
    with after(context, model, batch, max(widths), static) as passes:
        for _ in range(3):  # a CUDA graph is captured in the first of them
            for width in widths:
                passes.forward(trees[width])
        for turn in range(rounds):
            for width in in_turn(widths, turn):
                times[width].append(1e3 * timed(model.device, partial(passes.forward, trees[width]))[1])
    return {width: statistics.median(taken) for width, taken in times.items()}

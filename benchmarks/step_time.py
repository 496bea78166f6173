"""The latency curve: what a tree forward over T nodes costs against a pass over one, with random weights.

    python -m benchmarks.step_time --preset 0.5b --dtypes bfloat16 --out build/bench/step_time.json

Passes go through the library's own tree forward, over a binary tree of T nodes; keys and values in the KV cache repeat
those of a few tokens. Sizes are interleaved; reported are medians.
"""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks import options
from benchmarks.harness import Run, in_turn, quiet_console, timed
from benchmarks.options import DTYPES, chosen, whole_numbers
from lookahead.models.names import CACHE
from lookahead.runtime.session import bare_model
from lookahead.tuning import bushy_tree

WIDTHS = (1, 8, 16, 32, 64, 96, 128)
_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_FIELDS += ("vocab_size", "tie_word_embeddings", "head_dim")
PRESETS: dict[str, tuple[int, ...]] = {
    "bundled": (256, 6, 4, 2, 768, 4096, True, 64),
    "160m": (768, 12, 12, 12, 3072, 32000, False, 64),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True, 64),
    "7b": (4096, 32, 32, 32, 11008, 32000, False, 128),
}


def random_model(sizes: Sequence[int], dtype: torch.dtype, device: str) -> Any:
    """A Llama of the given sizes (as in ``PRESETS``) with small random weights, made where it is needed."""
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


def main(
    preset: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PRESETS)}.")] = "bundled",
    dtypes: options.Dtypes = "float32,bfloat16",
    contexts: Annotated[str, typer.Option(help="Comma-separated tokens in the KV cache.")] = "128,1024,4096,8192",
    nodes: Annotated[str, typer.Option(help="Comma-separated nodes of a pass.")] = ",".join(map(str, WIDTHS)),
    batch: int = 1,
    rounds: options.Rounds = 9,
    device: str = "cpu",
    static: Annotated[bool | None, typer.Option(help="Static shapes; default: the library's choice.")] = None,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Measure every shape, dtype and context."""
    console = quiet_console(threads)
    widths = sorted({1, *whole_numbers(nodes)})
    run = Run("step time", out, device=device, static=static, rounds=rounds, rows=[])
    for name in chosen(preset, PRESETS, "preset"):
        for dtype in chosen(dtypes, DTYPES, "dtype"):
            model = random_model(PRESETS[name], getattr(torch, dtype), device)
            for context in whole_numbers(contexts):
                place = {"preset": name, "dtype": dtype, "context": context, "batch": batch}
                run.add("rows", [{**place, "pass_ms": curve(model, context, widths, batch, rounds, static)}])
                console.print(run.document["rows"][-1])
            del model
    run.finish()


if __name__ == "__main__":
    typer.run(main)

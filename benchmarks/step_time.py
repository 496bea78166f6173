"""The cost of a fused pass over T nodes against a pass over one, for a model shape with random weights.

    python -m benchmarks.step_time --preset 0.5b --dtypes bfloat16 --out benchmarks/results/step_time.json

Passes go through the library's own fused forward, over a binary tree of T nodes; the history's keys and values repeat
those of a few tokens. Sizes are interleaved; reported are medians. The last line on stdout is one JSON document.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path as FilePath
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks.racing import DTYPES, chosen, save, wait, whole_numbers
from lookahead.runtime.session import bare_model
from lookahead.runtime.tree import FusedModel
from lookahead.tuning import bushy_tree

WIDTHS = (1, 8, 16, 32, 64, 96, 128)


def shape(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, tied: bool, head: int) -> LlamaConfig:
    """A Llama's config from its sizes."""
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inner,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        head_dim=head,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


PRESETS: dict[str, tuple[int, int, int, int, int, int, bool, int]] = {
    "bundled": (256, 6, 4, 2, 768, 4096, True, 64),
    "160m": (768, 12, 12, 12, 3072, 32000, False, 64),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True, 64),
    "7b": (4096, 32, 32, 32, 11008, 32000, False, 128),
}


def random_model(config: LlamaConfig, dtype: torch.dtype, device: str) -> Any:
    """A Llama with small random weights, made where it is needed."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its table is no parameter
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    return model.eval()


@torch.no_grad()
def after(
    context: int, model: Any, batch: int, room: int, static: bool | None = None
) -> AbstractContextManager[FusedModel]:
    """The library's view of a model after ``context`` tokens; all but a few of the keys and values are copies."""
    vocab = model.get_input_embeddings().weight.shape[0]
    seen = torch.arange(min(32, context - 1), device=model.device).repeat(batch, 1) % vocab
    history = DynamicCache()
    model(input_ids=seen, past_key_values=history, use_cache=True)
    for layer in history.layers:
        copies = -(-context // seen.shape[1])
        layer.keys, layer.values = (
            states.repeat(1, 1, copies, 1)[:, :, : context - 1] for states in (layer.keys, layer.values)
        )
    last = torch.full((batch, 1), context - 1, device=model.device)
    return bare_model(model, last % vocab, room, static=static, past=history)


@torch.no_grad()
def curve(
    model: Any,
    context: int,
    widths: Sequence[int] = WIDTHS,
    batch: int = 1,
    rounds: int = 9,
    static: bool | None = None,
) -> dict[int, float]:
    """Median milliseconds of a pass by its nodes a row."""
    vocab = model.get_input_embeddings().weight.shape[0]
    times: dict[int, list[float]] = {width: [] for width in widths}
    trees = {width: [bushy_tree(width, vocab)] * batch for width in widths}
    with after(context, model, batch, max(widths), static) as fused:
        for _ in range(3):  # a CUDA graph is captured in the first of them
            for width in widths:
                fused.forward(trees[width])
        for turn in range(rounds):
            for width in widths if turn % 2 == 0 else tuple(widths)[::-1]:
                wait(model.device)
                start = time.perf_counter()
                fused.forward(trees[width])
                wait(model.device)
                times[width].append(1e3 * (time.perf_counter() - start))
    return {width: statistics.median(taken) for width, taken in times.items()}


def main(
    preset: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PRESETS)}.")] = "bundled",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    contexts: Annotated[str, typer.Option(help="Comma-separated tokens of history.")] = "128,1024,4096,8192",
    nodes: Annotated[str, typer.Option(help="Comma-separated nodes of a pass, the root included.")] = ",".join(
        map(str, WIDTHS)
    ),
    batch: int = 1,
    rounds: int = 9,
    device: str = "cpu",
    static: Annotated[bool | None, typer.Option(help="Static shapes; default: the library's choice.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    out: Annotated[FilePath | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Measure every shape, dtype and context."""
    if threads:
        torch.set_num_threads(threads)
    widths = sorted({1, *whole_numbers(nodes)})
    console = Console(stderr=True)
    rows = []
    for name in chosen(preset, PRESETS, "preset"):
        for dtype in chosen(dtypes, DTYPES, "dtype"):
            model = random_model(shape(*PRESETS[name]), getattr(torch, dtype), device)
            table = Table("context", "t(1), ms", *(f"T={w}" for w in widths[1:]), title=f"{name}, {dtype}: t(T)/t(1)")
            for context in whole_numbers(contexts):
                taken = curve(model, context, widths, batch, rounds, static)
                rows.append({"preset": name, "dtype": dtype, "context": context, "batch": batch, "pass_ms": taken})
                table.add_row(
                    str(context), f"{taken[1]:.2f}", *(f"{taken[width] / taken[1]:.2f}" for width in widths[1:])
                )
            console.print(table)
            del model
    print(save({"benchmark": "step time", "device": device, "static": static, "rounds": rounds, "rows": rows}, out))


if __name__ == "__main__":
    typer.run(main)

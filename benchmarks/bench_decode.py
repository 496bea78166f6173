"""Plain generate, transformers' prompt lookup and lookahead, interleaved in one process on the same prompts.

    python benchmarks/bench_decode.py --prompts 20 --out benchmarks/results/decode.json

Every method decodes every prompt in turn, so that a slow moment of the machine hits all of them; reported are medians
of per-prompt ratios against plain ``generate`` (above 1 is faster), their quartiles, and S, the tokens per pass. The
end-of-text token is switched off, so that every text has full length. The last line on stdout is one JSON document.
"""

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import racing
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lookahead
from lookahead import Jacobi, Lookahead

HERE = Path(__file__).parent
MODES: dict[str, dict[str, Any]] = {
    "greedy": racing.MODES["greedy"],
    "repetition penalty 1.1": racing.MODES["penalty"],
    "temperature 0.8": racing.MODES["t0.8"],
}


def methods(model: Any, plain_loop: bool) -> dict[str, dict[str, Any]]:
    """The contenders, as extra arguments of ``generate``; the first is the baseline."""
    table: dict[str, dict[str, Any]] = {
        "generate": {},
        "prompt lookup 10": {"prompt_lookup_num_tokens": 10},
        "lookahead 7/5/7": {"lookahead_strategy": racing.fixed(7, 5, 7)},
        "lookahead 15/5/15": {"lookahead_strategy": racing.fixed(15, 5, 15)},
        "jacobi sliding 16": {"lookahead_strategy": Jacobi(seed=0)},
    }
    if plain_loop:
        table["our loop, no drafts"] = {
            "lookahead_strategy": Lookahead(window_size=1, ngram_size=1, verification_set_size=0)
        }
    return table


def race(model: Any, tokenizer: Any, prompts: list[str], mode: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """One mode: every method on every prompt, timed twice in alternating order; the faster time of the two counts."""
    table = methods(model, plain_loop=True)
    per_token: dict[str, list[float]] = {name: [] for name in table}
    passes = dict.fromkeys(table, 0)
    differ = dict.fromkeys(table, 0)
    for index, prompt in enumerate(track(prompts, description="prompts", transient=True, console=Console(stderr=True))):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        length = inputs["input_ids"].shape[1]
        reference: Tensor | None = None
        best: dict[str, float] = {}
        for order in (list(table), list(table)[::-1]):
            for name in order:
                torch.manual_seed(index)
                start = time.perf_counter()
                ids = model.generate(**inputs, max_new_tokens=new_tokens, **mode, **table[name])
                best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
        for name in table:
            torch.manual_seed(index)
            call = partial(model.generate, **inputs, max_new_tokens=new_tokens, **mode, **table[name])
            ids, count = racing.counted(model, call)
            assert ids.shape[1] - length == new_tokens
            per_token[name].append(best[name] / new_tokens)
            passes[name] += count
            reference = ids if reference is None else reference
            differ[name] += not torch.equal(ids, reference)
    result = {}
    for name in table:
        ratios = sorted(b / t for b, t in zip(per_token["generate"], per_token[name], strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        result[name] = {
            "speedup_median": statistics.median(ratios),
            "speedup_quartiles": [quartiles[0], quartiles[2]],
            "tokens_per_s_median": statistics.median(1 / t for t in per_token[name]),
            "S": new_tokens * len(prompts) / passes[name],
            "texts_that_differ": differ[name],
        }
    return result


@torch.no_grad()
def step_cost(model: Any, tokenizer: Any, prompts: list[str]) -> dict[str, float]:
    """A 7/5/7 step against one bare pass over as many tokens on the same preallocated cache, interleaved."""
    from lookahead.runtime.tree import FusedModel

    original = FusedModel.forward
    bare: list[float] = []

    def timed(self: Any, trees: Any) -> Any:
        base, width = self._cache.base, len(trees[0])
        ids = torch.zeros((1, width), dtype=torch.long, device=model.device)
        positions = torch.arange(base, base + width, device=model.device)[None]
        start = time.perf_counter()
        model(input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True)
        bare.append(1e3 * (time.perf_counter() - start))
        return original(self, trees)

    ratios, nodes = [], []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        bare.clear()
        FusedModel.forward = timed  # type: ignore[method-assign]
        try:
            output = model.generate(
                **inputs,
                max_new_tokens=64,
                do_sample=False,
                lookahead_strategy=replace(racing.fixed(7, 5, 7), stats="detailed"),
                return_dict_in_generate=True,
            )
        finally:
            FusedModel.forward = original  # type: ignore[method-assign]
        for record, pass_ms in zip(output.stats.passes[1:], bare, strict=True):
            step_ms = sum(record[key] for key in ("draft_ms", "forward_ms", "verify_ms", "keep_ms")) - pass_ms
            ratios.append(step_ms / pass_ms)
            nodes.append(record["nodes"][0])
    return {"step_over_bare_pass_median": statistics.median(ratios), "nodes_median": statistics.median(nodes)}


def main(
    model_dir: Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")] = None,
    prompts_file: Annotated[Path, typer.Option(help="JSON lines with a 'prompt'.")] = HERE / "prompts" / "code.jsonl",
    prompts: Annotated[int, typer.Option(help="How many of them.")] = 20,
    new_tokens: int = 128,
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Run all modes and dtypes."""
    console = Console(stderr=True)
    texts = racing.texts_of(prompts_file)[:prompts]
    lookahead.augment_all()
    results: dict[str, Any] = {}
    for dtype in dtypes.split(","):
        model, tokenizer = racing.load(model_dir, dtype, device)
        warm = tokenizer(texts[0], return_tensors="pt", return_token_type_ids=False).to(device)
        for extra in methods(model, plain_loop=True).values():
            model.generate(**warm, max_new_tokens=32, do_sample=False, **extra)
        results[dtype] = {"step": step_cost(model, tokenizer, texts[:5])}
        for mode, settings in MODES.items():
            results[dtype][mode] = race(model, tokenizer, texts, settings, new_tokens)
            table = Table("method", "speedup", "quartiles", "tokens/s", "S", "differ", title=f"{dtype}, {mode}")
            for name, row in results[dtype][mode].items():
                low, high = row["speedup_quartiles"]
                table.add_row(
                    name,
                    f"{row['speedup_median']:.2f}x",
                    f"{low:.2f}-{high:.2f}",
                    f"{row['tokens_per_s_median']:.0f}",
                    f"{row['S']:.2f}",
                    str(row["texts_that_differ"]),
                )
            console.print(table)
    settings = {"model": str(model_dir or "bundled"), "prompts": len(texts), "new_tokens": new_tokens}
    print(racing.save({"benchmark": "decode", **settings, "results": results}, out))


if __name__ == "__main__":
    typer.run(main)

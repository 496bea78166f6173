"""Tokens a pass, speedup and cost of a pass by the length of the history.

    python -m benchmarks.long_context --dtypes float32 --threads 2 --out benchmarks/results/long_context.json

A prompt of so many tokens is a code prompt with others of the set before it. A model with fewer positions than the
longest prompt needs is stretched by YaRN (Peng et al. 2023, arXiv:2309.00071); the bundled one, trained on 1,024
tokens, has to be. Reading a long prompt takes longer than writing a hundred tokens, and no draft makes it shorter, so
a speedup is also given for what comes after the first token. The last line on stdout is one JSON document.
"""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

import lookahead
from benchmarks import step_time
from benchmarks.racing import (
    DTYPES,
    METHODS,
    MODES,
    PROMPTS,
    WARM,
    Unit,
    bootstrap,
    chosen,
    contest,
    load,
    methods,
    quiet_console,
    row,
    save,
    texts_of,
    typical,
    unit_of,
    whole_numbers,
)
from lookahead.bundled import BUNDLED

CONTEXTS = "128,1024,4096,8192"
NODES = (1, 8, 16, 32, 64)


def stretched(folder: Path, length: int, dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its tokenizer with positions up to ``length``; as it is where those it has are enough."""
    config = json.loads((folder / "config.json").read_text())
    trained = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if trained is None or trained >= length:
        return load(folder, dtype, device)
    if rope.get("rope_type", "default") != "default":
        raise typer.BadParameter(
            f"{folder} has RoPE of type {rope['rope_type']} for {trained} positions: expected plain RoPE, or positions "
            f"for {length} tokens. Give shorter --contexts."
        )
    yarn = {"rope_type": "yarn", "factor": length / trained, "original_max_position_embeddings": trained}
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        changed = config | {"max_position_embeddings": length, "rope_parameters": rope | yarn}
        (Path(copy) / "config.json").write_text(json.dumps(changed))
        return load(Path(copy), dtype, device)


def prompts_of(tokenizer: Any, texts: Sequence[str], context: int, count: int, device: Any) -> list[Unit]:
    """``count`` prompts of ``context`` tokens: each text with the ones before it, the first after the last."""
    rows = [tokenizer(text)["input_ids"] for text in texts]
    if sum(map(len, rows)) < context:
        raise typer.BadParameter(f"the prompts have {sum(map(len, rows))} tokens together: got --contexts {context}")
    found = []
    for index in range(min(count, len(rows))):
        tokens: list[int] = []
        before = index
        while len(tokens) < context:
            tokens = rows[before] + tokens
            before -= 1
        found.append(unit_of(index, [tokens[-context:]], device))
    return found


def measure(
    model: Any, table: dict[str, Any], given: Sequence[Unit], mode: str, new_tokens: int, rounds: int, tick: Any
) -> list[dict[str, Any]]:
    """Every method's figures, with those after the first token."""
    rest = given[WARM:]
    results = contest(model, table, rest, given[:WARM], MODES[mode], new_tokens, rounds, tick, apart=True)
    plain = results["plain"]
    keep = range(len(rest))
    rows = []
    for name, method in table.items():
        mine = results[name]
        ratios = [typical(plain.after[i]) / typical(mine.after[i]) for i in keep]
        prompts = [whole - after for i in keep for whole, after in zip(mine.seconds[i], mine.after[i], strict=True)]
        rows.append(
            {
                "method": name,
                "label": method.label,
                **row(results, name, keep, new_tokens, 1),
                "first_token_ms": 1e3 * statistics.median(prompts),
                "token_ms": 1e3 * statistics.median(typical(mine.after[i]) for i in keep) / (new_tokens - 1),
                "after_median": statistics.median(ratios),
                "after_interval": list(bootstrap(ratios)),
            }
        )
    return rows


def main(
    model_dir: Annotated[Path, typer.Option("--model", help="A model folder; default: the bundled one.")] = BUNDLED,
    contexts: Annotated[str, typer.Option(help="Comma-separated tokens of a prompt.")] = CONTEXTS,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 6,
    modes: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(MODES)}.")] = "greedy,t0.8",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32",
    method_names: Annotated[str, typer.Option("--methods", help=f"Comma-separated, or all: {', '.join(METHODS)}.")] = (
        "plain,lookup2,auto"
    ),
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of every method on every prompt.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Measure every length."""
    console = quiet_console(threads)
    lengths, names = sorted(whole_numbers(contexts)), chosen(method_names, METHODS, "method")
    wanted = chosen(modes, MODES, "mode")
    wanted_dtypes = chosen(dtypes, DTYPES, "dtype")
    table, _ = methods(names, device)
    lookahead.augment_all()
    texts = texts_of(PROMPTS / "code.jsonl")
    document: dict[str, Any] = {
        "benchmark": "long context",
        "model": "bundled" if model_dir == BUNDLED else str(model_dir),
        "device": device,
        "new_tokens": new_tokens,
        "prompts": prompts,
        "rounds": rounds,
        "passes": [],
        "rows": [],
    }
    for dtype in wanted_dtypes:
        model, tokenizer = stretched(model_dir, lengths[-1] + new_tokens, dtype, device)
        for context in lengths:
            given = prompts_of(tokenizer, texts, context, prompts + WARM, device)
            pass_ms = step_time.curve(model, context, NODES)
            document["passes"].append({"dtype": dtype, "context": context, "pass_ms": pass_ms})
            for mode in wanted:
                with Progress(console=console, transient=True) as progress:
                    turns = (rounds + 1) * (len(given) - WARM)
                    task = progress.add_task(f"{context} tokens, {mode}, {dtype}", total=turns)
                    rows = measure(model, table, given, mode, new_tokens, rounds, partial(progress.advance, task))
                document["rows"] += [{"context": context, "mode": mode, "dtype": dtype, **found} for found in rows]
                save(document, out)
                shown = Table(
                    "method", "S", "nodes", "speedup", "after its first token", title=f"{context}, {mode}, {dtype}"
                )
                for found in rows:
                    figures = (found[key] for key in ("S", "nodes", "speedup_median", "after_median"))
                    shown.add_row(found["label"], *(f"{figure:.2f}" for figure in figures))
                console.print(shown)
        del model
    print(save(document, out))


if __name__ == "__main__":
    typer.run(main)

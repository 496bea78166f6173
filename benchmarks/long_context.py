"""Tokens a pass, speedup and cost of a pass by the length of the prompt.

    python -m benchmarks.long_context --dtypes float32 --threads 2 --out build/bench/long_context.json

A prompt of so many tokens is a code prompt with others of the set before it. A model with fewer positions than the
longest prompt needs is stretched by YaRN (Peng et al. 2023, arXiv:2309.00071); the bundled one, trained on 1,024
tokens, has to be. Reading a long prompt takes longer than writing a hundred tokens, and no draft makes it shorter, so
a speedup is also given for what comes after the first token.
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

import lookahead
from benchmarks import options, step_time
from benchmarks.contenders import METHODS, WARM, Unit, methods, unit_of
from benchmarks.contest import Results, contest, row
from benchmarks.harness import Run, bootstrap, load, quiet_console, texts_of, typical, watched
from benchmarks.options import DTYPES, MODES, chosen, whole_numbers
from benchmarks.tables import show
from lookahead.bundled import BUNDLED

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
    ends = range(1, min(count, len(rows)) + 1)
    joined = ([token for row in (*rows[end:], *rows[:end]) for token in row] for end in ends)
    return [unit_of(index, [tokens[-context:]], device) for index, tokens in enumerate(joined)]


def figures(results: Results, name: str, new_tokens: int) -> dict[str, Any]:
    """One method's figures, with those after the first token."""
    after = [typical(calls.after) for calls in results[name]]
    ratios = [typical(plain.after) / mine for plain, mine in zip(results["plain"], after, strict=True)]
    first = [whole - later for calls in results[name] for whole, later in zip(calls.seconds, calls.after, strict=True)]
    return {
        **row(results, name, new_tokens),
        "first_token_ms": 1e3 * statistics.median(first),
        "token_ms": 1e3 * statistics.median(after) / (new_tokens - 1),
        "after_median": statistics.median(ratios),
        "after_interval": list(bootstrap(ratios)),
    }


def main(
    model_dir: options.ModelDir = None,
    contexts: Annotated[str, typer.Option(help="Comma-separated tokens of a prompt.")] = "128,1024,4096,8192",
    prompts: options.Prompts = 6,
    modes: options.Modes = "greedy,t0.8",
    dtypes: options.Dtypes = "float32",
    names: Annotated[str, typer.Option("--methods", help=f"Comma-separated: {', '.join(METHODS)}.")] = "lookup2,auto",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 128,
    rounds: options.Rounds = 1,
    threads: options.Threads = None,
    device: str = "cpu",
    out: options.Out = None,
) -> None:
    """Measure every length."""
    console = quiet_console(threads)
    wanted_modes, wanted_dtypes = chosen(modes, MODES, "mode"), chosen(dtypes, DTYPES, "dtype")
    lengths, sources = sorted(whole_numbers(contexts)), texts_of("code")
    table, _ = methods(chosen(names, METHODS, "method"), device)
    lookahead.augment_all()
    settings = {"model": model_dir, "device": device, "new_tokens": new_tokens, "prompts": prompts}
    run = Run("long context", out, **settings, rounds=rounds, passes=[], rows=[])
    for dtype in wanted_dtypes:
        model, tokenizer = stretched(model_dir or BUNDLED, lengths[-1] + new_tokens, dtype, device)
        for context in lengths:
            given = prompts_of(tokenizer, sources, context, prompts + WARM, device)
            place: dict[str, Any] = {"context": context, "dtype": dtype}
            run.add("passes", [{**place, "pass_ms": step_time.curve(model, context, NODES)}])
            for mode in wanted_modes:
                title = f"{context} tokens, {mode}, {dtype}"
                texts, watch = (given[WARM:], given[:WARM]), partial(watched, console, title)
                results = contest(model, table, texts, MODES[mode], new_tokens, rounds, apart=True, watch=watch)
                rows = [
                    {**place, "mode": mode, "method": name, "label": method.label} | figures(results, name, new_tokens)
                    for name, method in table.items()
                ]
                run.add("rows", rows)
                show(console, title, "method, S, nodes, speedup, later tokens", rows)
        del model
    run.finish()


if __name__ == "__main__":
    typer.run(main)

"""Every way to decode against plain ``generate``: interleaved in one process, on the same weights and prompts.

    python -m benchmarks.race --sets code --modes greedy,t0.8 --dtypes float32 --out benchmarks/results/race-code.json
    python -m benchmarks.race --first-call --out benchmarks/results/first_call.json
    python -m benchmarks.race --questions question.jsonl --answers ours.jsonl --answers-baseline plain.jsonl

A speedup is the median over calls of (plain's time / the method's time), with its 95% bootstrap interval; a call's time
is the fastest of up to three rounds, or the median of more. The end-of-text token is off, so that every text has full
length. S is tokens a pass and row. Each result is also given as a share of its ceiling S t(1)/t(T), the speedup if only
passes took time; what ``generate`` does between plain passes is not in it, so a share can pass 100%. What is not run
is listed with its reason. The last line on stdout is one JSON document.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

import lookahead
from benchmarks import first_call, specbench, theory
from benchmarks.racing import (
    DTYPES,
    METHODS,
    MODES,
    SETS,
    Method,
    PromptSet,
    Result,
    chosen,
    contest,
    load,
    methods,
    quiet_console,
    row,
    save,
    units,
    whole_numbers,
)
from lookahead import load_model


def rows_of(
    results: dict[str, Result], table: dict[str, Method], mode: str, new_tokens: int, batch: int, card: dict[str, Any]
) -> list[dict[str, Any]]:
    """All figures of a contest; greedy texts of single prompts also apart by whether plain's ends in a loop."""
    looping = results["plain"].looping
    groups = {"all": list(range(len(looping)))}
    if batch == 1 and mode == "greedy" and any(looping):
        groups["looping"] = [i for i, found in enumerate(looping) if found]
        groups["not looping"] = [i for i, found in enumerate(looping) if not found]
    rows = []
    for group, members in groups.items():
        for name, method in table.items() if members else ():
            found = row(results, name, members, new_tokens, batch)
            found["ceiling"] = theory.ceiling(card, batch, found["S"], found["nodes"])
            found["share_of_ceiling"] = found["speedup_median"] / found["ceiling"]
            found["same_draws"] = method.same_draws or not MODES[mode]["do_sample"]
            rows.append({"method": name, "label": method.label, "group": group, **found})
    return rows


def modes_of(kind: PromptSet, wanted: list[str]) -> list[str]:
    """The modes of a set: those that are wanted, of its own if it has some; its own if none of them is wanted."""
    if kind.modes is None:
        return wanted
    return [mode for mode in kind.modes if mode in wanted] or list(kind.modes)


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """A section's table."""
    table = Table("texts", "method", "speedup", "95%", "tokens/s", "S", "nodes", "of ceiling", "differ", title=title)
    for found in rows:
        low, high = found["speedup_interval"]
        table.add_row(
            found["group"],
            found["label"],
            f"{found['speedup_median']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{found['tokens_per_s_median']:.0f}",
            f"{found['S']:.2f}",
            f"{found['nodes']:.1f}",
            f"{found['share_of_ceiling']:.0%}",
            f"{found['texts_that_differ']}/{found['texts']}",
        )
    console.print(table)


def main(
    model_dir: Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts of each set; default: 20, or all questions.")] = None,
    sets: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(SETS)}.")] = "code",
    modes: Annotated[
        str, typer.Option(help=f"Comma-separated, or all: {', '.join(MODES)}; some sets have their own.")
    ] = ("greedy,penalty,t0.7,t0.8,t1.0"),
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    batches: Annotated[str, typer.Option(help="Comma-separated rows of a call.")] = "1",
    method_names: Annotated[
        str, typer.Option("--methods", help=f"Comma-separated, or all: {', '.join(METHODS)}.")
    ] = "all",
    new_tokens: Annotated[int, typer.Option(help="Tokens to write; sets of short outputs have their own.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of every method on every prompt.")] = 2,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    device: str = "cpu",
    assistant: Annotated[Path | None, typer.Option(help="A smaller model's folder, for assistant_model.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of history that the theory card's passes have.")] = 256,
    first: Annotated[bool, typer.Option("--first-call", help="Time first calls in fresh processes instead.")] = False,
    repeats: Annotated[int, typer.Option(help="Fresh processes for each method with --first-call.")] = 7,
    ours: Annotated[str, typer.Option(help="Our method with --first-call and --questions.")] = "auto",
    questions: Annotated[Path | None, typer.Option(help="Answer Spec-Bench's question.jsonl instead.")] = None,
    answers: Annotated[Path | None, typer.Option(help="Where our answers go.")] = None,
    answers_baseline: Annotated[Path | None, typer.Option(help="Where plain generate's answers go.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Run the race."""
    console = quiet_console(threads)
    wanted_modes = chosen(modes, MODES, "mode")
    wanted_dtypes = chosen(dtypes, DTYPES, "dtype")
    chosen(ours, METHODS, "method")
    settings: dict[str, Any] = {"model": str(model_dir or "bundled"), "device": device, "new_tokens": new_tokens}
    if first:
        cases = {
            dtype: first_call.compare(ours, model_dir, dtype, device, threads, new_tokens, repeats)
            for dtype in wanted_dtypes
        }
        settings |= {"benchmark": "first call", "method": ours}
        print(save({**settings, "results": cases}, out))
        return
    if questions is not None:
        settings["mode"] = wanted_modes[0]
        print(save(_answer(settings, questions, prompts, wanted_dtypes[0], ours, answers, answers_baseline), out))
        return

    wanted_sets = chosen(sets, SETS, "set")
    names = chosen(method_names, METHODS, "method")
    wanted_batches = whole_numbers(batches)
    methods(names, device, assistant)  # a strategy that cannot be made raises before a model is loaded
    lookahead.augment_all()
    count = prompts or 20
    settings |= {"prompts": count, "rounds": rounds, "assistant": str(assistant) if assistant else None}
    document: dict[str, Any] = {"benchmark": "race", **settings, "theory": {}, "rows": [], "skipped": []}
    for dtype in wanted_dtypes:
        model, tokenizer = load(model_dir, dtype, device)
        helper = None
        if assistant is not None:
            helper, _ = load_model(assistant, dtype=getattr(torch, dtype), device=device)
            helper.generation_config.eos_token_id = None
        table, skipped = methods(names, device, helper)
        document["skipped"] += [{"method": name, "dtype": dtype, "reason": why} for name, why in skipped.items()]
        card = document["theory"][dtype] = theory.card(model, wanted_batches, context)
        for set_name in wanted_sets:
            kind = SETS[set_name]
            length = min(new_tokens, kind.new_tokens or new_tokens)
            for batch in wanted_batches:
                able = {name: method for name, method in table.items() if batch == 1 or not method.one_row}
                document["skipped"] += [
                    {"method": name, "dtype": dtype, "set": set_name, "batch": batch, "reason": "single prompts only"}
                    for name in table
                    if name not in able
                ]
                given, warm = units(model, tokenizer, kind.source, count, batch, length)
                for mode in modes_of(kind, wanted_modes):
                    place = {"set": set_name, "mode": mode, "dtype": dtype, "batch": batch, "new_tokens": length}
                    turns = kind.rounds * rounds
                    with Progress(console=console, transient=True) as progress:
                        task = progress.add_task(f"{set_name}, {mode}, {dtype}", total=len(given) * (turns + 1))
                        results = contest(
                            model,
                            able,
                            given,
                            warm,
                            MODES[mode],
                            length,
                            turns,
                            partial(progress.advance, task),
                        )
                    rows = rows_of(results, able, mode, length, batch, card)
                    document["rows"] += [{**place, "rounds": turns, **found} for found in rows]
                    save(document, out)
                    show(console, f"{set_name}, {mode}, {dtype}, batch {batch}, {length} tokens", rows)
        del model, helper
    print(save(document, out))


def _answer(
    settings: dict[str, Any],
    questions: Path,
    count: int | None,
    dtype: str,
    ours: str,
    answers: Path | None,
    answers_baseline: Path | None,
) -> dict[str, Any]:
    """Answer the questions with the contenders that have a file to go to."""
    table, _ = methods([ours], settings["device"])
    contenders = {
        name: (table[name], out) for name, out in ((ours, answers), ("plain", answers_baseline)) if out is not None
    }
    if not contenders:
        raise typer.BadParameter("--questions needs --answers or --answers-baseline")
    lookahead.augment_all()
    folder = None if settings["model"] == "bundled" else Path(settings["model"])
    model, tokenizer = load(folder, dtype, settings["device"], full_length=False)
    model_id = f"{Path(settings['model']).name}-{dtype}"
    results = specbench.answer_all(
        model,
        tokenizer,
        contenders,
        specbench.read_questions(questions, count),
        MODES[settings["mode"]],
        settings["new_tokens"],
        model_id,
        lambda items: iter(track(items, description="questions", transient=True, console=Console(stderr=True))),
    )
    return {"benchmark": "questions", **settings, "dtype": dtype, "questions": questions.name, "results": results}


if __name__ == "__main__":
    typer.run(main)

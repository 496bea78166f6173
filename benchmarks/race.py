"""Every way to decode against plain ``generate``: interleaved in one process, on the same weights and prompts.

    python -m benchmarks.race --sets code,no-loop --modes greedy,t0.8 --threads 2 --out build/bench/race.json

A speedup is the median over calls of (plain's time / the method's time), with its 95% bootstrap interval; a call's time
is the fastest of up to three rounds, or the median of more. The end-of-text token is off, so that every text has full
length. S is tokens a pass and sequence. Each result is also given as a share of its ceiling S t(1)/t(T), the speedup if
only passes took time; what ``generate`` does between plain passes is not in it, so a share can pass 100%. What is not
run is listed with its reason. ``--sets`` also takes files of your own, JSON lines with a ``prompt``, and Spec-Bench's
questions; a chat model gets them by its chat template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import lookahead
from benchmarks import contest, options, theory
from benchmarks.contest import NAMES, SETS, PromptSet, methods, prompt_sets, units
from benchmarks.harness import Run, load, quiet_console
from benchmarks.options import DTYPES, MODES, chosen, whole_numbers


def modes_of(kind: PromptSet, wanted: list[str]) -> list[str]:
    """The modes of a set: those that are wanted, of its own if it has some; its own if none of them is wanted."""
    if kind.modes is None:
        return wanted
    return [mode for mode in kind.modes if mode in wanted] or list(kind.modes)


@dataclass(frozen=True)
class Asked:
    """What is decoded: sets of prompts (the first ``prompts`` of each) in modes and batch sizes, and how often."""

    sets: dict[str, PromptSet]
    modes: list[str]
    batches: list[int]
    prompts: int
    new_tokens: int
    rounds: int


def race_model(
    console: Console,
    run: Run,
    loaded: tuple[Any, Any],
    names: Sequence[str],
    asked: Asked,
    place: dict[str, Any],
    context: int = 256,
    **beside: Any,
) -> None:
    """Race on one model (``loaded`` with its tokenizer); ``place`` says which and in which dtype, in every row."""
    model, tokenizer = loaded
    table, skipped = methods(names, model.device.type, **beside)
    run.add("skipped", [{"method": name, **place, "reason": why} for name, why in skipped.items()])
    card = run.document["theory"][" ".join(place.values())] = theory.card(model, asked.batches, context)
    for (name, kind), batch in [(each, batch) for each in asked.sets.items() for batch in asked.batches]:
        length = min(asked.new_tokens, kind.new_tokens or asked.new_tokens)
        able = {key: method for key, method in table.items() if batch == 1 or not method.one_row}
        why = {**place, "set": name, "batch": batch, "reason": "single prompts only"}
        run.add("skipped", [{"method": key, **why} for key in table if key not in able])
        texts = units(model, tokenizer, kind.source, asked.prompts, batch, length)
        for mode in modes_of(kind, asked.modes):
            held = {"set": name, "mode": mode, **place, "batch": batch, "new_tokens": length}
            run.add("rows", contest.race(console, model, able, texts, held, kind.rounds * asked.rounds, card))


def main(
    model_dir: options.ModelDir = None,
    prompts: options.Prompts = 20,
    sets: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(SETS)}; or .jsonl files.")] = "code",
    modes: options.Modes = "greedy,penalty,t0.7,t0.8,t1.0",
    dtypes: options.Dtypes = "float32,bfloat16",
    batches: Annotated[str, typer.Option(help="Comma-separated sequences of a call.")] = "1",
    names: Annotated[str, typer.Option("--methods", help=f"Comma-separated, or all: {', '.join(NAMES)}.")] = "all",
    new_tokens: options.NewTokens = 128,
    rounds: options.Rounds = 2,
    threads: options.Threads = None,
    device: str = "cpu",
    assistant: Annotated[Path | None, typer.Option(help="A smaller model's folder: the model that drafts.")] = None,
    head: Annotated[Path | None, typer.Option(help="An EAGLE head's folder.")] = None,
    heads: Annotated[Path | None, typer.Option(help="The folder of Medusa's heads.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in the KV cache of the theory card's passes.")] = 256,
    out: options.Out = None,
) -> None:
    """Run the race; sets of short outputs have their own number of tokens, and some sets their own modes."""
    console = quiet_console(threads)
    asked = Asked(prompt_sets(sets), chosen(modes, MODES, "mode"), whole_numbers(batches), prompts, new_tokens, rounds)
    wanted_dtypes, wanted = chosen(dtypes, DTYPES, "dtype"), chosen(names, NAMES, "method")
    methods(wanted, device)  # a strategy that cannot be made raises before a model is loaded
    lookahead.augment_all()
    settings = {
        "model": model_dir,
        "assistant": assistant,
        "head": head,
        "heads": heads,
        "device": device,
        "new_tokens": new_tokens,
    }
    run = Run("race", out, **settings, prompts=prompts, rounds=rounds, theory={}, rows=[], skipped=[])
    for dtype in wanted_dtypes:
        loaded = load(model_dir, dtype, device)
        helper = load(assistant, dtype, device)[0] if assistant else None
        beside = {"assistant": helper, "head": head, "heads": heads}
        race_model(console, run, loaded, wanted, asked, {"dtype": dtype}, context, **beside)
        del loaded, helper
    run.finish()


if __name__ == "__main__":
    typer.run(main)

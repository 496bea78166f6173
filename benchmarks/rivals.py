"""This library on a CPU against llama.cpp and OpenVINO GenAI, each way in a process of its own.

    python -m benchmarks.rivals --model DIR --gguf BF16.gguf --gguf Q8_0.gguf --modes greedy,t0.8

Rivals run with and without their own prompt lookup: llama-cpp-python, which pip builds for this processor, and
openvino-genai; one that is missing is listed. The folder and the files hold the same weights; what a rival takes from a
file in its own precisions, the library rounds to each of ``--precisions``. Every prompt goes to all ways in turn.
Tokens a second count behind the first token, and from the call on, prompt included; memory is the process's most.
"""

import statistics
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from benchmarks import options
from benchmarks.compare import Side
from benchmarks.harness import ROOT, Run, in_turn, quiet_console, texts_of, watched
from benchmarks.options import MODES, chosen
from benchmarks.rivals_worker import RIVALS
from benchmarks.tables import show
from lookahead.chat_format import prompt_ids

PRECISIONS = ("bfloat16", "int8", "int4")
COLUMNS = "model, way, mode, tokens/s, with the prompt, first token ms, MB"


def figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over prompts of what one way answered in one mode."""
    after = [(len(answer["tokens"]) - 1) / (answer["last_s"] - answer["first_s"]) for answer in answers]
    return {
        "tokens_per_s_median": statistics.median(after),
        "whole_per_s_median": statistics.median(len(answer["tokens"]) / answer["last_s"] for answer in answers),
        "first_token_ms": 1e3 * statistics.median(answer["first_s"] for answer in answers),
        "memory_mb": max(answer["memory_mb"] for answer in answers),
        "texts": [answer["tokens"] for answer in answers],
    }


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.", exists=True, file_okay=False)],
    gguf: Annotated[list[Path], typer.Option(help="The same weights as GGUF files.", exists=True, dir_okay=False)],
    precisions: Annotated[str, typer.Option(help=f"Of the library: {', '.join(PRECISIONS)}, or all.")] = "all",
    modes: options.Modes = "greedy,t0.8",
    source: Annotated[str, typer.Option("--set", help="A file of prompts, or of prompts/ without suffix.")] = "chat",
    prompts: options.Prompts = 8,
    new_tokens: options.NewTokens = 96,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    out: options.Out = None,
) -> None:
    """Race all ways."""
    console, wanted = quiet_console(None), chosen(modes, MODES, "mode")
    kinds = [f"{name} {way}" for name in chosen(precisions, PRECISIONS, "precision") for way in ("plain", "lookahead")]
    ways = {way: (way, gguf[0]) for way in kinds}  # and files
    skipped = [{"way": way, "reason": "it is not installed"} for way in RIVALS if not find_spec(RIVALS[way])]
    rivals = [f"{way}{drafts}" for way in RIVALS if find_spec(RIVALS[way]) for drafts in ("", " lookup")]
    ways |= {f"{way}, {file.stem}": (way, file) for file in gguf for way in rivals}
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [prompt_ids(tokenizer, text, raw=False) for text in texts_of(source)[: prompts + 1]]
    held = {"threads": threads, "context": max(map(len, texts)) + new_tokens + 64}
    settings = {"set": source, "new_tokens": new_tokens, **held}
    run = Run("rivals", out, model=model.name, **settings, rows=[], skipped=skipped)
    with tempfile.TemporaryDirectory() as caches, ExitStack() as stack:
        sides = {way: stack.enter_context(Side(ROOT, f"{caches}/{way}", "rivals_worker.py")) for way in ways}
        for name, (way, file) in list(ways.items()):
            try:
                sides[name].ask({"way": way, "model": str(model), "gguf": str(file), **held})
            except RuntimeError:
                skipped.append({"way": name, "reason": f"it does not read {file.name}"})
                del ways[name]
        for mode in wanted:
            found: dict[str, list[Any]] = {way: [] for way in ways}
            for number, text in watched(console, mode, list(enumerate(texts))):
                request = {"prompt": text, "new_tokens": new_tokens, "seed": number}
                for way in in_turn(ways, number):
                    answer = sides[way].ask(request | {"temperature": MODES[mode].get("temperature", 0.0)})
                    found[way] += [answer] if number else []  # the first prompt warms up
            run.add("rows", [{"model": model.name, "way": way, "mode": mode, **figures(found[way])} for way in ways])
    show(console, "tokens a second", COLUMNS, run.document["rows"])
    run.finish()


if __name__ == "__main__":
    typer.run(main)

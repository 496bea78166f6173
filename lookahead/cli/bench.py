"""``lookahead bench``: what lookahead gains or loses on a model and prompts of the user's own."""

import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.text import Text
from typer import Exit, Option

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead._version import versions
from lookahead.cli import common
from lookahead.cli.options import JsonOption, ModelOptions, NewTokensOption
from lookahead.cli.prompts import PROMPTS, PromptsOption, read_prompts, read_questions
from lookahead.cli.racing import LABELS, Race, Row, rows_of
from lookahead.strategies.lookahead import Lookahead

_BAR = 40  # cells of the longest bar
_QUESTIONS = "Questions in Spec-Bench's format: JSON lines with category and turns, of which the first is asked."


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    prompts: PromptsOption = None
    questions: Annotated[Path | None, Option(metavar="FILE", help=_QUESTIONS)] = None
    new_tokens: NewTokensOption = 96
    modes: Annotated[str, Option(help="greedy, and t with a temperature, as in t0.8; separated by commas.")] = (
        "greedy,t0.8"
    )
    minutes: Annotated[float, Option(min=0.05, help="About how long it may take; texts get fewer and shorter.")] = 1.5
    out: Annotated[Path | None, Option(metavar="FILE", help="Save all figures as JSON.")] = None
    plot: Annotated[Path | None, Option(metavar="FILE", help="Save the bars as a picture; needs matplotlib.")] = None
    as_json: JsonOption = False


def bench(options: Options) -> None:
    """Race plain decoding, prompt lookup and lookahead on your model and prompts, in less than two minutes."""
    modes = [_temperature(mode) for mode in options.modes.split(",")]
    if options.prompts and options.questions:
        raise LookaheadError("--prompts and --questions both say what is asked: give one of them.")
    if options.plot is not None:
        _matplotlib()
    common.check_file("--out", options.out)
    common.check_file("--plot", options.plot, common.PICTURES)
    questions = read_questions(options.questions) if options.questions else []
    texts = [("prompts", text) for text in (read_prompts(options.prompts) if options.prompts else PROMPTS)]
    model, tokenizer = options.load()
    given = [(kind, _inputs(tokenizer, text, model, chat=bool(questions))) for kind, text in questions or texts]
    race = Race(model, given, modes, options.new_tokens, 60.0 * options.minutes)
    with common.progress() as progress:
        runs = race.run(common.bar(progress, "Racing"))
    rows = rows_of(runs)
    document = {
        "model": options.model_name,
        "dtype": common.dtype_name(model),
        "device": str(model.device),
        "machine": _machine(model.device),
        "argv": sys.argv[1:],
        "strategy": Lookahead().to_dict(),
        "new_tokens": race.new_tokens,
        "told": race.told,
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    if options.out is not None:
        write_text(options.out, json.dumps(document | {"versions": versions()}, indent=1) + "\n")
    if options.plot is not None:
        _draw(rows, options.plot)
    common.report(document, options.as_json, lambda console: _show(console, race, rows))
    if any(run.verdict == "bug" for run in runs):
        raise Exit(1)


def _temperature(mode: str) -> float | None:
    """The temperature that a mode names; None is greedy decoding."""
    name = mode.strip()
    if name == "greedy":
        return None
    try:
        found = float(name.removeprefix("t")) if name.startswith("t") else 0.0
    except ValueError:
        found = 0.0
    if not 0.0 < found < 100.0:
        raise LookaheadError(f"--modes names {name!r}: expected greedy, or t and a temperature above 0, as in t0.8.")
    return found


def _inputs(tokenizer: Any, text: str, model: Any, *, chat: bool) -> dict[str, torch.Tensor]:
    if chat and tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return common.encode(tokenizer, text, model)


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"platform": platform.platform(), "threads": torch.get_num_threads()}
    found["processor"] = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if "model name" in line]
        found["processor"], found["cores"] = (names or [found["processor"]])[0], len(names)
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _show(console: Console, race: Race, rows: list[Row]) -> None:
    cells = [
        (
            row.kind,
            row.mode,
            LABELS[row.method],
            f"{row.speedup:.2f}x",
            f"{row.least:.2f}-{row.most:.2f}",
            f"{row.tokens_per_second:.1f}",
            "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
            row.texts,
        )
        for row in rows
    ]
    headers = ("prompts", "mode", "method", "speed", "single texts", "tokens/s", "tokens/pass", "texts")
    console.print(common.columns(headers, cells))
    console.print()
    most = max(row.speedup for row in rows)
    for row in rows:
        bar = "█" * max(1, round(_BAR * row.speedup / most))
        style = "dim" if row.method == "plain" else "green" if row.speedup >= 1.0 else "red"
        label = f"{row.kind} {row.mode} {LABELS[row.method]}"
        console.print(Text(f"{label:<38} ").append(bar, style=style).append(f" {row.speedup:.2f}x"))
    console.print()
    for line in race.told:
        console.print(line)
    ours = [row for row in rows if row.method == "lookahead"]
    for row in ours:
        verdict = "a win" if row.speedup > 1.02 else "a loss" if row.speedup < 0.98 else "no difference"
        console.print(Text(f"{row.kind}, {row.mode}: lookahead is {verdict}, {row.speedup:.2f}x.", style="bold"))
        console.print(row.explained)
    if any(row.speedup < 0.98 for row in ours):
        console.print(
            "A loss is mostly a pass that costs more here for several tokens than for one, or text that repeats "
            "nothing. lookahead tune --model DIR measures the first; docs/performance.md says what helps."
        )


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LookaheadError('--plot needs matplotlib: pip install "lookahead-decoding[bench]".') from error
    return Figure


def _draw(rows: list[Row], file: Path) -> None:
    figure = _matplotlib()(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.kind}, {row.mode}, {LABELS[row.method]}" for row in rows][::-1]
    speeds = [row.speedup for row in rows][::-1]
    colours = ["#2a7f62" if row.method == "lookahead" else "#9aa5b1" for row in rows][::-1]
    axes.barh(names, speeds, color=colours)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    for place, speed in enumerate(speeds):
        axes.annotate(f" {speed:.2f}x", (speed, place), va="center")
    axes.set_xlabel("speed against plain generate()")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise LookaheadError(f"--plot {file} cannot be written: {error}.") from error

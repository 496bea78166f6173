"""The command-line options that the benchmarks share, and how lists in them are read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = ("float32", "bfloat16", "float16")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.1},
    **{f"t{t}": {"do_sample": True, "temperature": t, "top_k": 0} for t in (0.7, 0.8, 1.0, 1.5)},
}
ModelDir = Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")]
Modes = Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(MODES)}.")]
Dtypes = Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(DTYPES)}.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Prompts = Annotated[int, typer.Option(min=1, help="How many prompts.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to write.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed calls of every method on every prompt.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON here.")]


def chosen(given: str, known: Iterable[str], what: str) -> list[str]:
    """Read a comma-separated option; ``all`` is everything known."""
    known = list(known)
    names = known if given == "all" else [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{', '.join(unknown) or 'nothing'} is no {what}: expected some of {', '.join(known)}")
    return names


def whole_numbers(given: str) -> list[int]:
    """Read a comma-separated option of whole numbers."""
    return [int(part) for part in given.split(",")]

"""All that only a CUDA device can show, in one command of less than nine minutes.

    python -m benchmarks.gpu --out build

Exactness, latency curves against what memory allows, captures, attention over long histories, races at large models'
costs and of a pretrained model if ``benchmarks.real`` has built it, and the tests that need a GPU. Each part runs in a
process of its own under its own limit of time; whatever happens to it, the others run. ``gpu.json`` is written anew
with every row, so a run that is cut short leaves what it has measured. At the end stands a table of what held and what
did not.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_parts import PARTS, Bench, Row, measure
from benchmarks.harness import ROOT, Run, quiet_console
from benchmarks.options import chosen

_COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
_SECONDS = 535  # of all parts together


def alone(name: str, bench: Bench, limit_s: float, add: Callable[[Row], None]) -> str | None:
    """Run a part in a process of its own, and ``add`` its rows; returns what went wrong."""
    command = [*_COMMAND, "--only", name, "--device", bench.device, *(["--quick"] if bench.quick else [])]
    late = threading.Event()
    error: str | None = "it did not say how it ended"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                row = json.loads(line) if line.startswith("{") else {}
                if "error" in row:
                    error = row["error"]
                elif row:
                    add(row)
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        return f"stopped after {limit_s:.0f} s"
    return f"the process ended with {status}" if status else error


def together(name: str, bench: Bench, limit_s: float, add: Callable[[Row], None]) -> str | None:
    """Run a part in this process, whatever time it takes."""
    try:
        for row in measure(name, bench):
            add(row)
    except Exception as error:  # whatever it is, the other parts are to run
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


class Claim(NamedTuple):
    """What ought to hold of all ``values``; there are none where it was not measured."""

    text: str
    values: list[float]
    least: float = -math.inf
    most: float = math.inf

    @property
    def held(self) -> bool | None:
        return all(self.least <= value <= self.most for value in self.values) if self.values else None

    def to_dict(self) -> Row:
        worst = max if self.least == -math.inf else min
        return {"claim": self.text, "worst": worst(self.values, default=None), "held": self.held}


def claims(parts: dict[str, Any]) -> list[Claim]:
    """What the parts' rows are to show."""

    def rows(part: str, **wanted: Any) -> list[Row]:
        found = [row for name, known in parts.items() if name.startswith(part) for row in known["rows"]]
        return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]

    def ways(row: Row, *names: str) -> Row:
        place = {"history": row["history"], "nodes": row["nodes"]}
        return min((other for name in names for other in rows("attention", way=name, **place)), key=lambda r: r["ms"])

    exact, captured, split = rows("exactness"), rows("curves", what="capture"), rows("attention", way="split")
    faster = [(ways(row, "sdpa", "packed")["ms"] / row["ms"], row) for row in split]
    auto, static = rows("races", method="auto"), rows("races", method="static")
    greedy = {row["model"]: row["speedup_median"] for row in auto if row["race"] == "greedy"}
    floors = [row["pass_ms"]["1"] / row["floor_ms"] for row in rows("curves", what="curve")]
    return [
        Claim("float32: no text differs", [row["differ"] for row in exact if row["dtype"] == "float32"], most=0),
        Claim(
            "bfloat16: texts differ by rounding only", [r["bugs"] for r in exact if r["dtype"] == "bfloat16"], most=0
        ),
        Claim("(how many differ in bfloat16)", [sum(r["differ"] for r in exact if r["dtype"] == "bfloat16")]),
        Claim("every size of pass is a CUDA graph", [row["route"] == "cuda graphs" for row in captured], least=1),
        Claim("first passes of a size: at most 1000 ms", [max(row["first_ms"]) for row in captured], most=1000.0),
        Claim("t(1): at most 1.6 times what memory allows", floors, most=1.6),
        Claim("split attention is faster than SDPA", [rate for rate, r in faster if r["nodes"] > 1], 1.0),
        Claim("(one node goes to the same kernel: 0.9)", [rate for rate, r in faster if r["nodes"] == 1], 0.9),
        Claim("and as exact", [r["off_by"] / (ways(r, "packed")["off_by"] or 1.0) for r in split], most=2.0),
        Claim("automatic: at least 0.98 times plain", [row["speedup_median"] for row in auto], least=0.98),
        Claim("automatic: faster than compiled", [greedy[r["model"]] / r["speedup_median"] for r in static], least=1.0),
        Claim("tests: none fails", [row["failed"] or row["status"] for row in rows("tests")], most=0),
        Claim("tests: some pass", [row["passed"] for row in rows("tests")], least=1),
        Claim("every part ran to its end", [part["error"] is not None for part in parts.values()], most=0),
    ]


def told(claim: Row, no: str) -> tuple[str, str, str]:
    """A claim as tables print it: its text, the worst value, and whether it held."""
    worst = "" if claim["worst"] is None else f"{claim['worst']:.4g}"
    return claim["claim"], worst, {None: "not measured", True: "yes", False: no}[claim["held"]]


def show(console: Console, document: Row) -> None:
    """What held and what did not, and how each part ended."""
    table = Table("claim", "worst", "held", title=f"{document['machine']['gpu'] or document['device']}")
    for row in document["claims"]:
        table.add_row(*told(row, "[bold red]NO"))
    console.print(table)
    for name, part in document["parts"].items():
        console.print(f"{name}: {len(part['rows'])} rows in {part['seconds']:.0f} s, {part['error'] or 'complete'}")


def main(
    out: Annotated[Path, typer.Option(help="Folder for gpu.json.")] = Path("build"),
    device: str = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, to test the parts themselves.")] = False,
    parts: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(PARTS)}.")] = "all",
    isolated: Annotated[bool, typer.Option(help="A process and a limit of time for each part.")] = True,
    only: Annotated[str | None, typer.Option(hidden=True, help="Print the rows of one part.")] = None,
) -> None:
    """Measure all parts, and say what held."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        print(f"No CUDA device: torch {torch.__version__} sees none. See: --device cpu --quick", file=sys.stderr)
        raise typer.Exit(1)
    console, bench = quiet_console(None), Bench(device, quick)
    if only is not None:
        error = together(only, bench, math.inf, lambda row: print(json.dumps(row), flush=True))
        print(json.dumps({"error": error}), flush=True)
        return
    names, end = chosen(parts, PARTS, "part"), time.monotonic() + _SECONDS
    run = Run("gpu", out / "gpu.json", device=device, quick=quick, parts={}, claims=[])
    for name in names:
        part = run.document["parts"][name] = {"rows": [], "error": None, "seconds": 0.0}
        start, limit = time.monotonic(), min(PARTS[name][0], end - time.monotonic())

        def add(row: Row, part: Row = part) -> None:
            part["rows"].append(row)
            run.save()

        console.print(f"{name}: at most {limit:.0f} s")
        part["error"] = (alone if isolated else together)(name, bench, limit, add)
        part["seconds"] = time.monotonic() - start
        run.document["claims"] = [claim.to_dict() for claim in claims(run.document["parts"])]
        run.save()
    show(console, run.document)
    run.finish()


if __name__ == "__main__":
    typer.run(main)

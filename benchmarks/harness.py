"""What every benchmark shares: the console, the JSON document that a run leaves, models, prompts and statistics."""

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress

import lookahead

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "benchmarks" / "prompts"
RESULTS = ROOT / "benchmarks" / "results"


def quiet_console(threads: int | None) -> Console:
    """A console on stderr, wide enough for the tables; sets torch's threads and silences transformers."""
    if threads:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=True)
    console.width = max(console.width, 140)
    return console


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; what it yields is to be called after each of ``total`` units of work."""
    with Progress(console=console, transient=True) as bar:
        yield partial(bar.advance, bar.add_task(title, total=total))


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; ``+changes`` is added if code differs from it, ``unknown`` stands for no commit."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *command], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # Results change while they are measured one after the other.
    code = ("--", ".", ":!benchmarks/results", ":!BENCHMARKS.md")
    changes = git("status", "--porcelain", "--untracked-files=no", *code)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changes else "")


def is_dirty(commit: str) -> bool:
    """Whether a stamp names no commit from which the run can be repeated."""
    return commit.endswith("+changes") or commit == "unknown"


def machine() -> dict[str, Any]:
    """Machine, versions, commit and argv of this run."""
    cpu, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "machine": {
            "cpu": cpu,
            "cores": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "lookahead": version("lookahead-decoding"),
        },
        "commit": commit_of(ROOT),
        "argv": sys.orig_argv[1:],
    }


class Run:
    """The JSON document of one run, saved whenever something is added.

    Args:
        benchmark: the kind of document, by which the report knows it.
        out: the file; None writes none.
        settings: what was asked for; lists among them take in what is measured.

    Raises:
        typer.BadParameter: the file is among the published results, and the code differs from its commit.
    """

    def __init__(self, benchmark: str, out: Path | None, **settings: Any) -> None:
        self._out = out
        if "model" in settings:
            settings["model"] = str(settings["model"] or "bundled")
        self.document = {"benchmark": benchmark, **settings, **machine()}
        commit = self.document["commit"]
        if out is not None and is_dirty(commit) and out.resolve().is_relative_to(RESULTS):
            raise typer.BadParameter(
                f"--out {out} is among the published results, and the code is at {commit}: expected a commit without "
                "changes. Commit them first, or write to build/."
            )

    def add(self, part: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to a list of the document."""
        self.document[part].extend(rows)
        self.save()

    def save(self) -> str:
        """Write the document as it is, and return its JSON."""
        text = json.dumps(self.document)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(text + "\n")
        return text

    def finish(self) -> None:
        """Save, and print the document as the last line on stdout."""
        print(self.save())


def load(model_dir: Path | None, dtype: str, device: str = "cpu", full_length: bool = True) -> tuple[Any, Any]:
    """A model (None: the bundled one) and its tokenizer; ``full_length`` switches its end-of-text token off."""
    kind = getattr(torch, dtype)
    if model_dir is None:
        model, tokenizer = lookahead.load_bundled(dtype=kind, device=device)
    else:
        model, tokenizer = lookahead.load_model(model_dir, dtype=kind, device=device)
    config = model.generation_config
    if config.pad_token_id is None:
        pad = tokenizer.pad_token_id
        config.pad_token_id = pad if pad is not None else (tokenizer.eos_token_id or 0)
    if full_length:
        config.eos_token_id = None
    return model, tokenizer


def texts_of(source: str) -> list[str]:
    """The prompts of a file in ``prompts/``, named without its suffix."""
    return [json.loads(line)["prompt"] for line in (PROMPTS / f"{source}.jsonl").read_text().splitlines()]


def random_prompt(index: int, vocab: int, length: int = 64) -> list[int]:
    """A prompt of tokens drawn at random."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def wait(device: Any) -> None:
    """Wait for what was started on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(names: Iterable[Any], turn: int) -> list[Any]:
    """The names, backwards in every other turn, so that none is always measured after the same one."""
    names = list(names)
    return names if turn % 2 == 0 else names[::-1]


def typical(seconds: Sequence[float]) -> float:
    """One time from several rounds: the fastest of up to three, the median of more."""
    return min(seconds) if len(seconds) <= 3 else statistics.median(seconds)


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the median over samples drawn with replacement."""
    given = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(given), (draws, len(given)))
    low, high = np.percentile(np.median(given[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def loops(tokens: Sequence[int], tail: int = 64, longest: int = 32) -> bool:
    """Whether a text ends in a loop: its last ``tail`` tokens repeat with a period of at most ``longest``.

    With p the period, token i equals token i - p wherever both are among the last ``tail``::

        tail 6:  9 [1 2 1 2 1 2]  loops, p = 2        9 [1 2 1 2 1 3]  does not

    A text of fewer tokens than ``tail`` does not loop.
    """
    if len(tokens) < tail:
        return False
    end = list(tokens[len(tokens) - tail :])
    return any(end[period:] == end[:-period] for period in range(1, min(longest, tail - 1) + 1))

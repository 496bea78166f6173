"""What every benchmark shares: the console, the JSON document that a run leaves, models, prompts and statistics."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track

import lookahead
from lookahead.bundled import BUNDLED

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


def watched(console: Console, title: str, items: Sequence[Any]) -> Iterable[Any]:
    """The items, with a progress bar."""
    return track(items, title, console=console, transient=True)


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; ``+changes`` is added if code differs from it, ``unknown`` stands for no commit."""

    def git(command: str) -> str:
        words = ["git", "-C", str(checkout), *command.split()]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    # Results may change: they are measured one after the other.
    changes = git("status --porcelain --untracked-files=no -- . :!benchmarks/results :!BENCHMARKS.md")
    return (git("rev-parse --short HEAD") or "unknown") + ("+changes" if changes else "")


def is_dirty(commit: str) -> bool:
    """Whether a stamp names no commit from which the run can be repeated."""
    return commit.endswith("+changes") or commit == "unknown"


def machine() -> dict[str, Any]:
    """Machine, versions, commit and argv of this run."""
    cpu, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {"cpu": cpu, "cpu_capability": torch.backends.cpu.get_cpu_capability(), "cores": torch.get_num_threads()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": version("transformers"), "lookahead": lookahead.__version__}
    return {
        "machine": {**about, "gpu": gpu, "system": platform.platform()},
        "versions": versions,
        "commit": commit_of(ROOT),
        "argv": sys.orig_argv[1:],
    }


class Run:
    """One run's JSON document, saved whenever a list of it grows; to publish one, the code has to be committed."""

    def __init__(self, benchmark: str, out: Path | None, **settings: Any) -> None:
        self._out = out
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
        if "model" in settings:
            settings["model"] = settings["model"] or "bundled"
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
        """Save the document, and print it as the last line on stdout."""
        print(self.save())


def load(model_dir: Path | None, dtype: str, device: str = "cpu", full_length: bool = True) -> tuple[Any, Any]:
    """A model (None: the bundled one) and its tokenizer; ``full_length`` switches its end-of-text token off."""
    model, tokenizer = lookahead.load_model(model_dir or BUNDLED, dtype=getattr(torch, dtype), device=device)
    config = model.generation_config
    if config.pad_token_id is None:
        pad = tokenizer.pad_token_id
        config.pad_token_id = pad if pad is not None else (tokenizer.eos_token_id or 0)
    if full_length:
        config.eos_token_id = None
    return model, tokenizer


def prompts_in(source: str) -> list[tuple[str, str]]:
    """The prompts of a file of JSON lines, or of one in ``prompts/`` named without its suffix, each behind its category
    (empty = none).

    A line has a ``prompt``, or ``turns`` of which the first counts, as in Spec-Bench (arXiv:2401.07851).
    """
    file = Path(source) if source.endswith(".jsonl") else PROMPTS / f"{source}.jsonl"
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        text = row.get("prompt") or (row.get("turns") or [None])[0]
        if not isinstance(text, str):
            raise typer.BadParameter(f"{file}, line {number}: expected a JSON object with a prompt or turns.")
        found.append((row.get("category", ""), text))
    return found


def texts_of(source: str) -> list[str]:
    """The prompts of a file without their categories."""
    return [text for _, text in prompts_in(source)]


def random_prompt(index: int, vocab: int, length: int = 64) -> list[int]:
    """A prompt of tokens drawn at random."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def wait(device: Any) -> None:
    """Wait for what was started on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: Any, call: Callable[[], Any]) -> tuple[Any, float]:
    """What ``call`` returns, and the seconds that it took on a device."""
    wait(device)
    start = time.perf_counter()
    result = call()
    wait(device)
    return result, time.perf_counter() - start


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
    """Whether a text's last ``tail`` tokens repeat with a period p of at most ``longest``; shorter texts do not.

    With tail 6::

        9 [1 2 1 2 1 2]  loops, p = 2        9 [1 2 1 2 1 3]  does not
    """
    end = list(tokens[-tail:])
    periods = range(1, min(longest, tail - 1) + 1)
    return len(end) == tail and any(end[period:] == end[:-period] for period in periods)

"""What the commands share: loading, one timed call of ``generate``, tables, and telling the result."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from jacobi import LookaheadError
from lookahead import bundled
from lookahead._files import on_hub
from lookahead._version import versions
from lookahead.loading import load_model
from lookahead.stats import DecodingStats
from lookahead.strategies.base import Strategy

PICTURES = (".png", ".svg", ".pdf")  # names of pictures end so


@dataclass(frozen=True)
class Decoded:
    """One call of ``generate``: the tokens it wrote, the seconds it took, and its counts (None without lookahead)."""

    tokens: list[int]
    seconds: float
    stats: DecodingStats | None


def decode(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Strategy | None, streamer: Any = None, **settings: Any
) -> Decoded:
    """Decode one prompt with ``strategy``; None is transformers' own ``generate``, which nothing here has patched."""
    settings["return_dict_in_generate"] = True
    start = perf_counter()
    if strategy is None:
        output = model.generate(**inputs, streamer=streamer, **settings)
    else:
        output = model.generate(**inputs, custom_generate=strategy, lookahead_streamer=streamer, **settings)
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Decoded(tokens, perf_counter() - start, getattr(output, "stats", None))


def usable_device(device: str) -> str:
    """The device that an option names; ``auto`` is CUDA where there is one. One that cannot be used is refused."""
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LookaheadError(f"--device {device} cannot be used here ({reason}). Try --device cpu.") from error
    return name


def weights_dtype(dtype: str) -> torch.dtype | str:
    """The dtype that an option names, as transformers takes it; ``auto`` is the checkpoint's own."""
    return dtype if dtype == "auto" else getattr(torch, dtype)


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def check_folder(folder: str | None, option: str = "--model") -> None:
    """Refuse a folder that does not exist, for which transformers would search the hub."""
    if folder is not None and not Path(folder).exists() and not on_hub(folder):
        raise LookaheadError(f"{option} {folder} does not exist: expected a folder with config.json and weights.")


def check_file(option: str, file: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold. One of ``suffixes`` is needed,
    if there are any."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise LookaheadError(f"{option} {file}: there is no folder {file.parent}. Make it first.")
    if file.is_dir():
        raise LookaheadError(f"{option} {file} is a folder: expected the name of a file.")
    try:
        if not file.exists() or file.is_file():
            TemporaryFile(dir=file.resolve().parent).close()
    except OSError as error:
        raise LookaheadError(
            f"{option} {file}: the folder cannot be written to ({error.strerror}). Name another."
        ) from error
    if suffixes and file.suffix not in suffixes:
        raise LookaheadError(f"{option} {file}: expected a name that ends in {', '.join(suffixes)}.")


def load(folder: str | None, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer; None is the bundled one, whose own dtype is float32: its file is only packed."""
    name = usable_device(device)
    if folder is None and dtype == "auto":
        dtype = "float32"
    check_folder(folder)
    with loading("Loading the model"):
        model, tokenizer = load_model(bundled.BUNDLED if folder is None else folder, weights_dtype(dtype), name)
    if model.generation_config.pad_token_id is None:  # transformers would choose the same, and warn at every call
        ends = model.generation_config.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        model.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    return model, tokenizer


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Say on stderr what is being loaded; transformers' own bars, which would stand beside it, are off meanwhile."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with Console(stderr=True).status(what):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def encode(tokenizer: Any, prompt: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """A prompt as ``generate`` takes it; one without tokens is refused, and one that is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python's stand-in for a byte of the command line, or of stdin, that is none
        raise LookaheadError(f"The prompt is not text ({error.reason}): expected UTF-8.") from error
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise LookaheadError("The prompt is empty: expected text of at least one token.")
    ids = ids.to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def echo_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command, with the versions that decided about the result."""
    typer.echo(json.dumps({**document, "versions": versions()}, indent=2))


def report(document: Mapping[str, Any], as_json: bool, show: Callable[[Console], None]) -> None:
    """Print what a command found: as its one JSON document, or as ``show`` does for people."""
    if as_json:
        echo_json(document)
    else:
        show(Console(highlight=False))


def progress(auto_refresh: bool = True) -> Progress:
    """Bars on stderr, which vanish at the end, and are not drawn outside a terminal. Without ``auto_refresh``, the
    caller draws them when it disturbs no timing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    off = not console.is_terminal
    return Progress(*columns, console=console, transient=True, auto_refresh=auto_refresh, disable=off)


def bar(progress: Progress, what: str) -> Callable[[float], None]:
    """The function that moves a new bar from 0 to 1."""
    task = progress.add_task(what, total=1.0)
    return lambda share: progress.update(task, completed=share)


def columns(headers: Sequence[str], rows: Iterable[Any], title: str | None = None, bold: str = "") -> Table:
    """Right-justified columns; the row whose first cell is ``bold`` stands out."""
    table = Table(title=title, box=None, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right")
    for row in rows:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)  # what looks like markup stays text
        table.add_row(*cells, style="bold" if row[0] == bold else "")
    return table


def facts(known: Mapping[str, Any], title: str | None = None, unknown: str = "-") -> Table:
    """A line for each name and its value; None is shown as ``unknown``."""
    table = Table(title=title, box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in known.items():
        text = ", ".join(value) if isinstance(value, list) else unknown if value is None else str(value)
        table.add_row(name.replace("_", " "), text)
    return table

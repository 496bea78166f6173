"""Parts that commands share: loading, one timed call of ``generate``, tables, and telling the result."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic, perf_counter, thread_time
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from jacobi import LookaheadError
from lookahead import bundled
from lookahead._version import versions
from lookahead.chat_format import built_in as built_in
from lookahead.chat_format import end_tokens, prompt_ids
from lookahead.cli.options import DraftOptions, ModelOptions, ServedOptions, SizeOptions
from lookahead.cli.prompts import PROMPTS
from lookahead.loading import load_model
from lookahead.registry import drafts_with
from lookahead.runtime.quantised_layers import perplexity, quantize
from lookahead.stats import DecodingStats
from lookahead.strategies.automatic import DEFAULT_SOURCES, AutomaticStrategy
from lookahead.strategies.base import Stats, Strategy
from lookahead.strategies.lookahead import Lookahead

_QUIET_S = 5.0  # seconds between two lines where no bar can be drawn
_LOADED = 0.8  # share of the time that a thread runs, below which others take the processors


@dataclass(frozen=True)
class Decoded:
    """One call of ``generate``: the tokens it wrote, the seconds it took, in ``busy`` of which its thread ran, its
    counts (None without lookahead), and the logits ``[1, vocab]`` of each token where they were asked for."""

    tokens: list[int]
    seconds: float
    stats: DecodingStats | None
    busy: float = inf
    logits: tuple[Tensor, ...] = ()


def decode(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Strategy | None, streamer: Any = None, **settings: Any
) -> Decoded:
    """Decode one prompt with ``strategy``; None is transformers' own ``generate``, which nothing here has patched."""
    settings["return_dict_in_generate"] = True
    start, ran = perf_counter(), thread_time()
    ours = {"custom_generate": strategy, "lookahead_streamer": streamer}
    output = model.generate(**inputs, **settings, **({"streamer": streamer} if strategy is None else ours))
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds, stats, logits = perf_counter() - start, getattr(output, "stats", None), getattr(output, "logits", None)
    return Decoded(tokens, seconds, stats, thread_time() - ran, logits or ())


def sampling(temperature: float | None) -> dict[str, Any]:
    """Settings of ``generate`` for a temperature; None is greedy decoding."""
    return {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}


def load_told(runs: Sequence[Decoded], device: torch.device) -> list[str]:
    """One line where the machine had other work to do, which is seen by a thread that hardly waits by itself; else
    none. A thread that waits for a GPU says nothing."""
    share = min(1.0, sum(run.busy for run in runs) / sum(run.seconds for run in runs)) if runs else 1.0
    if device.type != "cpu" or share > _LOADED:
        return []
    told = f"The machine is loaded: this process ran in {share:.0%} of the time that passed. Times say little"
    return [f"{told}; measure again when nothing else runs."]


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


def load(folder: str | None, dtype: str, device: str, gguf_file: str | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer; None is the bundled one, whose own dtype is float32: its file is only packed."""
    name = usable_device(device)
    if folder is None and dtype == "auto":
        dtype = "float32"
    with loading("Loading the model"):
        source = bundled.BUNDLED if folder is None else folder
        model, tokenizer = load_model(source, weights_dtype(dtype), name, gguf_file)
    if model.generation_config.pad_token_id is None:  # transformers would choose the same, and warn at every call
        end = next(iter(end_tokens(model)), None)
        model.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    return model, tokenizer


def load_for(options: ModelOptions) -> tuple[PreTrainedModel, Any]:
    """Load the model that the options name, and its tokenizer; quantised, with a word on stderr of what that cost."""
    if options.quantize is None:
        return load(options.model, options.dtype, options.device, options.gguf_file)
    model, tokenizer = load(options.model, "bfloat16", "cpu", options.gguf_file)
    ids = torch.tensor([prompt_ids(tokenizer, "\n".join(PROMPTS), raw=True)])
    before = perplexity(model, ids)
    with loading("Quantising the model"):
        quantize(model, options.quantize)
    told = f"{perplexity(model, ids):.2f} in {options.quantize}, {before:.2f} in bfloat16"
    typer.echo(f"Perplexity of the built-in prompts ({ids.shape[1]} tokens): {told}.", err=True)
    return model, tokenizer


def name_of(options: ModelOptions) -> str:
    """A short name of the model: what requests call it, if that is said, else its folder's, or its file's."""
    if isinstance(options, ServedOptions) and options.served_model_name:
        return options.served_model_name
    return (bundled.BUNDLED if options.model is None else Path(options.model).expanduser().absolute()).name


def drafting(options: DraftOptions, model: PreTrainedModel, tokenizer: Any) -> AutomaticStrategy:
    """The strategy with the options' draft model, whose vocabulary may be another one, or with their head."""
    found, mtp, most = options.drafts
    strategy: AutomaticStrategy = Lookahead().predicting() if mtp else Lookahead()
    with loading("Loading what drafts"):
        if found is not None and options.draft_gguf_file is None and (kind := drafts_with(found)) is not None:
            strategy = kind(found, sources=(kind.known_sources[0], *DEFAULT_SOURCES))
        elif found is not None:
            draft, other = load_model(found, model.dtype, model.device, options.draft_gguf_file)
            same = tokenizer.get_vocab() == other.get_vocab()
            strategy = Lookahead(draft_model=draft, tokenizers=None if same else (tokenizer, other))
    strategy.check(model)
    return strategy if most is None else replace(strategy, max_nodes=most)


def forgetful(options: SizeOptions, seed: int | None = None, stats: Stats = "summary", **others: Any) -> Lookahead:
    """The strategy of these sizes, which remembers nothing: a text that is written twice gets no easier."""
    return Lookahead(**options.sizes(), seed=seed, stats=stats, remember=False, **others)


def described(
    options: ModelOptions, model: PreTrainedModel, strategy: Strategy | None, others: dict[str, Any]
) -> dict[str, Any]:
    """Facts that decided about a text, for a JSON document."""
    named = {"strategy": "plain"} if strategy is None else strategy.to_dict()
    ends = {"dtype": dtype_name(model), "device": str(model.device)}
    if options.quantize is not None:
        ends["quantize"] = options.quantize
    return {"model": options.model_name, "strategy": named} | others | ends


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


def encode(tokenizer: Any, prompt: str, model: PreTrainedModel, raw: bool = True) -> dict[str, Tensor]:
    """A prompt as ``generate`` takes it, by :func:`lookahead.chat_format.prompt_ids`."""
    ids = torch.tensor([prompt_ids(tokenizer, prompt, raw)], device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def report(document: Mapping[str, Any], as_json: bool, show: Callable[[Console], None]) -> None:
    """Print what a command found: as its one JSON document, with the versions that decided about the result, or as
    ``show`` does for people."""
    if as_json:
        typer.echo(json.dumps({**document, "versions": versions()}, indent=2))
    else:
        show(Console(highlight=False))


class SpokenProgress(Progress):
    """Bars on stderr, which vanish at the end; outside a terminal, a line as each begins, and now and then."""

    _said = 0.0

    def add_task(self, description: str, *args: Any, **fields: Any) -> TaskID:
        task = super().add_task(description, *args, **fields)
        self._say(task, first=True)
        return task

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID, first: bool = False) -> None:
        if self.disable and (first or monotonic() - self._said > _QUIET_S):
            self._said, task = monotonic(), self._tasks[task_id]
            typer.echo(f"{task.description}: {task.percentage:.0f}%", err=True)


def progress() -> SpokenProgress:
    """Bars for what takes long."""
    console = Console(stderr=True)
    return SpokenProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def bar(progress: Progress, what: str) -> Callable[[float], None]:
    """The function that moves a new bar from 0 to 1."""
    task = progress.add_task(what, total=1.0)
    return lambda share: progress.update(task, completed=share)


def columns(headers: Sequence[str], rows: Iterable[Any], title: str | None = None) -> Table:
    """Right-justified columns."""
    table = Table(title=title, box=None, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for row in rows:
        # What looks like markup stays text.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def facts(known: Mapping[str, Any], title: str | None = None, unknown: str = "-") -> Table:
    """A line for each name and its value; None is shown as ``unknown``."""
    table = Table(title=title, box=None, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in known.items():
        text = ", ".join(value) if isinstance(value, list) else unknown if value is None else str(value)
        table.add_row(name.replace("_", " "), text)
    return table

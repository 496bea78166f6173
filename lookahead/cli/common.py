"""What the commands share: options, loading, and one timed call of ``generate``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from jacobi import LookaheadError
from lookahead import bundled
from lookahead._files import on_hub
from lookahead._version import versions as versions
from lookahead.cli.prompts import PROMPTS as PROMPTS
from lookahead.loading import load_model
from lookahead.stats import DecodingStats
from lookahead.strategies.base import Stats, Strategy
from lookahead.strategies.lookahead import Lookahead

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="Folder of a model and its tokenizer. Default: bundled.")
]
DtypeOption = Annotated[DtypeName, typer.Option(help="Of the weights. Texts are exact in float32 and float64.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto is CUDA where there is one.")]
NewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", "--new-tokens", min=1, help="Tokens to write at most, per prompt.")
]
WindowOption = Annotated[
    int | None, typer.Option("--window-size", help="W, columns of the window. Default: automatic.")
]
NgramOption = Annotated[int | None, typer.Option("--ngram-size", help="N, length of an n-gram. Default: automatic.")]
GuessesOption = Annotated[
    int | None, typer.Option("--verification-set-size", help="G, most guesses in a pass. Default: automatic.")
]


@dataclass(frozen=True)
class Decoded:
    """One call of ``generate``: the tokens it wrote, the seconds it took, and its counts (None if it was plain)."""

    tokens: list[int]
    seconds: float
    stats: DecodingStats | None


def decode(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Strategy | None, streamer: Any = None, **settings: Any
) -> Decoded:
    """Decode one prompt with ``strategy``; with None exactly as transformers does, which nothing here has patched."""
    settings["return_dict_in_generate"] = True
    start = perf_counter()
    if strategy is None:
        output = model.generate(**inputs, streamer=streamer, **settings)
    else:
        output = model.generate(**inputs, custom_generate=strategy, lookahead_streamer=streamer, **settings)
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Decoded(tokens, perf_counter() - start, getattr(output, "stats", None))


def lookahead_from(
    window_size: int | None,
    ngram_size: int | None,
    verification_set_size: int | None,
    seed: int | None = None,
    stats: Stats = "summary",
) -> Lookahead:
    """The strategy that the options mean: the automatic mode if none of W, N and G is given.

    Drafts start afresh in every call, so that a text that is written twice is not twice as easy.
    """
    return Lookahead(
        window_size=window_size,
        ngram_size=ngram_size,
        verification_set_size=verification_set_size,
        seed=seed,
        stats=stats,
        remember=False,
    )


def load(folder: str | None, dtype: DtypeName, device: str) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer; None is the bundled one.

    Raises:
        LookaheadError: there is no such model, or no such device.
    """
    name = device
    if device == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LookaheadError(f"--device {device} cannot be used here ({reason}). Try --device cpu.") from error
    if folder is not None and not Path(folder).exists() and not on_hub(folder):
        # It would only be searched for on the hub, slowly.
        raise LookaheadError(f"--model {folder} does not exist: expected a folder with config.json and weights.")
    with no_bars(), Console(stderr=True).status("Loading the model"):
        model, tokenizer = load_model(
            bundled.BUNDLED if folder is None else folder, dtype=getattr(torch, dtype), device=name
        )
    if model.generation_config.pad_token_id is None:  # transformers would choose the same, and warn at every call
        ends = model.generation_config.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        model.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    return model, tokenizer


@contextmanager
def no_bars() -> Iterator[None]:
    """transformers' own bars, which would stand beside ours, are off for a while."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def encode(tokenizer: Any, prompt: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """A prompt as ``generate`` takes it.

    Raises:
        LookaheadError: the prompt has no tokens.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise LookaheadError("The prompt is empty: expected text of at least one token.")
    ids = ids.to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """Tokens as text, special tokens left out."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def progress(auto_refresh: bool = True) -> Progress:
    """A bar on stderr that is gone when it is done, and is not there at all outside a terminal.

    Args:
        auto_refresh: draw it from a thread of its own; without, the caller refreshes it where that disturbs no timing.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    off = not console.is_terminal
    return Progress(*columns, console=console, transient=True, auto_refresh=auto_refresh, disable=off)

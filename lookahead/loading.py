"""Loading a causal model from a folder, with errors that say what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_accelerate_available

from jacobi import LookaheadError
from lookahead.model_folder import find_model


def load_model(
    folder: str | Path,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    gguf_file: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal model, in evaluation mode, and its tokenizer from a folder (or any name transformers resolves).

    Weights are read from ``gguf_file`` in it, if that is given; ``folder`` may be such a file itself, and a folder's
    only one is taken where there are no other weights.

    Raises:
        LookaheadError: there is no model there, or it has no weights.
    """
    model = load_weights(folder, dtype, device, gguf_file)
    with _refusals(folder, gguf_file) as (source, given):
        if any((Path(source) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            given = {}  # what a GGUF file says of a tokenizer is less, and takes long to read
        return model, AutoTokenizer.from_pretrained(source, **given)


def load_weights(
    folder: str | Path,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """Load a causal model as :func:`load_model` does, without a tokenizer. Weights go straight to another device than
    the CPU where accelerate is installed, without which transformers reads them to the CPU first."""
    with _refusals(folder, gguf_file) as (source, given):
        given["dtype"] = dtype
        if torch.device(device).type == "cpu" or not is_accelerate_available():
            return AutoModelForCausalLM.from_pretrained(source, **given).to(device).eval()
        return AutoModelForCausalLM.from_pretrained(source, **given, device_map={"": device}).eval()


@contextmanager
def _refusals(folder: str | Path, gguf_file: str | None) -> Iterator[tuple[str | Path, dict[str, Any]]]:
    """Arguments of ``from_pretrained``; whatever it raises becomes a LookaheadError that names the folder."""
    source, gguf_file = find_model(folder, gguf_file)
    try:
        yield source, ({} if gguf_file is None else {"gguf_file": gguf_file})
    except Exception as error:  # whatever a reader of files makes of broken ones
        raise LookaheadError(f"{folder} could not be loaded as a causal model: {error}") from error

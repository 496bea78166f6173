"""Loading a causal model from a folder, with errors that say what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_accelerate_available

from jacobi import LookaheadError


def load_model(
    folder: str | Path, dtype: torch.dtype | str = "auto", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """Load a causal model, in evaluation mode, and its tokenizer from a folder (or any name transformers resolves).

    Raises:
        LookaheadError: there is no model there, or it has no weights.
    """
    model = load_weights(folder, dtype, device)
    with _refusals(folder) as source:
        return model, AutoTokenizer.from_pretrained(source)


def load_weights(
    folder: str | Path, dtype: torch.dtype | str = "auto", device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Load a causal model as :func:`load_model` does, without a tokenizer. Weights go straight to another device than
    the CPU where accelerate is installed, without which transformers reads them to the CPU first."""
    path = Path(folder).expanduser()
    if path.exists() or str(folder).startswith((".", "/", "~")):
        if not path.is_dir():
            raise LookaheadError(f"{folder} is not a folder: expected one with config.json and weights.")
        if not (path / "config.json").exists():
            raise LookaheadError(f"{folder} holds no config.json: expected a folder written by save_pretrained.")
        if not has_weights(path):
            wanted = "expected *.safetensors or *.bin beside config.json. Copy them there, or save the model again with"
            raise LookaheadError(f"{folder} holds no weights: {wanted} save_pretrained.")
    with _refusals(folder) as source:
        if torch.device(device).type == "cpu" or not is_accelerate_available():
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map={"": device}).eval()


def has_weights(folder: Path) -> bool:
    """Whether a folder holds files of weights that transformers reads."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.gguf"))


@contextmanager
def _refusals(folder: str | Path) -> Iterator[str | Path]:
    """What transformers reads; whatever it raises becomes a LookaheadError that names the folder."""
    path = Path(folder).expanduser()
    try:
        yield path if path.exists() else folder
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LookaheadError(f"{folder} could not be loaded as a causal model: {error}") from error

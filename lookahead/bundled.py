"""The model and the Medusa heads that come with the package, and loading any other model from a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from jacobi import LookaheadError

BUNDLED = Path(__file__).parent / "assets" / "tiny-coder"
BUNDLED_HEADS = Path(__file__).parent / "assets" / "tiny-coder-medusa"  # Medusa's heads for it, and their tree


def load_bundled(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the bundled 5.8-million-parameter Python-code model.

    Args:
        dtype: of the weights; they are stored in half precision.
        device: where the model goes.

    Returns:
        The model, in evaluation mode, and its tokenizer.
    """
    return load_model(BUNDLED, dtype=dtype, device=device)


def load_model(
    folder: str | Path, dtype: torch.dtype | str = "auto", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """Load a causal model and its tokenizer from a folder (or any name transformers resolves).

    Raises:
        LookaheadError: there is no model there, or it has no weights.
    """
    model = load_weights(folder, dtype, device)
    with _refusals(folder):
        return model, AutoTokenizer.from_pretrained(_source(folder))


def load_weights(
    folder: str | Path, dtype: torch.dtype | str = "auto", device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Load a causal model as :func:`load_model` does, without a tokenizer.

    Raises:
        LookaheadError: there is no model there, or it has no weights.
    """
    path = Path(folder).expanduser()
    if path.exists() or str(folder).startswith((".", "/", "~")):
        if not path.is_dir():
            raise LookaheadError(f"{folder} is not a folder: expected one with config.json and weights.")
        if not (path / "config.json").exists():
            raise LookaheadError(f"{folder} holds no config.json: expected a folder written by save_pretrained.")
        weights = [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.gguf")]
        if not weights:
            raise LookaheadError(
                f"{folder} holds no weights: expected *.safetensors or *.bin beside config.json. Copy them there, or "
                "save the model again with save_pretrained."
            )
    with _refusals(folder):
        return AutoModelForCausalLM.from_pretrained(_source(folder), dtype=dtype).to(device).eval()


def _source(folder: str | Path) -> str | Path:
    path = Path(folder).expanduser()
    return path if path.exists() else folder


@contextmanager
def _refusals(folder: str | Path) -> Iterator[None]:
    """What transformers raises, as an error of ours."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LookaheadError(f"{folder} could not be loaded as a causal model: {error}") from error

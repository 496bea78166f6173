"""The model that comes with the package, and loading any other from a folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from jacobi import LookaheadError

BUNDLED = Path(__file__).parent / "assets" / "tiny-coder"


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
    source = path if path.exists() else folder
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
        return model.to(device).eval(), tokenizer
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LookaheadError(f"{folder} could not be loaded as a causal model: {error}") from error

"""The model that comes with the package, and what drafts for it."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.loading import load_model as load_model

BUNDLED = Path(__file__).parent / "assets" / "tiny-coder"
BUNDLED_HEADS = Path(__file__).parent / "assets" / "tiny-coder-medusa"  # Medusa's heads for it, and their tree
BUNDLED_EAGLE = Path(__file__).parent / "assets" / "tiny-coder-eagle"  # an EAGLE-3 head for it


def load_bundled(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the bundled 5.8-million-parameter Python-code model, in evaluation mode, and its tokenizer.

    ``dtype`` is that of the weights; the file holds half precision.
    """
    return load_model(BUNDLED, dtype=dtype, device=device)

"""Writes heads as tensors and config.json, in Medusa's format."""

import json
from pathlib import Path

from safetensors.torch import save_file

from jacobi import LookaheadError
from lookahead.sources.medusa.checkpoints import HeadTensors
from lookahead.sources.medusa.checkpoints.formats import MEDUSA
from lookahead.sources.medusa.checkpoints.storage import HEADS_FILE


def write_medusa(heads: HeadTensors, folder: Path) -> None:
    """Write heads as version 1, or as version 2 if they use the model's output layer; this holds no token map."""
    sizes = heads.config
    if heads.token_map is not None:
        raise LookaheadError(
            f"These heads score {len(heads.token_map)} of {sizes.vocab_size} tokens, and Medusa's format cannot say "
            "which: expected heads that score all of them. Use these as they are stored."
        )
    config = {
        "base_model_name_or_path": sizes.base_model,
        "hidden_size": sizes.hidden_size,
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        "version": "1" if sizes.own_output else "2",
        "vocab_size": sizes.vocab_size,
    }
    outputs = range(sizes.num_heads if sizes.own_output else 0)
    names = MEDUSA.names(sizes.num_heads, sizes.num_layers, ("weight", "bias"), outputs)
    tensors = {theirs: heads.state[ours].detach().cpu().contiguous() for ours, theirs in names.items()}
    save_file(tensors, folder / HEADS_FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

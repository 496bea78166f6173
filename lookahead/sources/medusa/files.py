"""Heads in files: read in every published format, written in two, and kept while their files stay as they are."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from jacobi import LookaheadError
from lookahead._files import whole_folder
from lookahead.sources.medusa.checkpoints.writing import shared_output, write_vllm
from lookahead.sources.medusa.choices import ChoiceTree, choices_from
from lookahead.sources.medusa.heads import MedusaHeads

Format = Literal["medusa", "vllm"]


def read_heads(source: str | Path, model: Any = None, **hub: Any) -> MedusaHeads:
    """Read heads in any published format: :meth:`MedusaHeads.from_pretrained` by another name, with its arguments."""
    return MedusaHeads.from_pretrained(source, model=model, **hub)


def write_heads(
    heads: MedusaHeads, folder: str | Path, format: Format = "medusa", *, model: Any = None, replace: bool = False
) -> None:
    """Write heads to a folder, new or empty: all of it or nothing. With ``replace``, files in it are deleted.

    ``"medusa"`` is what :meth:`MedusaHeads.save_pretrained` writes: version 1, or version 2 if the heads use the
    model's output layer. ``"vllm"`` is what vLLM loads as a draft model; its file holds an output layer, so heads
    without their own need their ``model``, whose layer is copied.

    Raises:
        LookaheadError: the folder is not empty or cannot be written to, the heads hold NaN, or the format cannot hold
            them.
    """
    if format not in ("medusa", "vllm"):
        raise LookaheadError(f"Heads cannot be written as {format!r}: expected 'medusa' or 'vllm'.")
    heads.check_finite()
    shared = None
    if format == "vllm" and not heads.own_output:
        if model is not None:
            heads.check(model)
        shared = shared_output(model)
    try:
        with whole_folder(folder, replace) as part:
            if format == "medusa":
                heads.save_pretrained(part)
            else:
                write_vllm(heads.tensors(), part, shared)
                heads.generate_model_card().save(part / "README.md")
    except OSError as error:
        raise LookaheadError(f"{folder} cannot be written: {error}.") from error


def kept_heads(folder: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> MedusaHeads:
    """The heads in a folder (or file, or repository): read once, and again when a file of it changes.

    With ``device`` and ``dtype`` they lie there; heads of other models and devices stay as they are.
    """
    stamp = _stamp(folder)
    return _read(folder, stamp) if device is None or dtype is None else _placed(folder, stamp, device, dtype)


def tree_beside(folder: str) -> ChoiceTree | None:
    """The calibrated tree that lies beside the heads, if there is one."""
    file = Path(folder).expanduser() / "tree.json"
    return choices_from(file) if file.is_file() else None


def _stamp(folder: str) -> float:
    """Changes when what lies in a folder (or file) does."""
    path = Path(folder).expanduser()
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


@lru_cache(maxsize=4)
def _read(folder: str, stamp: float) -> MedusaHeads:
    return MedusaHeads.from_pretrained(folder)


@lru_cache(maxsize=4)
def _placed(folder: str, stamp: float, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    heads = _read(folder, stamp)
    first = next(heads.parameters())
    return heads if (first.device, first.dtype) == (device, dtype) else deepcopy(heads).to(device, dtype)

"""Recurrent heads from Apple's files. The tensors decide what a head is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from jacobi import LookaheadError
from lookahead.sources.medusa.checkpoints.storage import WHOLE_MODELS, locate, some


@dataclass(frozen=True)
class RecurrentSizes:
    """What a head looks like.

    Attributes:
        vocab_size: tokens that it scores, all of the model's.
        hidden_size: of the model; the recurrent state and embeddings are as wide.
        exit_size: what the residual blocks work on; None = twice ``hidden_size``, and nothing is projected.
        layers: residual blocks before the output layer.
        rnn: whether the state is that of a recurrent network, or a sum of embeddings.
    """

    vocab_size: int
    hidden_size: int
    exit_size: int | None = None
    layers: int = 1
    rnn: bool = True


def read(source: str | Path, hub: Mapping[str, Any]) -> tuple[RecurrentSizes, dict[str, Tensor]]:
    """What ``source`` holds, a folder, a file in it, or a repository of the hub; no code from a file is run. A
    LookaheadError if that is no head."""
    location = locate(source, hub)
    stored, config = location.tensors(WHOLE_MODELS, "ReDrafter head"), location.config()
    tensors = {name: stored.get(name) for name in stored.files}
    return sizes_of(tensors, config, str(source)), tensors


def sizes_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> RecurrentSizes:
    """What the tensors are of, by their names; ``source`` is named in errors."""
    layers = 0
    while f"lm_head.{layers}.linear.weight" in tensors:
        layers += 1
    output = tensors.get(f"lm_head.{layers}.weight")
    if output is None or output.ndim != 2:
        found = some(sorted(tensors)) or "nothing"
        raise LookaheadError(
            f"{source} is no ReDrafter head: expected lm_head.0.linear.weight and so on, and the output layer behind "
            f"them as lm_head.{layers}.weight; it has {found}."
        )
    vocab, exit_size = output.shape
    projection, rnn = tensors.get("input_proj.weight"), any(name.startswith("rnn_") for name in tensors)
    if config.get("rnn") and not rnn:
        raise LookaheadError(
            f"{source} is no whole ReDrafter head: config.json says rnn, and it lacks rnn_u and rnn_w."
        )
    joined = exit_size if projection is None or projection.ndim != 2 else projection.shape[1]
    if joined % 2:
        raise LookaheadError(
            f"{source}: the head reads {joined} channels, expected twice the model's hidden size: a hidden state "
            "beside the recurrent state."
        )
    return RecurrentSizes(vocab, joined // 2, None if projection is None else exit_size, layers, rnn)

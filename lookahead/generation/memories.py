"""Which file of learnt drafts belongs to a model, and what takes it in or adds to it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.draft.memory import Memory, exchange
from lookahead.draft.strategy import DraftStrategy
from lookahead.generation.curves import describe
from lookahead.models.output_layer import copyable_weight
from lookahead.models.traits import ModelTraits
from lookahead.runtime.machine import cache_folder
from lookahead.sources.learned import Learned, Notes

_SAMPLE = 64  # tokens, and numbers of each, whose embeddings tell a model from others
_WAITS_S = 60.0  # for another process that writes the same file


def about(model: PreTrainedModel) -> dict[str, str]:
    """What a memory's file says of its model: class, shape, and a sample of its weights, whatever their dtype."""
    known = describe(model)
    weight, sample = copyable_weight(model.get_input_embeddings()), b""
    if weight is not None:
        lines = weight[:: -(-weight.shape[0] // _SAMPLE), :_SAMPLE]
        sample = lines.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    text = json.dumps([known["model"], known["shape"]], sort_keys=True, default=str).encode()
    return {"model": known["model"], "weights_id": hashlib.sha256(text + sample).hexdigest()}


def memory_file(model: PreTrainedModel) -> Path:
    """Where a model's memory is kept, and found by calls: in the user's cache folder."""
    return cache_folder() / f"memory-{about(model)['weights_id'][:24]}.safetensors"


def recall(memory: Memory, model: PreTrainedModel, strategy: DraftStrategy | None) -> None:
    """Start from the file that a strategy names, or, where it remembers, from the one in the cache folder."""
    given: str | Path | None = getattr(strategy, "memory", None)
    if given is not None:
        if (file := Path(given).expanduser().absolute()) != memory.file:
            memory.recall(file, Learned.load(file, about(model), memory.vocab_size))
    elif memory.file is None and strategy is not None and strategy.remembers:
        memory.file = Path()  # it is looked for once
        with suppress(LookaheadError, OSError, RuntimeError):  # RuntimeError: there is no home folder
            if any(cache_folder().glob("memory-*")) and (file := memory_file(model)).exists():
                memory.recall(file, Learned.load(file, about(model), memory.vocab_size))


@contextmanager
def learning(model: PreTrainedModel, file: str | Path | None = None) -> Iterator[Path]:
    """While the block runs, gather what the model says in the automatic mode's calls; keep it, even after an error.

    Args:
        file: the memory's file; None = the one in the user's cache folder, which later calls find. It
            keeps what is there, as far as there is room: of several writers none loses anything.

    Raises:
        LookaheadError: the file is another model's, is no memory, or cannot be written; before the block runs.
    """
    told = about(model)
    path = memory_file(model) if file is None else Path(file).expanduser().absolute()
    if path.exists():
        Learned.load(path, told)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            pass
    except OSError as error:
        raise LookaheadError(f"{path} cannot be written ({error}). Name another file.") from error
    memory = exchange(model) or Memory(ModelTraits.of(model).vocab_size)
    notes, memory.notes = memory.notes, Notes()
    exchange(model, memory)
    try:
        yield path
    finally:
        found, memory.notes = memory.learned(), notes
        if len(found):
            with _alone(path):
                (Learned.load(path, told) + found if path.exists() else found).save(path, told)


def _alone(path: Path) -> FileLock:
    """Inside, no other process adds to the file."""
    return FileLock(f"{path}.lock", timeout=_WAITS_S)

"""Traces on disk, in the user's cache folder: what one process has traced, others read, for a fifth of the price.

Only of models whose code is all transformers', PyTorch's or this library's: versions are part of a file's name, as is
all else that a trace was made of but weights, which it is given. A trace that was read is compared with the model
before it is used, and made anew where it is broken or says anything else.
"""

import io
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lookahead import _files, _native
from lookahead.runtime.machine import cache_file, kernels
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.tracing.replay import Kind, Traces

_VERSIONED = ("transformers.", "torch.", "lookahead.")  # modules of classes that change with a version


def file_of(model: PreTrainedModel, traces: Traces, kind: Kind, packed: Packed | None) -> Path | None:
    """Where a trace is kept; None = nowhere."""
    kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()]
    if not all(name.startswith(_VERSIONED) for name in kinds):
        return None
    parts, limits = packed or Packed({})
    held = *model.named_parameters(), *model.named_buffers()
    weights = [(name, part.dtype, *part.shape, id(part) in parts) for name, part in held]
    code = transformers.__version__, kinds, model.config.to_dict()
    about = *code, traces.key, astuple(kind), weights, repr(limits), kernels()
    try:
        return cache_file("trace", json.dumps(about, default=str)).with_suffix(".pt")
    except (RuntimeError, TypeError, ValueError):  # there is no home folder; settings that are no JSON
        return None


def read(file: Path) -> Callable[..., Any] | None:
    """The function that was saved there; None = there is none."""
    _native.operations()  # of which it may be made
    with suppress(OSError, RuntimeError), warnings.catch_warnings(action="ignore"):  # of TorchScript's end
        function: Callable[..., Any] = torch.jit.load(io.BytesIO(file.read_bytes())).forward
        return function
    return None


def write(file: Path, function: Any) -> None:
    """Keep a function for other processes. Where that fails, each makes its own."""
    with suppress(OSError, RuntimeError):
        content = function.save_to_buffer()
        file.parent.mkdir(parents=True, exist_ok=True)
        _files.write_bytes(file, content)

"""Which latency curve belongs to a call, and where measured ones are kept."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.draft.latency import FORMAT, StepTimes
from lookahead.models.traits import ModelTraits
from lookahead.runtime import machine
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.machine import cache_folder, processor_name
from lookahead.runtime.open import dynamic_reason
from lookahead.runtime.packed_layers import computed_dtype
from lookahead.runtime.row_costs import row_costs
from lookahead.runtime.tracing.replay import TracedExecutor, Traces
from lookahead.runtime.tree import TreeModel
from lookahead.support.route import no_tree


def describe(
    model: PreTrainedModel, batch: int = 1, static: bool | None = None, traced: bool = False, packed: bool = False
) -> dict[str, Any]:
    """All that a curve depends on: the model's shape and dtypes, attention, device, threads, versions, sequences in a
    ``batch``, and what executes its passes: ``static`` shapes (see the strategies' setting), ``traced`` passes and
    ``packed`` weights have curves of their own."""
    config, traits = model.config.get_text_config(), ModelTraits.of(model)
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if (isinstance(value, int | float) or (isinstance(value, list) and name != "architectures"))
        and not name.endswith("token_id")
    }
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + parameter.numel()
    device, executor = model.device, "traced" if traced else "eager"
    if no_tree(model, traits) is not None:
        executor = "chain"
    elif dynamic_reason(static, model, traits) is None:
        executor = "cuda graphs" if device.type == "cuda" else "static"
    return {
        "model": type(model).__name__,
        "shape": shape,
        "parameters": dtypes,
        "attention": traits.attention,
        "executor": executor + (", packed weights" if packed else ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {processor_name()}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "batch": batch,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cache_file(about: dict[str, Any]) -> Path:
    """The file of a curve; another one as soon as anything in ``about``, see :func:`describe`, differs."""
    return machine.cache_file("step-times", json.dumps([FORMAT, about], sort_keys=True, default=str))


def cached(
    model: PreTrainedModel, batch: int = 1, static: bool | None = None, traced: bool = False, packed: bool = False
) -> StepTimes | None:
    """The saved curve of this model on this machine; None if there is none, or none that can be read."""
    try:
        if not any(cache_folder().glob("step-times-*")):
            return None
        return StepTimes.load(cache_file(describe(model, batch, static, traced, packed)), frozen=False)
    except (LookaheadError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def step_times(
    model: PreTrainedModel,
    batch: int,
    memory: dict[tuple[Hashable, ...], StepTimes],
    static: bool | None = None,
    traces: Traces | None = None,
    traits: ModelTraits | None = None,
    packed: bool = False,
) -> StepTimes:
    """The curve for a call: what earlier calls learnt, else a saved one, else an empty one.

    Args:
        memory: curves that earlier calls on the model learnt; a new one is put there.
        traces: the model's traced passes. Curves are saved for passes that are all traced, and for passes of which
            none is; a mixture's is learnt.
        packed: passes run on packed weights.
    """
    traits = traits or ModelTraits.of(model)
    fixed = dynamic_reason(static, model, traits) is None
    traced = traces.of(batch) if traces is not None else frozenset()
    key = (batch, model.dtype, model.device, traits.attention, fixed, torch.get_num_threads(), packed, traced)
    if key not in memory:
        rowwise = traits.device.type == "cpu" and computed_dtype(model.dtype) is not model.dtype
        # What dense weights take that are read once a row says nothing of packed ones.
        near = [
            curve for other, curve in memory.items() if other[:-2] == key[:-2] and (other[-2] == packed or not rowwise)
        ]
        everything = {kind.single for kind in traced} == {True, False}
        saved = cached(model, batch, static, everything, packed) if everything or not traced else None
        costs = None if saved or near or packed else row_costs(model, batch)
        memory[key] = saved.doubt() if saved else (near[-1].as_guess() if near else StepTimes(costs=costs))
        # On CUDA libraries multiply with one row in ways of their own; with several the time may even fall with their
        # number: an H200 takes 0.8 ms for a float32 pass of the bundled model over 1 node, 2.3 over 8 and 1.1 over 32.
        on_cuda = fixed and traits.device.type == "cuda"
        memory[key].steps = on_cuda or no_tree(model, traits) is not None
    return memory[key]


def curve_of(
    model: PreTrainedModel,
    view: TreeModel | LinearModel,
    memory: dict[tuple[Hashable, ...], StepTimes],
    static: bool | None,
    traits: ModelTraits,
) -> StepTimes:
    """The curve of passes as ``view`` runs them now (see :func:`step_times`)."""
    if isinstance(view, LinearModel):
        return step_times(model, view.batch, memory, static, traits=traits)
    forward, executor = view.forward_pass, view.executor
    traces = executor.traces if isinstance(executor, TracedExecutor) else None
    return step_times(model, forward.batch, memory, static, traces, traits, forward.is_packed)

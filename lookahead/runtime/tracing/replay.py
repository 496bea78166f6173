"""Tree forwards on a CPU as traced operations: the model's Python runs once, and not in every pass.

In a small model most of a pass on a CPU goes into transformers' Python. A trace (TorchScript) runs the very same
operations in the same order without it, to the last bit. It is given the weights in every pass and holds none. `record`
makes traces, `schedule` says when. They are compared with the model again where the context or the tree has doubled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from jacobi import TokenTree
from lookahead.models.hidden_states import Outputs
from lookahead.runtime.executor import Executor
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.registry import During

_ENOUGH = 8  # passes without a trace that tell what they take


@dataclass(frozen=True, slots=True)
class Kind:
    """What inputs do not tell a trace: how many sequences; if one node of each, a mask, packed query heads."""

    batch: int
    single: bool
    masked: bool
    packed: bool


@dataclass(slots=True)
class Trace:
    """One traced pass: a ``function`` from tensors as :func:`flat` orders them, and the weights, to logits
    ``[batch, node, vocab]``; where taps are wanted, to a tuple of these and each tap's ``[batch, node, hidden]``."""

    function: Callable[..., Any]
    slots: int  # of the text,
    nodes: int  # and of the tree, up to twice which it is taken to do what the model does


@dataclass(slots=True)
class Missed:
    """Passes that had no trace: how many, and what they took in all."""

    passes: int = 0
    ms: float = 0.0


@dataclass
class Traces:
    """A model's traces for one dtype, attention and choice of taps, for which ``key`` stands."""

    key: Any
    taps: tuple[str, ...] = ()  # hidden states that a pass gives beside its logits
    settings: Any = None  # stands for the model as it was when the traces were made
    made: dict[Kind, Trace] = field(default_factory=dict)
    missed: dict[Kind, Missed] = field(default_factory=dict)  # what had none
    saved: dict[Kind, bool] = field(default_factory=dict)  # whether an earlier process has left one
    failure: str | None = None  # why there are none, and will be none

    def of(self, batch: int) -> frozenset[Kind]:
        """The kinds of passes over so many sequences that have traces."""
        return frozenset(kind for kind in list(self.made) if kind.batch == batch)

    def untraced_ms(self, batch: int) -> float | None:
        """What passes over one node took without a trace; None while too few were run."""
        single = [missed for kind, missed in list(self.missed.items()) if kind.single and kind.batch == batch]
        passes = sum(missed.passes for missed in single)
        return sum(missed.ms for missed in single) / passes if passes >= _ENOUGH else None

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.made.clear()


class TracedExecutor(Executor):
    """Runs passes by a model's traces, and eagerly those of a kind that has none. ``forward`` is plain
    (:attr:`TreeForward.is_plain`); what is made during the call is used from the next pass on."""

    def __init__(self, traces: Traces, forward: TreeForward, reason: str | None = None) -> None:
        super().__init__(forward, reason)
        self.traces = traces

    @property
    def route(self) -> str:
        return "traced" if self._are_made else "dynamic"

    @property
    def reason(self) -> str | None:
        return None if self._are_made else self.traces.failure or self._reason

    @property
    def _are_made(self) -> bool:
        return bool(self.traces.of(self.forward_pass.batch))

    @property
    def plain_ms(self) -> float | None:
        """What the model's own Python, or its own weights, take for a pass over one node."""
        untraced = self.traces.untraced_ms(self.forward_pass.batch) if self._are_made else None
        return max(filter(None, (untraced, super().plain_ms)), default=None)

    @cached_property
    def _weights(self) -> list[Tensor]:
        return list(weights_of(self.forward_pass.module).values())

    def go_on_with(self, traces: Traces) -> None:
        """Use other traces from now on: passes run on other weights."""
        self.traces = traces
        self.__dict__.pop("_weights", None)

    def _pass(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor], masks: Any) -> Outputs:
        forward, traces = self.forward_pass, self.traces
        (batch, nodes), slots = inputs["input_ids"].shape, forward.layout.cache.base
        kind = Kind(batch, nodes == 1, masks is not None, forward.packs(nodes))
        trace = traces.made.get(kind)
        if trace is None:
            return self._missed(kind, inputs, masks)
        filled = masks if kind.masked else forward.masks(trees)
        try:
            outputs = played(trace.function, flat(forward, inputs, filled), self._weights)
        except Exception as error:  # if the model objects as well, it says so by itself
            traces.fail(f"{type(error).__name__}: {error}")
            self.typical = False
            return forward.call(inputs, masks)
        if slots > 2 * trace.slots or nodes > 2 * trace.nodes:
            trace.slots, trace.nodes = max(slots, trace.slots), max(nodes, trace.nodes)
            self.typical = False
            with During(packed=kind.packed):
                expected = forward.call(inputs, masks)
            if not same(outputs, expected):
                traces.fail("a traced pass says something else than the model's own")
                return expected
        return outputs

    def _missed(self, kind: Kind, inputs: dict[str, Tensor], masks: Any) -> Outputs:
        start = perf_counter()
        outputs = self.forward_pass.call(inputs, masks)
        if self.traces.failure is None:
            missed = self.traces.missed.setdefault(kind, Missed())
            missed.passes += 1
            missed.ms += 1e3 * (perf_counter() - start)
        return outputs


def flat(forward: TreeForward, inputs: dict[str, Tensor], masks: Any) -> list[Tensor]:
    """What changes from pass to pass: tokens, positions, sequences, masks, and what the pass writes to and reads.
    transformers makes masks of its own where a tracer looks on and none are given, so a trace is always given some."""
    several = masks.values() if isinstance(masks, dict) else [masks]
    views = forward.layout.cache.open_views(inputs["input_ids"].shape[1])
    places = [] if forward.sequences is None else [forward.sequences]
    return [inputs["input_ids"], inputs["position_ids"], *places, *several, *views]


def played(function: Callable[..., Any], tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Outputs:
    """Run a trace as it was recorded: the optimizer would look at it again for every new shape."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        told = function(*tensors, *weights)
    return Outputs(told[0], tuple(told[1:])) if isinstance(told, tuple) else Outputs(told)


def same(ours: Outputs, theirs: Outputs) -> bool:
    """Whether two passes say the same, to the last bit."""
    ours_all, theirs_all = (ours.logits, *ours.hidden), (theirs.logits, *theirs.hidden)
    return len(ours_all) == len(theirs_all) and all(map(torch.equal, ours_all, theirs_all))


def weights_of(model: nn.Module) -> dict[int, Tensor]:
    """Parameters and buffers, each once, by their ids."""
    held = [part for module in model.modules() for part in (module._parameters, module._buffers)]
    return {id(tensor): tensor for part in held for tensor in part.values() if tensor is not None}

"""Passes on a CPU as traced operations: the model's Python runs once, and not in every pass.

In a small model most of a pass on a CPU goes into transformers' Python, not into arithmetic. A trace (TorchScript) runs
the very same operations in the same order without it, so its numbers are the same to the last bit. It is told the
weights in every pass and holds none of them. :mod:`lookahead.runtime.tracing.record` makes traces.

What a trace says is compared with the model's own pass again whenever the history or the tree has grown to twice of
what it was compared at before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jacobi import TokenTree
from lookahead.models.hidden_states import Outputs
from lookahead.runtime.attention import attention_as

if TYPE_CHECKING:
    from lookahead.runtime.tree import FusedModel


_ENOUGH = 8  # passes without a trace that tell what they take


@dataclass(frozen=True, slots=True)
class Kind:
    """What a trace is not told by its inputs.

    Attributes:
        single: the pass has one node.
        masked: it needs a mask.
        packed: query heads are packed (see :func:`lookahead.runtime.attention.packed_attention`).
    """

    single: bool
    masked: bool
    packed: bool


@dataclass(slots=True)
class Trace:
    """One traced pass.

    Attributes:
        function: from tensors as :func:`flat` orders them, and the weights, to logits ``[batch, node, vocab]``; where
            it is wanted, to a pair of these and what the output layer read, ``[batch, node, hidden]``.
        slots: of history, and ``nodes``, up to twice which it is taken to do what the model does.
    """

    function: Callable[..., Any]
    slots: int
    nodes: int


@dataclass(slots=True)
class Missed:
    """Passes that had no trace: how many, and what they took in all."""

    passes: int = 0
    ms: float = 0.0


@dataclass
class Traces:
    """A model's traces for one batch size, dtype and attention, with or without what the output layer reads.

    Attributes:
        key: stands for those.
        reads_hidden: a pass tells what the output layer reads, too.
        settings: stands for the model as it was when the traces were made.
        made: the traces there are.
        missed: what had none, by kind.
        failure: why there are none, and will be none.
    """

    key: Any
    reads_hidden: bool = False
    settings: Any = None
    made: dict[Kind, Trace] = field(default_factory=dict)
    missed: dict[Kind, Missed] = field(default_factory=dict)
    failure: str | None = None

    @property
    def untraced_ms(self) -> float | None:
        """What passes over one node took without a trace; None while too few were run."""
        single = [missed for kind, missed in list(self.missed.items()) if kind.single]
        passes = sum(missed.passes for missed in single)
        return sum(missed.ms for missed in single) / passes if passes >= _ENOUGH else None

    def run(
        self,
        fused: "FusedModel",
        trees: Sequence[TokenTree],
        inputs: dict[str, Tensor],
        masks: Any,
    ) -> Outputs:
        """A pass, by its trace where there is one.

        Args:
            fused: the call's view of the model.
            trees: of the pass.
            inputs: of the pass.
            masks: of the pass; None where the model needs none.
        """
        nodes, slots = inputs["input_ids"].shape[1], fused.context
        kind = Kind(nodes == 1, masks is not None, fused.packs(nodes))
        trace = self.made.get(kind)
        if trace is None:
            start = perf_counter()
            outputs = fused.call(**inputs, **masks_given(masks))
            if self.failure is None:
                missed = self.missed.setdefault(kind, Missed())
                missed.passes += 1
                missed.ms += 1e3 * (perf_counter() - start)
            return outputs
        with torch.inference_mode(False):  # a later pass may write into the same memory outside of it
            filled = masks if kind.masked else fused.masks(trees)
        try:
            outputs = played(trace.function, flat(fused, inputs, filled), fused.weights)
        except Exception as error:  # if the model objects as well, it says so by itself
            self.fail(f"{type(error).__name__}: {error}")
            return fused.call(**inputs, **masks_given(masks))
        if slots > 2 * trace.slots or nodes > 2 * trace.nodes:
            trace.slots, trace.nodes = max(slots, trace.slots), max(nodes, trace.nodes)
            with attention_as(packed=kind.packed):
                expected = fused.call(**inputs, **masks_given(masks))
            if not same(outputs, expected):
                self.fail("a traced pass says something else than the model's own")
                return expected
        return outputs

    def fail(self, reason: str) -> None:
        """Do without traces from now on."""
        self.failure = reason
        self.made.clear()


def masks_given(masks: Any) -> dict[str, Any]:
    """As the model takes them: none where it needs none."""
    return {} if masks is None else {"attention_mask": masks}


def flat(fused: "FusedModel", inputs: dict[str, Tensor], masks: Any) -> list[Tensor]:
    """What changes from pass to pass: tokens, positions, masks, and what the pass writes to and reads.

    transformers makes masks of its own where a tracer looks on and none are given, so a trace is always given some.
    """
    several = masks.values() if isinstance(masks, dict) else [masks]
    views = fused.open_views(inputs["input_ids"].shape[1])
    return [inputs["input_ids"], inputs["position_ids"], *several, *views]


def played(function: Callable[..., Any], tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Outputs:
    """Run a trace as it was recorded: the optimizer would look at it again for every new shape."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        told = function(*tensors, *weights)
    return told if isinstance(told, tuple) else (told, None)


def same(told: Outputs, expected: Outputs) -> bool:
    """Whether two passes say the same, to the last bit."""
    ours = [tensor for tensor in told if tensor is not None]
    theirs = [tensor for tensor in expected if tensor is not None]
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def weights_of(model: nn.Module) -> dict[int, Tensor]:
    """Parameters and buffers, each once, by their ids."""
    held = [part for module in model.modules() for part in (module._parameters, module._buffers)]
    return {id(tensor): tensor for part in held for tensor in part.values() if tensor is not None}

"""How is a forward run? Eagerly (here), by traces, or by CUDA graphs: each of these is an executor, too."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from jacobi import TokenTree
from lookahead.models.hidden_states import Outputs
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.forward import TreeForward


class Executor:
    """Runs one call's tree forwards by the model's own Python, and keeps what was accepted in the KV cache.

    Attributes:
        route: how passes are run: ``"dynamic"``, ``"traced"``, ``"static"`` or ``"cuda graphs"``.
        forward_pass: what is run.
        reason: why not by a faster route; None = there is none.
        keeps_buffers: those of the KV cache serve the model's next call, too.
        plain_ms: milliseconds that the model's own pass over one node takes, where passes here are faster; else None.
        typical: the last pass took what passes of its size take; nothing was warmed up, captured, compared or moved.
    """

    keeps_buffers = False

    def __init__(self, forward: TreeForward, reason: str | None = None) -> None:
        self._reason = reason
        self.forward_pass = forward
        self.typical = True

    @property
    def route(self) -> str:
        return "dynamic"

    @property
    def reason(self) -> str | None:
        return self._reason

    @property
    def plain_ms(self) -> float | None:
        return self.forward_pass.unpacked_ms

    def reserve(self, extent: Extent) -> None:
        """The prompt is about to be read: say where its keys and values go."""
        self.forward_pass.layout.cache.reserve(replace(extent, window=self.forward_pass.holds))

    def open(self) -> None:
        """The prompt has been read: get ready for trees."""
        self.forward_pass.layout.cache.consolidate()

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        """Score every node of every tree in one pass."""
        self.typical = True
        inputs, masks = self.forward_pass.inputs(trees)
        with self.forward_pass.running(trees, inputs):
            return self._pass(trees, inputs, masks)

    def _pass(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor], masks: Any) -> Outputs:
        return self.forward_pass.call(inputs, masks)

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Make each sequence's ``chosen`` nodes of the last pass, root first, the end of its KV cache."""
        self.forward_pass.layout.cache.keep(chosen)

    def flush(self) -> None:
        """Afterwards the KV cache holds all that was kept, in its place."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""
        return nodes

    def close(self) -> None:
        """The call is over: give back what the model's next call can use."""

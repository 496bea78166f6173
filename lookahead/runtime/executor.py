"""How is a forward run? One protocol with three answers: eagerly (here), by traces, or by CUDA graphs."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from jacobi import TokenTree
from lookahead.models.hidden_states import Outputs
from lookahead.runtime.forward import TreeForward, masks_given
from lookahead.runtime.inference_mode import InferenceMode


class Executor(Protocol):
    """Runs one call's tree forwards, and keeps what was accepted in the KV cache.

    Attributes:
        route: how passes are run: ``"dynamic"``, ``"traced"``, ``"static"`` or ``"cuda graphs"``.
        reason: why not by a faster route; None = there is none.
        plain_ms: milliseconds that the model's own pass over one node takes, where passes here are faster; else None.
    """

    @property
    def route(self) -> str: ...

    @property
    def reason(self) -> str | None: ...

    @property
    def plain_ms(self) -> float | None: ...

    def open(self, slots: int) -> None:
        """Move the prompt's keys and values into buffers with about ``slots`` slots."""

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        """Score every node of every tree in one pass."""

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Make each sequence's ``chosen`` nodes of the last pass, root first, the end of its KV cache."""

    def flush(self) -> None:
        """Afterwards the KV cache holds all that was kept, in its place."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""

    def close(self) -> None:
        """The call is over: give back what the model's next call can use."""


class EagerExecutor:
    """Runs the model's own Python, in inference mode if ``is_safe``; None = look before the first pass."""

    def __init__(self, forward: TreeForward, reason: str | None = None, is_safe: bool | None = None) -> None:
        self._reason = reason
        self._forward = forward
        self._inference = InferenceMode(forward.model, is_safe)

    @property
    def route(self) -> str:
        """``"dynamic"``: shapes follow the text."""
        return "dynamic"

    @property
    def reason(self) -> str | None:
        """As it was given."""
        return self._reason

    @property
    def plain_ms(self) -> float | None:
        """Passes here are the model's own."""
        return None

    def open(self, slots: int) -> None:
        """Fresh buffers."""
        self._forward.layout.cache.consolidate(slots)

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        """Build inputs and masks, and call the model."""
        inputs, masks = self._forward.inputs(trees)
        return self._inference.run(lambda: self._pass(trees, inputs, masks))

    def _pass(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor], masks: Any) -> Outputs:
        with self._forward.running(trees, inputs):
            return self._forward.call(**inputs, **masks_given(masks))

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Move the slots now."""
        self._forward.layout.cache.keep(chosen)

    def flush(self) -> None:
        """Nothing waits."""

    def bucket(self, nodes: int) -> int:
        """As many as there are."""
        return nodes

    def close(self) -> None:
        """Nothing that was made in inference mode stays on the model."""
        self._inference.leave()

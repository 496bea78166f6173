"""What makes passes on a CPU cheaper in the middle of a call, once the rest of it pays for that."""

from collections.abc import Callable
from time import perf_counter

from transformers import PreTrainedModel

from lookahead.runtime.forward import TreeForward
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.packing import call_times, packed_weights, packing_of
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import LOOKS, SURELY, TraceSchedule
from lookahead.runtime.tree import TreeModel


class PackingSchedule:
    """Counts what one call's passes take without packed weights, and goes over to them where that pays by itself. The
    call writes at most ``new_tokens``; ``renewed`` is told the milliseconds that a change of passes took."""

    def __init__(
        self, model: PreTrainedModel, forward: TreeForward, new_tokens: int, renewed: Callable[[float], None]
    ) -> None:
        self._model = model
        self._forward = forward
        self._known = packing_of(model)
        self._new_tokens = new_tokens
        self._renewed = renewed
        self._passes = 0
        self._spent_ms = 0.0

    def see(self, nodes: int, ms: float, written: int) -> None:
        """Take in a pass over ``nodes`` nodes in all, after which the longest sequence has ``written`` tokens."""
        if self._forward.is_packed:
            return
        self._known.spend(nodes, ms)
        self._passes += 1
        self._spent_ms += ms
        if self._passes % LOOKS:
            return
        start = perf_counter()
        left_ms = self._spent_ms * (self._new_tokens - written) / max(1, written)
        limits = self._forward.limits
        parts = packed_weights(self._model, worth_ms=left_ms / SURELY, limits=limits)
        if parts is not None:
            self._forward.use(Packed(parts, limits))
            self._renewed(1e3 * (perf_counter() - start))


class Upgrades:
    """Looks at every pass of one call's view of a ``model``, and goes over to packed weights and traces where they pay.

    Args:
        packs: passes may run on packed weights.
        new_tokens: most tokens that the call writes.
        renewed: is told the milliseconds that a change took, 0 where sequences have left the batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        view: TreeModel,
        packs: bool,
        new_tokens: int,
        renewed: Callable[[float], None] = lambda ms: None,
    ) -> None:
        self._times = call_times(model)
        self._forward, executor = view.forward_pass, view.executor
        self._batch, self._renewed = self._forward.batch, renewed
        self._packing = PackingSchedule(model, self._forward, new_tokens, renewed) if packs else None
        self._traces: TraceSchedule | None = None
        if isinstance(executor, TracedExecutor):
            self._traces = TraceSchedule(model, executor, new_tokens, renewed)

    def see(self, nodes: int, ms: float, written: int) -> None:
        """Take in a pass over ``nodes`` nodes in all, 0 for the prompt's, after which the longest sequence has
        ``written`` tokens."""
        self._times.see(nodes, ms)
        self.buy(nodes, ms, written)
        if self._forward.batch != self._batch:
            self._batch = self._forward.batch
            self._renewed(0.0)

    def buy(self, nodes: int, ms: float, written: int) -> None:
        """:meth:`see` for a pass that is no part of one call, which others' calls are not measured by."""
        if self._packing is not None and nodes:
            self._packing.see(nodes, ms, written)
        if self._traces is not None:
            self._traces.see(written)

"""What makes passes on a CPU cheaper in the middle of a call, once the rest of it pays for that."""

from collections.abc import Callable
from time import perf_counter

from transformers import PreTrainedModel

from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.packing import call_times, packed_weights, packing_of
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import LOOKS, SURELY, TraceSchedule
from lookahead.runtime.tree import TreeModel


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
        self._model, self._forward = model, view.forward_pass
        self._times, self._packing = call_times(model), packing_of(model) if packs else None
        self._new_tokens, self._renewed = new_tokens, renewed
        self._batch = self._forward.batch
        self._unpacked, self._unpacked_ms = 0, 0.0  # passes without packed weights, and what they took
        self._traces: TraceSchedule | None = None
        if isinstance(view.executor, TracedExecutor):
            self._traces = TraceSchedule(model, view.executor, new_tokens, renewed)

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
        if self._packing is not None and nodes and not self._forward.is_packed:
            self._packing.spend(nodes, ms)
            self._unpacked += 1
            self._unpacked_ms += ms
            if self._unpacked % LOOKS == 0:
                self._pack_if_it_pays(written)
        if self._traces is not None:
            self._traces.see(written)

    def _pack_if_it_pays(self, written: int) -> None:
        start, limits = perf_counter(), self._forward.limits
        left_ms = self._unpacked_ms * (self._new_tokens - written) / max(1, written)
        parts = packed_weights(self._model, worth_ms=left_ms / SURELY, limits=limits)
        if parts is not None:
            self._forward.use(Packed(parts, limits))
            self._renewed(1e3 * (perf_counter() - start))

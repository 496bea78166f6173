"""What makes passes on a CPU cheaper in the middle of a call, once the rest of it pays for that."""

from collections.abc import Callable

from transformers import PreTrainedModel

from lookahead.runtime.call_times import call_times
from lookahead.runtime.packing_schedule import PackingSchedule
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import TraceSchedule
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
        if self._packing is not None and nodes:
            self._packing.see(nodes, ms, written)
        if self._traces is not None:
            self._traces.see(written)
        if self._forward.batch != self._batch:
            self._batch = self._forward.batch
            self._renewed(0.0)

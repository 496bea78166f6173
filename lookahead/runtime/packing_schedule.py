"""Packed weights in the middle of a call, where what it still has to write promises twice their price."""

from collections.abc import Callable
from time import perf_counter

from transformers import PreTrainedModel

from lookahead.runtime.forward import TreeForward
from lookahead.runtime.packing import packed_weights, packing_of

_LOOKS = 16  # passes from one look to the next
_SURELY = 2.0  # times the price, that the rest of a call has to promise: it may end early


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
        if self._forward.packed is not None:
            return
        self._known.spend(nodes, ms)
        self._passes += 1
        self._spent_ms += ms
        if self._passes % _LOOKS:
            return
        start = perf_counter()
        left_ms = self._spent_ms * (self._new_tokens - written) / max(1, written)
        packed = packed_weights(self._model, worth_ms=left_ms / _SURELY)
        if packed is not None:
            self._forward.use(packed)
            self._renewed(1e3 * (perf_counter() - start))

"""When traces are made: once the model's Python has taken, in passes without one, as long as making one takes.

That is ski rental: a trace is bought when renting has cost as much, and so are packed weights. It is looked at as a
call begins and, every few passes, in its middle, where the rest has to promise twice the price; but only where passes
are most of what calls take. A trace that an earlier process has left costs little, and is read as soon as that pays.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead._per_model import MOST_KINDS, MOST_PASSES, PerModel
from lookahead.models.conformance import modified, unrecorded
from lookahead.models.families.scans import scanned_layers
from lookahead.models.fingerprint import fingerprint
from lookahead.models.traits import ModelTraits
from lookahead.runtime.open import Tracing
from lookahead.runtime.packed_layers import Invariance, Packed
from lookahead.runtime.packing import call_times, layers_of, packed_weights, packing_of
from lookahead.runtime.tracing.record import record
from lookahead.runtime.tracing.replay import Kind, Missed, TracedExecutor, Traces
from lookahead.runtime.tracing.saved import file_of
from lookahead.runtime.tree import TreeModel

# What it takes to make a trace, and what that is worth in a pass (docs/log/passes.md has the figures).
_COST = 35.0  # passes' Python
_COMPARED = 9.0  # whole passes
_LOADED = 4.0  # the same of one that an earlier process has left: passes' Python
_COMPARED_ONCE = 3.0  # and whole passes
_PYTHON_MS = 0.03  # of a pass, for each of the model's modules
SURELY = 2.0  # times what a trace costs, or packing, that the rest of a call has to promise: it may end early
LOOKS = 4  # passes from one look to the next

_kept: PerModel[list[Traces]] = PerModel(list)
_kept_lock = threading.Lock()
_making = threading.Lock()


def untraceable(model: PreTrainedModel) -> str | None:
    """Why passes over a model are not traced; None = nothing speaks against it."""
    return _wrong_kind(model, ModelTraits.of(model)) or modified(model)


def _wrong_kind(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    if model.device.type != "cpu":
        return "passes are traced on a CPU only"
    if traits.attention not in ("sdpa", "eager"):
        return f"{traits.attention} compiles kernels of its own"
    if scanned_layers(model, traits.config):
        return "its layers have recurrent states, which no trace is given"
    return unrecorded(model, traits, "tree")


def traces_for(
    model: PreTrainedModel, taps: tuple[str, ...] = (), traits: ModelTraits | None = None, packed: Packed | None = None
) -> Traces | None:
    """A model's traces for calls that want the hidden states ``taps``, over ``packed`` weights; None = it is not
    traced. Those are made here that earlier calls could have used often enough."""
    traits = traits or ModelTraits.of(model)
    if _wrong_kind(model, traits) is not None:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (traits.dtype, traits.attention, modes, taps, _layers(packed))
    with _kept_lock:
        known = _kept.of(model)
        found = next((traces for traces in known if traces.key == key), None) or _new(key, taps, known)
        known[:] = [*(traces for traces in known if traces is not found), found][-MOST_KINDS:]
    due = _due(model, found, packed)
    if not (found.made or due):
        return found  # which counts what it misses
    if modified(model) is not None:
        return None
    settings = fingerprint(model)
    if settings != found.settings and found.made:  # the model is not what it was: start over
        fresh = Traces(key, taps)
        with _kept_lock:
            known[:] = [fresh if traces is found else traces for traces in known]
        return fresh
    if due:
        _make(model, found, settings, list(due), packed)
    return found


def _layers(packed: Packed | None) -> tuple[bool, Invariance | None]:
    """Whether linear layers run over packed weights; and within which limits, of which a trace is made."""
    return bool(packed and packed.parts), packed and packed.limits


def _new(key: tuple[Any, ...], taps: tuple[str, ...], known: Sequence[Traces]) -> Traces:
    """Traces that are still to be made: over packed weights as soon as those that went before would have been."""
    packed, limits = key[-1]
    before = next((traces for traces in known if traces.key == (*key[:-1], (False, limits))), None) if packed else None
    return Traces(key, taps, missed={kind: replace(missed) for kind, missed in before.missed.items()} if before else {})


def faster_passes(
    model: PreTrainedModel,
    traits: ModelTraits,
    taps: tuple[str, ...] = (),
    *,
    traces: bool,
    packs: bool,
    limits: Invariance | None = None,
) -> tuple[Tracing | None, Packed | None]:
    """What makes passes on a CPU faster, as far as earlier ones have paid for it: traces, and packed weights. Their
    numbers are the same whatever else is in a pass, where there are ``limits``."""
    packed = layers_of(model, packs=packs, limits=limits)
    found = traces_for(model, taps, traits, packed) if traces else None
    return None if found is None else partial(TracedExecutor, found), packed


class Upgrades:
    """Looks at every pass of one call's view of a ``model``, and goes over to packed weights and traces where they pay:
    those that there are and, in a long call, those that it will pay for by itself.

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
        self._executor = view.executor if isinstance(view.executor, TracedExecutor) else None
        self._times, self._packing = call_times(model), packing_of(model) if packs else None
        self._new_tokens, self._renewed = new_tokens, renewed
        self._batch = self._forward.batch
        self._passes = 0
        self._unpacked, self._unpacked_ms = 0, 0.0  # passes without packed weights, and what they took
        if self._executor is not None:
            self._made = frozenset(self._executor.traces.made)
            self._start(self._executor.traces)

    def _start(self, traces: Traces) -> None:
        self._traces, self._packed = traces, self._forward.packed
        self._before = {kind: missed.passes for kind, missed in list(traces.missed.items())}

    def see(self, nodes: int, ms: float, written: int) -> None:
        """Take in a pass over ``nodes`` nodes, 0 for the prompt's; the longest sequence has ``written`` tokens."""
        self._times.see(nodes, ms)
        self.buy(nodes, ms, written)
        if self._forward.batch != self._batch:
            self._batch = self._forward.batch
            self._renewed(0.0)

    def buy(self, nodes: int, ms: float, written: int) -> None:
        """:meth:`see` for a pass that is no part of one call, which others' calls are not measured by."""
        self._passes += 1
        if self._packing is not None and nodes and not self._forward.is_packed:
            self._packing.spend(nodes, ms)
            self._unpacked += 1
            self._unpacked_ms += ms
            if self._unpacked % LOOKS == 0:
                self._pack_if_it_pays(written)
        if self._executor is not None:
            self._trace_what_pays(self._executor, written)

    def _pack_if_it_pays(self, written: int) -> None:
        start, limits = perf_counter(), self._forward.limits
        left_ms = self._unpacked_ms * (self._new_tokens - written) / max(1, written)
        parts = packed_weights(self._model, worth_ms=left_ms / SURELY, limits=limits)
        if parts is not None:
            self._forward.use(Packed(parts, limits))
            self._renewed(1e3 * (perf_counter() - start))

    def _trace_what_pays(self, executor: TracedExecutor, written: int) -> None:
        start, packed = perf_counter(), self._forward.packed
        if packed is not self._packed:
            taps = self._traces.taps
            other = traces_for(self._model, taps, packed=packed)
            executor.go_on_with(other or Traces(None, taps, failure="passes are traced no more"))
            self._start(executor.traces)
        if self._passes % LOOKS == 0:
            self._make_what_pays(written)
        made = frozenset(self._traces.made)
        if made != self._made:  # by this call or another, which may also have found one wrong
            self._made = made
            self._renewed(1e3 * (perf_counter() - start))

    def _make_what_pays(self, written: int) -> None:
        model, traces, paid = self._model, self._traces, list[Kind]()
        for kind, passes in _due(model, traces, self._packed).items():
            here = min(self._passes, traces.missed[kind].passes - self._before.get(kind, 0))
            left = here * (self._new_tokens - written) / max(1, written)  # passes, if the call goes on as it has begun
            paid += [kind] if left >= SURELY * passes else []
        if paid and modified(model) is None:
            _make(model, traces, fingerprint(model), paid, self._packed)


def traces_to_measure(model: PreTrainedModel, packed: Packed | None = None) -> Traces:
    """A model's traces, for passes that are to be measured; LookaheadError where passes are not traced."""
    reason = untraceable(model)
    traces = traces_for(model, packed=packed) if reason is None else None
    if traces is None:
        raise refusal(reason or "something is special about them")
    if traces.failure is not None:
        raise refusal(traces.failure)
    return traces


def trace_now(model: PreTrainedModel, view: TreeModel, passes: Iterable[Sequence[TokenTree]]) -> None:
    """Trace ``passes`` (their trees) at once, whatever that costs, so that they can be measured.

    Each is run once as it is; ``view`` was opened with :func:`traces_to_measure`, and its KV cache stays as it is.

    Raises:
        LookaheadError: passes over this model are not traced.
    """
    executor = view.executor
    if not isinstance(executor, TracedExecutor):
        raise refusal("something is special about them")
    traces = executor.traces
    for trees in passes:
        view.forward(trees)
    batch = view.forward_pass.batch
    due = [kind for kind in list(traces.missed) if kind not in traces.made and kind.batch == batch]
    _make(model, traces, fingerprint(model), due, executor.forward_pass.packed)
    if not traces.made.keys() >= set(due):
        raise refusal(traces.failure or "another call is at it")


def refusal(reason: str) -> LookaheadError:
    return LookaheadError(f"Passes over this model cannot be traced: {reason}.")


def _due(model: PreTrainedModel, traces: Traces, packed: Packed | None = None) -> dict[Kind, float]:
    """The kinds of passes that have been missed for long enough, and how many passes that is; what an earlier process
    has left is due as soon as its kind was missed a few times."""
    if traces.failure is not None or not call_times(model).passes_count:
        return {}
    unmade = {kind: some for kind, some in list(traces.missed.items()) if kind not in traces.made}
    missed = {kind: some for kind, some in unmade.items() if some.passes >= min(_COST, _LOADED)}
    if not missed:
        return {}
    python_ms, due = _PYTHON_MS * sum(1 for _ in model.modules()), dict[Kind, float]()
    for kind, some in missed.items():
        if kind not in traces.saved:
            file = file_of(model, traces, kind, packed)
            traces.saved[kind] = file is not None and file.exists()
        python, whole = (_LOADED, _COMPARED_ONCE) if traces.saved[kind] else (_COST, _COMPARED)
        # So many passes without a trace take as much of Python's time as it costs to make one.
        passes = python + whole * some.ms / max(1, some.passes) / python_ms
        if traces.saved[kind] or some.passes >= passes:
            due[kind] = passes
    return due


def _make(model: PreTrainedModel, traces: Traces, settings: Any, due: list[Kind], packed: Packed | None) -> None:
    """Make the traces that are due, unless another call is at it, or the model is not what it was for the others."""
    if not _making.acquire(blocking=False):
        return
    try:
        if traces.made and settings != traces.settings:
            return
        traces.settings = settings
        for kind in due:
            file = file_of(model, traces, kind, packed)
            made = traces.made.get(kind) or record(model, kind, traces.taps, packed, file)
            if traces.failure is None:  # which another call may have found meanwhile
                traces.made[kind] = made
                for oldest in list(traces.made)[:-MOST_PASSES]:  # which have to pay anew
                    del traces.made[oldest]
                    traces.missed[oldest] = Missed()
    except Exception as error:  # whatever the tracer or the model's code objects to
        traces.fail(f"{type(error).__name__}: {error}")
    finally:
        _making.release()

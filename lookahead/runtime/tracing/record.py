"""Makes the traces of `replay`, after the passes that could have used one have paid for it.

A trace takes as long as a few dozen passes, so it is made when transformers' Python has taken as long as that in passes
over the model: at the beginning of a call or, in one that has still so far to go that it gets the time back by itself,
in the middle. What a trace might freeze is looked for: a model whose Python reads what tensors hold is left as it is,
and a trace is compared, to the last bit, with the model's own passes over other trees after a longer history.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jacobi import LookaheadError, Path, TokenTree
from lookahead.models.familiar import changed, unfamiliar
from lookahead.models.fingerprint import fingerprint
from lookahead.models.hidden_states import HiddenStates, Outputs
from lookahead.models.traits import decoder_config, vocabulary
from lookahead.runtime.attention import attention_as, fused_pass
from lookahead.runtime.session import bare_model
from lookahead.runtime.tracing.replay import Kind, Missed, Trace, Traces, flat, masks_given, played, same, weights_of
from lookahead.runtime.tree import FusedModel

# What it takes to make a trace, and what that is worth in a pass (docs/log.md has the figures).
_COST = 35.0  # passes' Python
_COMPARED = 9.0  # whole passes
_PYTHON_MS = 0.03  # of a pass, for each of the model's modules
_SURELY = 2.0  # times what a trace costs, that the rest of a call has to promise: it may end early
_LOOKS = 16  # passes from one look to the next
_KEPT = 4  # sets of traces of one model
_PROMPT = 6  # tokens that a trace is made after
_HOST_READS = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "equal", "is_nonzero", "item", "masked_select"}
_HOST_READS |= {"unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
_WARNING: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
_FROZEN = ("Python list", "NumPy", "Iterating", "len of")  # in the tracer's warnings: more than a shape was read

_kept: "weakref.WeakKeyDictionary[PreTrainedModel, list[Traces]]" = weakref.WeakKeyDictionary()
_kept_lock = threading.Lock()
_making = threading.Lock()


def untraceable(model: PreTrainedModel) -> str | None:
    """Why passes over a model are not traced; None = nothing speaks against it."""
    return _wrong_kind(model) or changed(model)


def _wrong_kind(model: PreTrainedModel) -> str | None:
    """What class and config say against traces."""
    if model.device.type != "cpu":
        return "passes are traced on a CPU only"
    attention = decoder_config(model)._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"{attention} compiles kernels of its own"
    return unfamiliar(model)


def traces_for(model: PreTrainedModel, batch: int, reads_hidden: bool = False) -> Traces | None:
    """A model's traces for a call; None where its passes are not traced.

    Those are made here that earlier calls could have used often enough.

    Args:
        model: the model.
        batch: rows of the call.
        reads_hidden: it wants to know what the output layer reads.
    """
    if _wrong_kind(model) is not None:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (batch, model.dtype, decoder_config(model)._attn_implementation, modes, reads_hidden)
    with _kept_lock:
        known = _kept.setdefault(model, [])
        found = next((traces for traces in known if traces.key == key), None) or Traces(key, reads_hidden)
        known[:] = [*(traces for traces in known if traces is not found), found][-_KEPT:]
    due = _due(model, found)
    if not (found.made or due):
        return found  # which counts what it misses
    if changed(model) is not None:
        return None
    settings = fingerprint(model)
    if settings != found.settings and found.made:  # the model is not what it was: start over
        fresh = Traces(key, reads_hidden)
        with _kept_lock:
            known[:] = [fresh if traces is found else traces for traces in known]
        return fresh
    if due:
        _make(model, batch, found, settings, list(due))
    return found


class CallTraces:
    """One call's passes by traces: those that there are and, in a long call, those that it will pay for by itself.

    Args:
        model: the model.
        traces: of :func:`traces_for`.
        fused: the call's view of the model.
        renew: is told how long it took to let passes take another time from then on; None = nobody is.
        batch: rows of the call.
        new_tokens: most tokens that the call writes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        traces: Traces,
        fused: FusedModel,
        renew: Callable[[float], None] | None,
        batch: int,
        new_tokens: int,
    ) -> None:
        self._model = model
        self._traces = traces
        self._fused = fused
        self._renew = renew
        self._batch = batch
        self._new_tokens = new_tokens
        self._passes = 0
        self._before = {kind: missed.passes for kind, missed in list(traces.missed.items())}
        self._start()

    def _start(self) -> None:
        """Let passes be run by what there is now."""
        self._made = frozenset(self._traces.made)
        self._uses = self._fused.use(self._traces)

    def look(self, written: int) -> None:
        """Make what has come to pay; to be called after each pass.

        Args:
            written: tokens of the longest row so far.
        """
        self._passes += 1
        if not self._uses:
            return
        start = perf_counter()
        if self._passes % _LOOKS == 0:
            self._make_what_pays(written)
        if self._traces.made.keys() != self._made:  # by this call or another, which may also have found one wrong
            self._start()
            if self._renew is not None:
                self._renew(1e3 * (perf_counter() - start))

    def _make_what_pays(self, written: int) -> None:
        model, traces = self._model, self._traces
        due = _due(model, traces)
        paid = [kind for kind, passes in due.items() if self._passes_left(kind, written) >= _SURELY * passes]
        if paid and changed(model) is None:
            _make(model, self._batch, traces, fingerprint(model), paid)

    def _passes_left(self, kind: Kind, written: int) -> float:
        """How many passes of a kind there will be, if the call goes on as it has begun."""
        here = min(self._passes, self._traces.missed[kind].passes - self._before.get(kind, 0))
        return here * (self._new_tokens - written) / max(1, written)


def trace_now(model: PreTrainedModel, batch: int, fused: FusedModel, passes: Iterable[Sequence[TokenTree]]) -> Traces:
    """Let passes be run by traces at once, whatever that costs, so that they can be measured.

    Args:
        model: the model.
        batch: rows of a pass.
        fused: a view of the model; its history stays as it is.
        passes: their trees; each of them is run once as it is.

    Returns:
        The traces; where they have a ``failure`` afterwards, passes were not run by them.

    Raises:
        LookaheadError: passes over this model are not traced.
    """
    reason = untraceable(model)
    if reason is not None:
        raise refusal(reason)
    traces = traces_for(model, batch)
    if traces is None or type(fused) is not FusedModel or not fused.use(traces):
        raise refusal("something is special about them")
    if traces.failure is not None:
        raise refusal(traces.failure)
    for trees in passes:
        fused.forward(trees)
    due = [kind for kind in list(traces.missed) if kind not in traces.made]
    _make(model, batch, traces, fingerprint(model), due)
    if not traces.made.keys() >= set(due):
        raise refusal(traces.failure or "another call is at it")
    fused.use(traces)
    return traces


def refusal(reason: str) -> LookaheadError:
    """What is raised where passes have to be traced and cannot be."""
    return LookaheadError(f"Passes over this model cannot be traced: {reason}.")


def _due(model: PreTrainedModel, traces: Traces) -> dict[Kind, float]:
    """The kinds of passes that have been missed for long enough, and how many passes that is."""
    if traces.failure is not None:
        return {}
    missed = {kind: missed for kind, missed in list(traces.missed.items()) if kind not in traces.made}
    if all(some.passes < _COST for some in missed.values()):
        return {}
    python_ms = _PYTHON_MS * sum(1 for _ in model.modules())
    enough = {kind: _enough(some, python_ms) for kind, some in missed.items()}
    return {kind: passes for kind, passes in enough.items() if missed[kind].passes >= passes}


def _enough(missed: Missed, python_ms: float) -> float:
    """How many passes without a trace take as much of Python's time as it costs to make one."""
    return _COST + _COMPARED * missed.ms / max(1, missed.passes) / python_ms


def _make(model: PreTrainedModel, batch: int, traces: Traces, settings: Any, due: list[Kind]) -> None:
    """Make the traces that are due, unless another call is at it, or the model is not what it was for the others."""
    if not _making.acquire(blocking=False):
        return
    try:
        if traces.made and settings != traces.settings:
            return
        traces.settings = settings
        for kind in due:
            made = traces.made.get(kind) or _made(model, batch, kind, traces.reads_hidden)
            if traces.failure is None:  # which another call may have found meanwhile
                traces.made[kind] = made
    except Exception as error:  # whatever the tracer or the model's code objects to
        traces.fail(f"{type(error).__name__}: {error}")
    finally:
        _making.release()


class _HostReads(TorchDispatchMode):
    """Notes the operations by which Python learns what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {func.overloadpacket.__name__} & _HOST_READS
        return func(*args, **(kwargs or {}))


def _made(model: PreTrainedModel, batch: int, kind: Kind, reads_hidden: bool) -> Trace:
    """A trace, compared with the model's own passes after a made-up text.

    Raises:
        ValueError: it would freeze something, or says something else than the model.
    """
    vocab = vocabulary(model)
    word = [(7 + 13 * place) % vocab for place in range(_PROMPT + 9)]
    paths: list[list[list[int]]] = [[], [], []]
    if not kind.single:
        paths = [[word[7:11], word[11:13], word[13:15]], [word[9:12], word[13:14]], [word[8:14], word[14:15]]]
    trees = [[TokenTree.from_paths(token, branches)] * batch for token, branches in zip(word[6:], paths, strict=False)]
    weights = weights_of(model)
    prompt = torch.tensor([word[:_PROMPT]] * batch)
    with ExitStack() as stack:
        hidden = stack.enter_context(HiddenStates(model.get_output_embeddings())) if reads_hidden else None
        fused = stack.enter_context(bare_model(model, prompt, 64, hidden=hidden))
        for context in (torch.inference_mode(), fused_pass(), attention_as(packed=kind.packed)):
            stack.enter_context(context)
        inputs, masks = fused.inputs(trees[0])
        if masks is not None and not kind.masked:
            raise ValueError("a pass after a short text needs a mask")
        with _HostReads() as reads:
            fused.call(**inputs, **masks_given(masks))
        if reads.found:
            raise ValueError(f"its Python reads tensors ({', '.join(sorted(reads.found))})")
        function = _traced(model, fused, inputs, fused.masks(trees[0]), weights, kind)
        for tree in trees:
            inputs, _ = fused.inputs(tree)
            filled = fused.masks(tree)
            expected = fused.call(**inputs, **masks_given(filled if kind.masked else None))
            if not same(played(function, flat(fused, inputs, filled), list(weights.values())), expected):
                raise ValueError("a traced pass says something else than the model's own")
            nodes = sorted({0, len(tree[0]) - 1})
            fused.keep([Path(nodes, [0] * len(nodes))] * batch)
    return Trace(function, fused.context, len(trees[0][0]))


def _traced(
    model: PreTrainedModel,
    fused: FusedModel,
    inputs: dict[str, Tensor],
    masks: Any,
    weights: dict[int, Tensor],
    kind: Kind,
) -> Callable[..., Any]:
    """The trace of one pass."""
    names = tuple(masks) if isinstance(masks, dict) else None
    count = 1 if names is None else len(names)
    tensors = flat(fused, inputs, masks)

    def run(*given: Tensor) -> Tensor | Outputs:
        tokens, positions, *views = given[: len(tensors)]
        several, views = views[:count], views[count:]
        twin = _twin(model, dict(zip(weights, given[len(tensors) :], strict=True)))
        mask = several[0] if names is None else dict(zip(names, several, strict=True))
        with fused.given_views(views), attention_as(packed=kind.packed, masked=kind.masked):
            told = fused.call(twin, input_ids=tokens, position_ids=positions, attention_mask=mask)
        return told if told[1] is not None else told[0]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", _WARNING)
        graph, _ = torch._C._create_graph_by_tracing(run, (*tensors, *weights.values()), lambda value: "", True, False)
    for warning in told:
        message = str(warning.message)
        if not issubclass(warning.category, _WARNING):  # of other threads, or the model's own
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif any(word in message for word in _FROZEN):
            raise ValueError(f"its Python reads tensors ({message.split('.')[0]})")
    # torch.jit.trace would keep the graph in a unit that is never freed.
    function: Callable[..., Any] = torch._C.CompilationUnit().create_function("traced", graph)
    return function


def _twin(module: nn.Module, tensors: dict[int, Tensor]) -> Any:
    """A module with other tensors in the places of its own, which stays as it is."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(vars(module))
    for name in ("_parameters", "_buffers"):
        held: dict[str, Tensor | None] = vars(module)[name]
        twin.__dict__[name] = {key: None if own is None else tensors[id(own)] for key, own in held.items()}
    twin.__dict__["_modules"] = {
        key: None if child is None else _twin(child, tensors) for key, child in module._modules.items()
    }
    return twin

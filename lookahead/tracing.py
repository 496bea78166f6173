"""Makes the traces of :mod:`lookahead.traces`, after the passes that could have used one have paid for it.

A trace takes as long as a few dozen passes, so it is made at the beginning of a call, when transformers' Python has
taken as long as that in earlier calls on the model. What a trace might freeze is looked for: a model whose Python reads
what tensors hold is left as it is, and a trace is compared, to the last bit, with the model's own passes over other
trees after a longer history.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jacobi import Path, TokenTree
from lookahead.arena import fingerprint
from lookahead.attention import attention_as, fused_pass
from lookahead.bare import bare_model
from lookahead.decoder import decoder_config, vocabulary
from lookahead.familiar import changed, unfamiliar
from lookahead.model import FusedModel
from lookahead.traces import Kind, Missed, Trace, Traces, flat, masks_given, played, weights_of

# What it takes to make a trace, and what that is worth in a pass (docs/log.md has the figures).
_COST = 35.0  # passes' Python
_COMPARED = 9.0  # whole passes
_PYTHON_MS = 0.03  # of a pass, for each of the model's modules
_KEPT = 4  # sets of traces of one model
_PROMPT = 6  # tokens that a trace is made after
_HOST_READS = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "equal", "is_nonzero", "item", "masked_select"}
_HOST_READS |= {"unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
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


def traces_for(model: PreTrainedModel, batch: int) -> Traces | None:
    """A model's traces for a call with so many rows; None where its passes are not traced.

    Those are made here that earlier calls could have used often enough.
    """
    if _wrong_kind(model) is not None:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (batch, model.dtype, decoder_config(model)._attn_implementation, modes)
    with _kept_lock:
        known = _kept.setdefault(model, [])
        found = next((traces for traces in known if traces.key == key), None) or Traces(key)
        known[:] = [*(traces for traces in known if traces is not found), found][-_KEPT:]
    due = _due(model, found)
    if not (found.made or due):
        return found  # which counts what it misses
    if changed(model) is not None:
        return None
    settings = fingerprint(model)
    if settings != found.settings and found.made:  # the model is not what it was: start over
        fresh = Traces(key)
        with _kept_lock:
            known[:] = [fresh if traces is found else traces for traces in known]
        return fresh
    if due and _making.acquire(blocking=False):  # while another call is at it, go on as usual
        try:
            found.settings = settings
            for kind in due:
                found.made[kind] = _made(model, batch, kind)
        except Exception as error:  # whatever the tracer or the model's code objects to
            found.fail(f"{type(error).__name__}: {error}")
        finally:
            _making.release()
    return found


def _due(model: PreTrainedModel, traces: Traces) -> list[Kind]:
    """The kinds of passes that have been missed for long enough."""
    if traces.failure is not None:
        return []
    missed = [(kind, missed) for kind, missed in list(traces.missed.items()) if kind not in traces.made]
    if not any(missed.passes >= _COST for _, missed in missed):
        return []
    python_ms = _PYTHON_MS * sum(1 for _ in model.modules())
    return [kind for kind, missed in missed if _is_due(missed, python_ms)]


def _is_due(missed: Missed, python_ms: float) -> bool:
    """Whether passes that had no trace have taken as much of Python's time as it costs to make one."""
    return missed.passes >= _COST + _COMPARED * missed.ms / missed.passes / python_ms


class _HostReads(TorchDispatchMode):
    """Notes the operations by which Python learns what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {func.overloadpacket.__name__} & _HOST_READS
        return func(*args, **(kwargs or {}))


def _made(model: PreTrainedModel, batch: int, kind: Kind) -> Trace:
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
    with bare_model(model, prompt, 64) as fused, torch.inference_mode(), fused_pass(), attention_as(packed=kind.packed):
        inputs, masks = fused.inputs(trees[0])
        if masks is not None and not kind.masked:
            raise ValueError("a pass after a short text needs a mask")
        with _HostReads() as reads:
            fused.logits(**inputs, **masks_given(masks))
        if reads.found:
            raise ValueError(f"its Python reads tensors ({', '.join(sorted(reads.found))})")
        function = _traced(model, fused, inputs, fused.masks(trees[0]), weights, kind)
        for tree in trees:
            inputs, _ = fused.inputs(tree)
            filled = fused.masks(tree)
            expected = fused.logits(**inputs, **masks_given(filled if kind.masked else None))
            if not torch.equal(played(function, flat(fused, inputs, filled), list(weights.values())), expected):
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
) -> Callable[..., Tensor]:
    """The trace of one pass."""
    names = tuple(masks) if isinstance(masks, dict) else None
    count = 1 if names is None else len(names)
    tensors = flat(fused, inputs, masks)

    def run(*given: Tensor) -> Tensor:
        tokens, positions, *views = given[: len(tensors)]
        several, views = views[:count], views[count:]
        twin = _twin(model, dict(zip(weights, given[len(tensors) :], strict=True)))
        mask = several[0] if names is None else dict(zip(names, several, strict=True))
        with fused.given_views(views), attention_as(packed=kind.packed, masked=kind.masked):
            return fused.logits(twin, input_ids=tokens, position_ids=positions, attention_mask=mask)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graph, _ = torch._C._create_graph_by_tracing(run, (*tensors, *weights.values()), lambda value: "", True, False)
    for message in (str(warning.message) for warning in told):
        if "trace" in message and any(word in message for word in _FROZEN):
            raise ValueError(f"its Python reads tensors ({message.split('.')[0]})")
    # torch.jit.trace would keep the graph in a unit that is never freed.
    function: Callable[..., Tensor] = torch._C.CompilationUnit().create_function("traced", graph)
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

"""Makes one trace of `runtime.tracing.replay`, and looks for what it might freeze: a model whose Python reads what
tensors hold is not traced, and a trace is compared, to the last bit, with the model's own passes over other trees."""

import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import Path, TokenTree, Wants
from lookahead.models.early_exit import twin_of
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import tree_forward
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.host_reads import HostReads
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.registry import During
from lookahead.runtime.session import bare_model
from lookahead.runtime.tracing.fusing import fused
from lookahead.runtime.tracing.replay import Kind, Trace, flat, played, same, weights_of
from lookahead.runtime.tracing.saved import read, write
from lookahead.runtime.tree import TreeModel

_PROMPT = 6  # tokens that a trace is made after
_WARNING: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
_FROZEN = ("Python list", "NumPy", "Iterating", "len of")  # in the tracer's warnings: more than a shape was read


def record(
    model: PreTrainedModel,
    kind: Kind,
    taps: Sequence[str],
    packed: Packed | None = None,
    file: pathlib.Path | None = None,
) -> Trace:
    """A trace of a kind of passes that gives the hidden states ``taps``, compared with the model's own, over ``packed``
    weights if there are some; the one that is kept in a ``file``, or else kept there.

    Raises:
        ValueError: it would freeze something, or says something else than the model.
    """
    vocab, batch = ModelTraits.of(model).vocab_size, kind.batch
    word = [(7 + 13 * place) % vocab for place in range(_PROMPT + 9)]
    paths: list[list[list[int]]] = [[], [], []]
    if not kind.single:
        paths = [[word[7:11], word[11:13], word[13:15]], [word[9:12], word[13:14]], [word[8:14], word[14:15]]]
    trees = [[TokenTree.from_paths(token, branches)] * batch for token, branches in zip(word[6:], paths, strict=False)]
    prompt = torch.tensor([word[:_PROMPT]] * batch)
    with ExitStack() as stack:
        view = stack.enter_context(bare_model(model, prompt, 64, wants=Wants(taps=tuple(taps)), packed=packed))
        forward = view.forward_pass
        weights = weights_of(forward.module)
        stack.enter_context(torch.no_grad())
        stack.enter_context(tree_forward(packed=kind.packed))
        known = list(weights.values())
        function = None if file is None else read(file)
        if function is not None and _says(view, kind, function, trees[0], known):
            return Trace(function, view.context, len(trees[0][0]))
        for function in _functions(forward, trees[0], weights, kind):
            if all(_says(view, kind, function, tree, known) for tree in trees):
                if file is not None:
                    write(file, function)
                return Trace(function, view.context, len(trees[0][0]))
    raise ValueError("a traced pass says something else than the model's own")


def _functions(
    forward: TreeForward, trees: list[TokenTree], weights: dict[int, Tensor], kind: Kind
) -> Iterator[Callable[..., Any]]:
    """What a pass over ``trees`` does, with fewer operations if that can be had, and as it was traced."""
    inputs, masks = forward.inputs(trees)
    if masks is not None and not kind.masked:
        raise ValueError("a pass after a short text needs a mask")
    with HostReads() as reads, During(sequences=forward.sequences):
        forward.call(inputs, masks)
    if reads.found:
        raise ValueError(reads.told)
    graph = _traced(forward, inputs, forward.masks(trees), weights, kind)
    for each in (*fused(graph, forward.turns is not None, kind.masked), graph):
        # torch.jit.trace would keep graphs in a unit that is never freed.
        yield torch._C.CompilationUnit().create_function("traced", each)


def _says(
    view: TreeModel, kind: Kind, function: Callable[..., Any], trees: list[TokenTree], weights: Sequence[Tensor]
) -> bool:
    """Whether a traced function says what the model does, which reads some of the trees' nodes."""
    forward = view.forward_pass
    inputs, _ = forward.inputs(trees)
    masks = forward.masks(trees)
    with During(sequences=forward.sequences):
        expected = forward.call(inputs, masks if kind.masked else None)
    found = False
    with suppress(RuntimeError):
        found = same(played(function, flat(forward, inputs, masks), weights), expected)
    nodes = sorted({0, len(trees[0]) - 1})
    view.keep([Path(nodes, [0] * len(nodes))] * len(trees))
    return found


def _traced(forward: TreeForward, inputs: dict[str, Tensor], masks: Any, weights: dict[int, Tensor], kind: Kind) -> Any:
    names = tuple(masks) if isinstance(masks, dict) else None
    count = 1 if names is None else len(names)
    tensors = flat(forward, inputs, masks)

    def run(*given: Tensor) -> Tensor | tuple[Tensor, ...]:
        tokens, positions, *views = given[: len(tensors)]
        sequences = None if forward.sequences is None else views.pop(0)
        several, views = views[:count], views[count:]
        others = dict(zip(weights, given[len(tensors) :], strict=True))

        def change(twin: Any) -> None:
            for name in ("_parameters", "_buffers"):
                held: dict[str, Tensor | None] = vars(twin)[name]
                twin.__dict__[name] = {key: None if own is None else others[id(own)] for key, own in held.items()}

        twin = twin_of(forward.module, change)
        mask = several[0] if names is None else dict(zip(names, several, strict=True))
        how = During(packed=kind.packed, masked=kind.masked, sequences=sequences)
        with forward.layout.cache.given_views(views), how:
            told = forward.call({"input_ids": tokens, "position_ids": positions}, mask, twin)
        return (told.logits, *told.hidden) if told.hidden else told.logits

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", _WARNING)
        graph, _ = torch._C._create_graph_by_tracing(run, (*tensors, *weights.values()), lambda value: "", True, False)
    for warning in told:
        message = str(warning.message)
        if not issubclass(warning.category, _WARNING):  # of other threads, or the model's own
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif any(word in message for word in _FROZEN):
            raise ValueError(f"its Python reads tensors ({message.split('.')[0]})")
    return graph

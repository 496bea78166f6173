"""Which passes took what passes of their size take: not those that were warmed up, captured, compared or run again."""

from functools import partial

import pytest
import torch
from helpers.graphs import StandIn, view
from helpers.models import fresh_model
from helpers.views import buffers_of, tree_view

from jacobi import Path, TokenTree
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.session import bare_model
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import trace_now, traces_to_measure
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented", "no_grad")

TREE = TokenTree.from_paths(3, [[1, 2, 5], [4, 6, 7], [8]])


def told(model: TreeModel, passes: int) -> list[bool]:
    """Whether passes over one tree of eight nodes, of which the root and one child are kept, were typical."""
    found = []
    for _ in range(passes):
        model.forward([TREE])
        found.append(model.typical)
        model.keep([Path([0, 4], [4, 6])])
    return found


def started(model: TreeModel) -> TreeModel:
    model.prefill()
    model.keep([Path([0], [1])])
    return model


def test_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pass that warms up, nor the one that captures, nor the one that checks the graph."""
    static_buffers.release()
    model = fresh_model("llama")
    StandIn(monkeypatch)
    assert told(started(view(model)), 6) == [False, False, False, True, True, True]


def test_passes_without_graphs() -> None:
    """Of eager passes all, of static ones all but the pass in which buffers grow."""
    assert told(started(tree_view(fresh_model("llama"))), 3) == [True, True, True]
    static_buffers.release()
    model = started(view(fresh_model("llama")))
    while model.context + len(TREE) <= buffers_of(model).capacity:
        assert told(model, 1) == [True]
    assert told(model, 2) == [False, True]


def test_compared_traces() -> None:
    """Not the pass in which a trace is compared with the model's own."""
    model = fresh_model("llama")
    traces = traces_to_measure(model)
    with bare_model(model, torch.tensor([[3, 4, 5]]), 64, traced=partial(TracedExecutor, traces)) as looked:
        trace_now(model, looked, [[TREE]])
        assert told(looked, 2) == [True, True]
        for trace in traces.made.values():
            trace.slots = 1
        assert told(looked, 3) == [False, True, True]

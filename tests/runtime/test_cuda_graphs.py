"""CUDA graphs, played by a stand-in: when they are recorded, replayed, found out and given up."""

from typing import Any

import pytest
import torch
from helpers.graphs import StandIn, view
from helpers.models import fresh_model
from helpers.views import buffers_of

from jacobi import Path, TokenTree
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented")


def grown(fused: TreeModel, passes: int) -> list[Any]:
    """The argmax of passes over one tree of eight nodes, of which the root and one child are kept."""
    tree = TokenTree.from_paths(3, [[1, 2, 5], [4, 6, 7], [8]])
    fused.prefill()
    fused.keep([Path([0], [1])])
    told = []
    for _ in range(passes):
        told.append(fused.forward([tree]).greedy)
        fused.keep([Path([0, 4], [4, 6])])
    return told


@torch.no_grad()
def test_graphs_follow_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is run once, captured the second time, checked at the third and replayed ever after."""
    model = fresh_model("llama")
    static_buffers.release()
    expected = grown(view(model), 8)
    stand_in = StandIn(monkeypatch)
    fused = view(model)
    assert grown(fused, 8) == expected
    assert (fused.route, fused.route_reason) == ("cuda graphs", None)
    assert (stand_in.captured, stand_in.replayed) == (1, 7)
    assert all(graph.checked for graph in buffers_of(fused).graphs.values())


@torch.no_grad()
def test_a_frozen_graph_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something of the history was taken for a constant: the pass is run without a graph, and says why."""
    model = fresh_model("llama")
    static_buffers.release()
    expected = grown(view(model), 8)
    stand_in = StandIn(monkeypatch, frozen=True)
    fused = view(model)
    assert grown(fused, 8) == expected
    assert fused.route == "static"
    assert fused.route_reason == "a captured pass does not follow the history"
    assert stand_in.replayed == 2


@torch.no_grad()
def test_a_failed_capture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is run without a graph, also in later calls."""
    model = fresh_model("llama")
    static_buffers.release()
    expected = grown(view(model), 5)
    StandIn(monkeypatch, broken=True)
    for _ in range(2):
        fused = view(model)
        assert grown(fused, 5) == expected
        assert fused.route == "static"
        assert fused.route_reason is not None and "stream is capturing" in fused.route_reason
        fused.close()


@torch.no_grad()
def test_only_so_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was replayed longest ago is forgotten first, with its mask."""
    monkeypatch.setattr(static_buffers, "_MOST_GRAPHS", 2)
    static_buffers.release()
    StandIn(monkeypatch)
    fused = view(fresh_model("llama"))
    fused.prefill()
    fused.keep([Path([0], [1])])
    for nodes in (1, 1, 8, 8, 1, 16, 16, 8, 8):
        monkeypatch.setattr(StandIn, "shape", (1, nodes, 48))
        fused.forward([TokenTree.chain(1, range(nodes - 1))])
        fused.keep([Path([0], [1])])
    assert buffers_of(fused) is not None
    assert [nodes for nodes, _ in buffers_of(fused).graphs] == [16, 8]
    assert {nodes for nodes, _ in buffers_of(fused)._masks} == {16, 8}

"""CUDA graphs, played by a stand-in: when they are recorded, replayed, found out and given up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.graphs import StandIn, counting, view
from helpers.models import fresh_model
from helpers.threads import together
from helpers.views import buffers_of

from jacobi import Path, TokenTree
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs import executor as static
from lookahead.runtime.cuda_graphs.executor import GraphExecutor
from lookahead.runtime.host_reads import HostReads
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented", "no_grad", "released")


@pytest.fixture
def released() -> None:
    """Nothing waits for another test's call."""
    static_buffers.release()


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


def test_graphs_follow_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is run once, captured the second time, compared then and at the third, and replayed ever after."""
    model = fresh_model("llama")
    expected = grown(view(model), 8)
    stand_in = StandIn(monkeypatch)
    fused = view(model)
    assert grown(fused, 8) == expected
    assert (fused.route, fused.executor.reason) == ("cuda graphs", None)
    assert (stand_in.captured, stand_in.replayed) == (1, 7)
    assert all(graph.checked for graph in buffers_of(fused).graphs.values())


def test_graphs_of_other_spans_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their first replay. That passes of the bucket follow the history is known by then."""
    model = fresh_model("llama")
    monkeypatch.setattr(static_buffers, "_LEAST_SPAN", 16)
    expected = grown(view(model), 12)
    calls = counting(monkeypatch, GraphExecutor, "_compared")
    stand_in = StandIn(monkeypatch)
    fused = view(model)
    assert grown(fused, 12) == expected
    compared = [key for _, _, _, key, _ in calls]
    first, *others = dict.fromkeys(compared)
    assert len(others) == stand_in.captured - 1 >= 2
    assert [compared.count(key) for key in (first, *others)] == [2] + [1] * len(others)
    assert all(graph.checked for graph in buffers_of(fused).graphs.values())


@pytest.mark.parametrize(
    ("fault", "reason", "replayed"),
    [
        ({"frozen": True}, "a captured pass does not follow the history", 2),
        ({"stale": True}, "a captured pass leaves something out", 1),  # at its first replay, whose outputs are not used
    ],
)
def test_a_wrong_graph_is_found_out(
    fault: dict[str, bool], reason: str, replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of the history was taken for a constant, or left out: the pass is run without a graph, and says why."""
    model = fresh_model("llama")
    expected = grown(view(model), 8)
    stand_in = StandIn(monkeypatch, **fault)
    fused = view(model)
    assert grown(fused, 8) == expected
    assert (fused.route, fused.executor.reason) == ("static", reason)
    assert stand_in.replayed == replayed


def test_a_frozen_graph_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written over the text's keys and values is put back."""
    model = fresh_model("llama")
    expected = grown(view(model), 8)
    StandIn(monkeypatch, frozen=True)
    fused = view(model)
    replaying = static.Graph.__init__

    def writing(self: static.Graph, replay: Callable[[], None], outputs: Any, base: int, held: Any) -> None:
        def write() -> None:
            replay()
            if fused.context != base:
                for buffer in fused.forward_pass.layout.cache.buffers:
                    buffer[..., base : base + 8, :] = 7.0

        replaying(self, write, outputs, base, held)

    monkeypatch.setattr(static.Graph, "__init__", writing)
    assert grown(fused, 8) == expected
    assert fused.route == "static"


class Reading(torch.nn.Module):
    """Stands before a layer, and lets Python look at what it is given."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(hidden if hidden.abs().max().item() > 0.0 else -hidden, *args, **kwargs)


def test_a_model_that_reads_tensors_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even tried: the pass that warms up says so."""
    model = fresh_model("llama")
    model.model.layers[1] = Reading(model.model.layers[1])
    expected = grown(view(model), 5)
    stand_in = StandIn(monkeypatch)
    fused = view(model)
    assert grown(fused, 5) == expected
    assert (fused.route, stand_in.captured) == ("static", 0)
    assert fused.executor.reason == "its Python reads tensors (_local_scalar_dense)"


def test_what_a_host_reads() -> None:
    """Numbers and sizes that depend on numbers, and what is sent from device to device; shapes are no tensors."""
    given = torch.arange(6.0)
    reads: dict[str, Callable[[], object]] = {
        "_local_scalar_dense": given.max().item,
        "nonzero": given.nonzero,
        "_to_copy": lambda: given.to("meta"),
    }
    for name, read in reads.items():
        with HostReads() as found:
            read()
        assert found.found == {name}
    with HostReads() as found:
        given.double().copy_(given).view(2, -1).shape[0]
    assert not found.told


def test_buckets_are_warmed_up_once_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another span is captured at once; another thread has libraries of its own to set up."""
    monkeypatch.setattr(static_buffers, "_LEAST_SPAN", 16)
    stand_in = StandIn(monkeypatch)
    fused = view(fresh_model("llama"))
    grown(fused, 3)
    assert (stand_in.captured, fused.context) == (1, 18)
    tree = TokenTree.chain(3, range(7))
    fused.forward([tree])  # behind 16 tokens the next span begins
    assert stand_in.captured == 2
    static_buffers.release()
    fused = view(fresh_model("llama"))
    grown(fused, 1)
    together(partial(torch.no_grad()(fused.forward), [tree]))
    assert stand_in.captured == 2
    fused.forward([tree])
    assert stand_in.captured == 3


def test_a_size_that_was_never_run_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer span may take kernels that cannot be set up during a capture."""
    monkeypatch.setattr(static_buffers, "_LEAST_SPAN", 16)
    stand_in = StandIn(monkeypatch)
    fused = view(fresh_model("llama"))
    grown(fused, 3)
    stand_in._broken = 1
    tree = TokenTree.chain(3, range(7))
    for _ in range(2):
        fused.forward([tree])
    assert (fused.route, stand_in.captured) == ("cuda graphs", 2)


def test_a_failed_capture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is run without a graph, also in later calls."""
    model = fresh_model("llama")
    expected = grown(view(model), 5)
    StandIn(monkeypatch, broken=True)
    for _ in range(2):
        fused = view(model)
        assert grown(fused, 5) == expected
        assert fused.route == "static"
        assert fused.executor.reason is not None and "stream is capturing" in fused.executor.reason
        fused.close()
        assert fused.route == "static"


def test_only_so_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was replayed longest ago is forgotten first, with its mask."""
    monkeypatch.setattr(static_buffers, "MOST_PASSES", 2)
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


def test_what_a_pass_over_one_node_takes_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that graphs are compared with tell; the model's next call knows it from the beginning."""
    model = fresh_model("llama")
    stand_in = StandIn(monkeypatch)
    fused = view(model)
    grown(fused, 4)
    assert fused.plain_ms is None, "these had eight nodes"
    stand_in.shape = (1, 1, 48)
    for _ in range(3):
        fused.forward([TokenTree(3)])
        fused.keep([Path([0], [4])])
    assert stand_in.captured == 2
    known = fused.plain_ms
    assert known is not None and known > 0.0
    fused.close()
    fused = view(model)
    fused.prefill()
    assert fused.plain_ms == known

"""What only a CUDA device can show; skipped where there is none."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.graphs import counting, waiting
from helpers.models import fresh_model, prompts
from helpers.threads import together
from torch import Tensor

from lookahead import Jacobi, Lookahead
from lookahead.models.names import CACHE
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs import executor as static
from lookahead.runtime.cuda_graphs.executor import GraphExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("augmented"),
]


def rows(batch: int, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Prompts on the device."""
    return {name: each.cuda() for name, each in prompts(batch, length, seed).items()}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Grows by (nodes, span) with every pass that is captured."""
    sizes: list[tuple[int, int]] = []
    add = static_buffers.StaticBuffers.add

    def noting(arena: Any, key: tuple[int, int], graph: Any) -> None:
        sizes.append(key)
        add(arena, key, graph)

    monkeypatch.setattr(static_buffers.StaticBuffers, "add", noting)
    return sizes


@pytest.mark.parametrize("strategy", [Lookahead(seed=0), Jacobi(seed=0, block_size=40)], ids=lambda s: s.name)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama_mha", "mistral", "gpt2", "qwen2_mixed", "gemma3", "llama4_flat"])
def test_graphs_write_the_same_text(
    name: str, batch: int, strategy: Any, made: list[Any], captures: list[tuple[int, int]]
) -> None:
    """Unless told otherwise passes are captured graphs, every one of which has been checked by then."""
    model = fresh_model(name).cuda()
    for sample in (False, True):
        settings = {"max_new_tokens": 40, "do_sample": sample}
        torch.cuda.manual_seed(1)
        plain, state = model.generate(**rows(batch), **settings), torch.cuda.get_rng_state()
        torch.cuda.manual_seed(1)
        ours = model.generate(**rows(batch), **settings, lookahead_strategy=strategy)
        assert torch.equal(plain, ours) and torch.equal(state, torch.cuda.get_rng_state())
    assert (made[-1].route, made[-1].executor.reason) == ("cuda graphs", None)
    assert captures
    assert any(graph.checked for arena in waiting(model) for graph in arena.graphs.values())


def test_graphs_are_used_again(made: list[Any], captures: list[tuple[int, int]]) -> None:
    """A second call of the same kind replays the first one's graphs, on its own prompt."""
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 60, "do_sample": False}
    for seed in range(3):
        plain = model.generate(**rows(1, seed=seed), **settings)
        ours = model.generate(**rows(1, seed=seed), **settings, lookahead_strategy=Lookahead(seed=0))
        assert torch.equal(plain, ours)
    assert len(captures) == len(set(captures))


def test_graphs_and_growing_buffers(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the smaller buffers are dropped, and new ones captured."""
    grown = counting(monkeypatch, GraphExecutor, "_grow")
    monkeypatch.setattr(static, "is_small", lambda *_: False)
    monkeypatch.setattr(static_buffers, "_LEAST_SPAN", 64)
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 300, "do_sample": False}
    plain = model.generate(**rows(2), **settings)
    ours = model.generate(**rows(2), **settings, lookahead_strategy=Lookahead(seed=0))
    assert torch.equal(plain, ours)
    assert grown
    assert made[-1].route == "cuda graphs"


def test_graphs_in_threads(made: list[Any]) -> None:
    """Calls at the same time use buffers and graphs of their own."""
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 60, "do_sample": False}
    plain = [model.generate(**rows(1, seed=seed), **settings).tolist() for seed in range(4)]

    def work(seed: int) -> Any:
        return model.generate(**rows(1, seed=seed), **settings, lookahead_strategy=Lookahead(seed=0)).tolist()

    assert together(*(partial(work, seed) for seed in range(4))) == plain


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replayed_pass_asks_the_device_nothing(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two scorings the host never waits: neither to send a pass, nor to replay it, nor to keep nodes."""
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 60, "do_sample": False, "lookahead_strategy": Lookahead(seed=0)}
    model.generate(**rows(2), **settings)
    watched = 0

    def watch(name: str) -> None:
        original = getattr(GraphExecutor, name)

        def strict(self: Any, *args: Any) -> Any:
            nonlocal watched
            if name == "_replayed":
                graph = self._buffers.graphs.get(args[1].key)
                if graph is None or not graph.checked:
                    return original(self, *args)
                watched += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(GraphExecutor, name, strict)

    for name in ("_prepare", "_replayed", "keep"):
        watch(name)
    model.generate(**rows(2), **settings)
    assert watched


def test_the_dynamic_path_on_the_gpu(made: list[Any]) -> None:
    """``static=False`` leaves graphs alone."""
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 40, "do_sample": False}
    plain = model.generate(**rows(2), **settings)
    ours = model.generate(**rows(2), **settings, lookahead_strategy=Lookahead(seed=0, static=False))
    assert torch.equal(plain, ours)
    assert made[-1].route == "dynamic"
    assert waiting(model) == []


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_offloaded_cache(name: str, batch: int) -> None:
    """The history lies in pinned memory of the host, and comes back as plain decoding's offloaded cache."""
    model = fresh_model(name).cuda()
    settings = {"max_new_tokens": 24, "cache_implementation": "offloaded", "return_dict_in_generate": True}
    plain = model.generate(**rows(batch), **settings)
    ours = model.generate(**rows(batch), **settings, use_lookahead=True)
    assert torch.equal(plain.sequences, ours.sequences)
    lengths = [cache[CACHE].get_seq_length() for cache in (plain, ours)]
    assert lengths[0] == lengths[1]
    assert {layer.keys.device.type for layer in ours[CACHE].layers} == {"cpu"}

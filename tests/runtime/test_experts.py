"""Kernels of experts by the width of a pass, as on an accelerator, played on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, judged, prompts, run, same_as_plain
from helpers.threads import together
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from jacobi import TokenTree
from lookahead import Lookahead
from lookahead.models.compat import expert_registries
from lookahead.runtime import experts
from lookahead.runtime.experts import expert_kernels
from lookahead.runtime.registry import During
from lookahead.runtime.session import bare_model

pytestmark = pytest.mark.usefixtures("augmented")

KERNELS = ALL_EXPERTS_FUNCTIONS._global_mapping


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Which kernel was called, with how many tokens, and how many experts each of them took."""
    monkeypatch.setattr(experts, "_is_accelerated", lambda states: True)
    calls: list[tuple[str, int, int]] = []

    def noting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def noted(module: Any, states: Any, index: Any, weights: Any) -> Any:
            calls.append((name, *index.shape))
            return kernel(module, states, index, weights)

        return noted

    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(KERNELS, name, noting(name, KERNELS[name]))
    return calls


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_by_the_width_of_a_pass(batch: int, static: bool, called: list[tuple[str, int, int]]) -> None:
    """The prompt and wide passes take the prompt's kernel, one node a sequence the kernel for decoding."""
    model = judged(fresh_model("mixtral"))
    before = dict(KERNELS)
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}  # so that none leaves
    plain, _ = run(model, prompts(batch), **settings)
    called.clear()
    strategy = Lookahead(nodes=7, static=static, sources=("suffix",))  # which does not know what to draft at first
    ours, _ = run(model, prompts(batch), lookahead_strategy=strategy, **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    for name, tokens, taken in called:
        assert name == ("batched_mm" if tokens == batch or tokens * taken <= 4 else "grouped_mm")
    assert {name for name, *_ in called} == {"grouped_mm", "batched_mm"}
    assert before == KERNELS


def test_measured_passes_take_the_same(called: list[tuple[str, int, int]]) -> None:
    """Outside of ``generate``, too."""
    model = fresh_model("mixtral", num_local_experts=8)
    with torch.no_grad(), bare_model(model, torch.tensor([[3, 4, 5]]), 32) as view:
        called.clear()
        for nodes in (1, 4, 5):
            view.forward([TokenTree.chain(1, range(nodes - 1))])
    layers = model.config.num_hidden_layers
    assert called == [("batched_mm", 1, 2)] * layers + [("batched_mm", 4, 2)] * layers + [("grouped_mm", 5, 2)] * layers


def test_nothing_is_switched_outside_of_passes(called: list[tuple[str, int, int]]) -> None:
    """Other threads, prompts, and code behind a broken-off pass have the registered kernel."""
    model, told = fresh_model("mixtral"), torch.tensor([[3]])

    def kernel() -> str:
        called.clear()
        with torch.no_grad():
            model(told)
        (name,) = {name for name, *_ in called}
        return name

    with expert_kernels():
        assert kernel() == "grouped_mm"
        with pytest.raises(KeyError), During(width=1):
            raise KeyError
        assert kernel() == "grouped_mm"
        with During(width=1):
            assert kernel() == "batched_mm"
            assert together(kernel) == ["grouped_mm"]
    with During(width=1):
        assert kernel() == "grouped_mm"


def test_on_a_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers, which does not switch there."""
    monkeypatch.setitem(KERNELS, "batched_mm", None)
    same_as_plain(fresh_model("mixtral"), prompts(2), Lookahead(nodes=5), max_new_tokens=12)


def test_all_registries_are_known() -> None:
    """Experts in eight bits have kernels of their own."""
    assert any(registry is KERNELS for registry in expert_registries())
    assert len(expert_registries()) >= 2

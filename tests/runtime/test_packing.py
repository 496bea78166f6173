"""Packed weights: made when they pay, the same text, a model that is left alone, and nothing of it that stays."""

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from helpers.graphs import counting
from helpers.medusa import random_heads
from helpers.models import fresh_model, initialised, prompts, same_as_plain
from helpers.packing import AT_ONCE, packs
from torch import nn

import lookahead
from lookahead import Jacobi, Lookahead, tuning
from lookahead.medusa import Medusa
from lookahead.runtime import packed_layers, packing
from lookahead.runtime.packed_layers import Packed, TwinLinear, groups_of, packed_twin, shapes_of
from lookahead.runtime.packing import layers_of, packed_weights, packing_of
from lookahead.runtime.session import bare_model
from lookahead.runtime.tracing import schedule as tracing
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.tuning import bushy_tree

pytestmark = [
    pytest.mark.usefixtures("augmented", "no_grad", "passes_count"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN"),
]


DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not packs(dtype), reason=f"this CPU packs no {dtype}"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AT_ONCE.items():
        monkeypatch.setattr(packing, name, value)


def model_of(dtype: torch.dtype = torch.float32, name: str = "llama") -> Any:
    model = fresh_model(name).to(dtype)
    packing_of(model).spend(1, 1.0)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mixtral", "gemma3"])
def test_a_twin_says_what_the_model_says(name: str, dtype: torch.dtype) -> None:
    model = model_of(dtype, name)
    before = {key: type(module) for key, module in model.named_modules()}
    weights = packed_weights(model)
    twin = packed_twin(model, Packed(weights))
    assert sum(isinstance(module, TwinLinear) for module in twin.modules()) == len(weights)
    ids = prompts(1, 12)["input_ids"]
    ours, plain = twin(ids).logits.float(), model(ids).logits.float()
    assert (ours - plain).abs().max() <= 8 * torch.finfo(dtype).eps * plain.abs().max()
    assert {key: type(module) for key, module in model.named_modules()} == before
    assert not any("packed" in module._buffers for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_that_a_processor_does_not_know_is_packed_in_float32(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "computed_dtype", lambda dtype: torch.float32)
    layer, rows = nn.Linear(48, 32, bias=bias, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    (part,) = packed_layers.parts_of((layer,), single=True).values()
    ours = packed_layers.packed_linear(rows, part.weight, part.bias)
    given = [layer.weight.float(), layer.bias.float() if bias else None]
    assert part.weight.dtype == torch.float32 and ours.dtype == dtype
    exact = nn.functional.linear(rows.float(), *given)
    assert (ours.float() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert packed_layers.packed_bytes([layer]) == 4 * layer.weight.numel()


class Attention(nn.Module):
    """Three layers, of which the first two read the same input."""

    def __init__(self, dtype: torch.dtype, biases: tuple[bool, bool, bool]) -> None:
        super().__init__()
        for name, size, bias in zip(("q_proj", "k_proj", "v_proj"), (32, 16, 16), biases, strict=True):
            self.add_module(name, nn.Linear(24, size, bias=bias, dtype=dtype))

    def forward(self, ours: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(ours), self.k_proj(ours), self.v_proj(others)], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("biases", "groups"), [((False,) * 3, 1), ((True,) * 3, 1), ((True, False, False), 3)])
def test_layers_are_computed_together_where_they_read_the_same(
    biases: tuple[bool, bool, bool], groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each by its own input where they do not, whatever is left from the pass before."""
    module = Attention(dtype, biases)
    found = groups_of(module)
    assert len(found) == groups
    parts = {key: part for group in found for key, part in packed_layers.parts_of(group, True).items()}
    twin = packed_twin(module, Packed(parts))
    calls = counting(monkeypatch, packed_layers, "packed_linear")
    ours, others = torch.randn(2, 1, 5, 24).to(dtype)
    single = ours[:, :1]
    for pair in ((ours, ours), (ours, others), (others, others), (single, single)):
        calls.clear()
        close = torch.testing.assert_close
        close(twin(*pair), module(*pair), rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
        assert len(calls) == (3 if groups == 3 else 1 + (pair[0] is not pair[1]))
    assert groups == 3 or twin.q_proj.outputs._last is None


def test_a_pass_computes_what_reads_the_same_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values; the output; gate and up; down: four products a layer, and the output layer's."""
    model = model_of()
    twin = packed_twin(model, Packed(packed_weights(model) or {}))
    calls = counting(monkeypatch, packed_layers, "packed_linear")
    twin(prompts(1, 12)["input_ids"])
    assert len(calls) == 4 * model.config.num_hidden_layers + 1


@pytest.mark.parametrize("strategy", [Lookahead(), Lookahead(window_size=3, ngram_size=4), Jacobi()])
@pytest.mark.parametrize("sampled", [False, True])
def test_texts_are_plain_ones(strategy: Any, sampled: bool) -> None:
    model = model_of()
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {"do_sample": False}
    assert same_as_plain(model, prompts(2, 9), strategy, max_new_tokens=24, **settings)
    assert packing_of(model).weights


_KEYS = "model.layers.0.self_attn.k_proj"
_SMALL = {"vocab_size": 48, "hidden_size": 32, "num_attention_heads": 4}
COUNTING = {
    "BloomConfig": {"n_layer": 2},
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "BartConfig": {"decoder_layers": 2, "d_model": 32, "decoder_attention_heads": 4, "is_encoder_decoder": False},
}


@pytest.mark.parametrize("kind", COUNTING)
@pytest.mark.parametrize("batch", [1, 3])
def test_models_that_count_positions_by_themselves_are_told_them(kind: str, batch: int) -> None:
    model = initialised(getattr(transformers, kind)(**_SMALL | COUNTING[kind]), dtype=torch.float32)
    packing_of(model).spend(1, 1.0)
    assert same_as_plain(model, prompts(batch, 9), Lookahead(nodes=6), max_new_tokens=24, do_sample=False)
    assert packing_of(model).weights


@pytest.mark.usefixtures("traced_at_once")
def test_traces_run_on_packed_weights() -> None:
    model = model_of()
    for _ in range(3):
        assert same_as_plain(model, prompts(1, 9), Lookahead(nodes=6), max_new_tokens=24, do_sample=False)
    packed = [traces for traces in tracing._kept.of(model) if traces.key[-1]]
    assert packed and packed[0].made and packed[0].failure is None


def test_heads_are_told_what_the_output_layer_reads() -> None:
    model = model_of()
    heads = random_heads(model)
    assert same_as_plain(model, prompts(1, 9), Medusa(heads), max_new_tokens=24, do_sample=False)
    assert packing_of(model).weights


@pytest.mark.parametrize("name", ["lm_head.weight", *(f"{_KEYS}.{what}" for what in ("weight", "bias"))])
def test_a_weight_that_has_changed_is_packed_anew(name: str) -> None:
    model = model_of(name="qwen2")
    before = packed_weights(model)
    assert before
    model.get_parameter(name).mul_(-1.0).add_(1.0)
    assert packed_weights(model) is None, "it has to come to pay again"
    packing_of(model).spend(1, 1.0)
    assert packed_weights(model) is not before
    assert same_as_plain(model, prompts(1, 9), Lookahead(), max_new_tokens=16, do_sample=False)


def test_nothing_is_packed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    assert same_as_plain(model, prompts(1, 9), Lookahead(pack=False), max_new_tokens=8, do_sample=False)
    assert not packing_of(model).weights
    with monkeypatch.context() as patch:
        for name, value in (("_LARGE_BYTES", 1 << 30), ("_free_bytes", lambda: 10_000), ("_free_bytes", lambda: None)):
            patch.setattr(packing, name, value)
            assert packed_weights(model) is None
            patch.undo()
            patch.setattr(packing, "_LARGE_BYTES", 0)
    handle = model.lm_head.register_forward_hook(lambda module, given, output: output)
    assert packed_weights(model) is None, "somebody's hook would be passed over"
    handle.remove()

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    model = model_of()
    model.lm_head.__class__ = Scaled
    assert packed_weights(model) is None, "and so would a layer that somebody wrapped"


def test_packed_weights_go_with_the_model_and_when_they_are_released() -> None:
    model = model_of()
    packed = packed_weights(model)
    kept = weakref.ref(next(iter(packed.values())).weight)
    del packed
    assert kept() is not None
    lookahead.release(model)
    gc.collect()
    assert kept() is None


def test_passes_over_one_node_may_stay_as_they_are() -> None:
    model = model_of()
    packed = Packed({key: part._replace(single=False) for key, part in (packed_weights(model) or {}).items()})
    with bare_model(model, prompts(1, 6)["input_ids"], 16, packed=packed) as view:
        assert not view.forward_pass.module.lm_head.part.single
        single = view.forward([bushy_tree(1, 48)]).logits
    with bare_model(model, prompts(1, 6)["input_ids"], 16) as view:
        assert torch.equal(single, view.forward([bushy_tree(1, 48)]).logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("large", "rounds"), [(1 << 40, 16), (0, 4)])
def test_a_trial_measures_and_compares(
    large: int, rounds: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small model every shape is tried, of a large one only the largest layer but the output's."""
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_LARGE_BYTES", large)
    model = fresh_model("llama", vocab_size=512).to(dtype)  # its output layer is the largest
    groups = groups_of(model)
    shapes = set(map(shapes_of, groups))
    tried = counting(monkeypatch, packing, "_compared")
    found = packing.Packing()
    with torch.inference_mode():
        packing._try(found, groups)
    assert found.gain is not None
    assert 0.0 <= found.gain < 1.0
    assert (found.cost_ms > 0.0) == bool(found.singles) == (found.gain > 0.0)
    whole = {shapes_of(group) for group, _, _ in tried}
    assert whole == shapes if large else whole == {shapes_of(groups[2])}, groups
    assert {count for _, _, count in tried} == {rounds}
    assert found.singles.keys() <= shapes


@pytest.mark.parametrize(("large", "least_ms", "most_ms"), [(0, 5e3, 6e3), (1 << 40, 0.0, 1e3)])
def test_a_large_copy_costs_what_its_memory_takes(
    large: int, least_ms: float, most_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial packs into memory that the process holds; the whole of a large model needs more."""
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_LARGE_BYTES", large)
    monkeypatch.setattr(packing, "_new_memory_s", lambda size: 5.0)
    monkeypatch.setattr(packing, "_compared", lambda *_: ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5]))
    found = packing.Packing()
    with torch.inference_mode():
        packing._try(found, groups_of(fresh_model("llama").to(torch.float32)))
    assert found.gain == 0.5
    assert least_ms <= found.cost_ms <= most_ms


def test_only_layers_that_gain_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as slow where a weight has as many rows as the feed-forward layers, else twice as fast."""
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_SMALL_BYTES", range(1 << 30))
    model = fresh_model("llama").float()
    wide = model.model.layers[0].mlp.up_proj.weight.shape

    def compared(group: Any, packed: torch.Tensor, rounds: int) -> tuple[list[float], list[float]]:
        return [1.0], [2.0 if wide in shapes_of(group) else 0.5]

    monkeypatch.setattr(packing, "_compared", compared)
    packing_of(model).spend(1, 1e6)
    weights = packed_weights(model)
    assert weights
    kept = {
        id(module.weight) for module in model.modules() if type(module) is nn.Linear and module.weight.shape != wide
    }
    assert weights.keys() == kept
    assert 0.0 < (packing_of(model).gain or 0.0) < 0.5


def test_layers_whose_outputs_differ_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_SMALL_BYTES", range(1 << 30))
    monkeypatch.setattr(packing, "packed_linear", lambda rows, weight: rows.new_zeros((len(rows), len(weight))))
    model = fresh_model("llama").float()
    packing_of(model).spend(1, 1e6)
    assert packed_weights(model) is None
    assert packing_of(model).gain == 0.0


@pytest.mark.parametrize(("size", "packs"), [(0.5, False), (2, True), (30, False), (150, True)])
def test_small_and_large_models_are_packed(size: float, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them a copy takes much memory beside the process, and brings little. Sizes are in MiB of layers."""
    monkeypatch.undo()
    model = fresh_model("llama").float()
    scale = (1 << 20) * size / sum(map(packing._bytes, groups_of(model)))
    small, large = packing._SMALL_BYTES, packing._LARGE_BYTES
    monkeypatch.setattr(packing, "_SMALL_BYTES", range(int(small.start / scale), int(small.stop / scale)))
    monkeypatch.setattr(packing, "_LARGE_BYTES", large / scale)
    monkeypatch.setattr(packing, "_compared", lambda weight, packed, rounds: ([1.0], [0.5]))
    packing_of(model).spend(1, 1e6)
    assert (packed_weights(model) is not None) == packs


def test_a_curve_is_measured_on_packed_weights_and_found_by_calls_that_run_on_them() -> None:
    model = fresh_model("llama").float()
    times, own = tuning.sweep_all(model, 32, seconds=0.2)
    assert times.about["executor"] == "traced, packed weights"
    assert own.about["executor"] == "eager"
    assert packing_of(model).weights
    found = tuning.cached(model, traced=True, packed=True)
    assert found.about == times.about


def test_speeds_are_told_against_passes_that_are_not_packed() -> None:
    model = model_of()
    with bare_model(model, prompts(1, 6)["input_ids"], 16, packed=layers_of(model, packs=True)) as view:
        assert view.plain_ms == 1.0


@pytest.mark.usefixtures("traced_at_once")
def test_a_long_call_goes_over_to_packed_weights_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of the unpacked weights are left behind, and others made."""
    model = fresh_model("llama").float()
    used: list[bool] = []
    run = TracedExecutor.run

    def noting(self: TracedExecutor, trees: Any) -> Any:
        used.append(self.forward_pass.is_packed)
        return run(self, trees)

    monkeypatch.setattr(TracedExecutor, "run", noting)
    strategy = Lookahead(nodes=2, sources=("pool",))
    output = same_as_plain(model, prompts(1, 9), strategy, max_new_tokens=160)
    assert output.stats.steps > 40
    assert not used[0]
    assert used[-1]
    assert used == sorted(used), "once and for all"
    assert any(traces.made for traces in tracing._kept.of(model) if traces.key[-1])
    used.clear()
    assert same_as_plain(model, prompts(1, 9), strategy, max_new_tokens=20)
    assert all(used)


@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("traces", [True, False])
def test_draft_models_are_run_as_the_model_is(traces: bool, pack: bool) -> None:
    """From the middle of the first call on, and as the strategy allows."""
    model, draft = fresh_model("llama").float(), fresh_model("llama").float()
    strategy = Lookahead(draft_model=draft, sources=("draft",), nodes=4, traces=traces, pack=pack)
    assert same_as_plain(model, prompts(1, 9), strategy, max_new_tokens=160)
    assert bool(packing_of(draft).weights) == pack
    made = [traces for traces in tracing._kept.of(draft) if traces.made and traces.key[-1][0] == pack]
    assert bool(made) == traces


def test_a_torch_without_the_kernel_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(group: Any) -> torch.Tensor:
        raise RuntimeError("unknown builtin op: mkldnn::_linear_pointwise")

    model = model_of()
    monkeypatch.setattr(packed_layers, "pack", missing)
    assert packed_weights(model) is None
    assert packing_of(model).gain == 0.0, "and is not asked again"

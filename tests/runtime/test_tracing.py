"""Traced passes: made when they pay, the same to the last bit, and left alone where they would freeze something."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.automatic import memory_of
from helpers.drafting import TableSource
from helpers.graphs import counting
from helpers.marks import few
from helpers.models import MODELS, SIZES, fresh_model, prompts, same_as_plain
from helpers.streaming import Puts
from helpers.threads import together
from torch import Tensor, nn
from torch.jit._state import _python_cu
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, Ministral3Config, Ministral3ForCausalLM
from transformers.models.ministral3 import modeling_ministral3

from lookahead import Jacobi, Lookahead, quantize
from lookahead.draft.pass_costs import PassCosts
from lookahead.medusa import Medusa, MedusaHeads
from lookahead.models.hidden_states import HiddenStates
from lookahead.runtime.quantised_layers import adds_exactly
from lookahead.runtime.tracing import schedule as tracing
from lookahead.runtime.tracing.replay import Kind, Missed, TracedExecutor, Traces, weights_of
from lookahead.runtime.tracing.schedule import untraceable

pytestmark = pytest.mark.usefixtures("augmented", "passes_count", "traced_at_once")

TREE = Kind(batch=1, single=False, masked=True, packed=False)
NOTHING_DRAFTED = Lookahead(sources=(lambda row: TableSource("nothing", {}),))  # passes of one kind on any machine
STRATEGIES = [Lookahead(window_size=3, ngram_size=4, verification_set_size=4), Lookahead(nodes=9), Jacobi(block_size=6)]


def known(model: Any) -> Traces:
    """The traces that the model's last call used."""
    found: Traces = tracing._kept.of(model)[-1]
    return found


def warmed(model: Any, batch: int = 1, **settings: Any) -> Traces:
    """After calls that were plain, and drafted, the next one makes its traces."""
    for strategy in (None, Lookahead(nodes=4)):
        settings = {"max_new_tokens": 8, "do_sample": False, "use_lookahead": True} | settings
        model.generate(**prompts(batch), lookahead_strategy=strategy, **settings)
    return known(model)


TRACED = sorted(MODELS.keys() - {"llama4"})  # which is given positions for each pass


@pytest.mark.parametrize("name", few(TRACED, "gemma3", "gpt2", "gpt_oss", "llama"))
@pytest.mark.parametrize("batch", [1, 3])
def test_same_text(name: str, batch: int) -> None:
    """Whatever drafts, greedy or sampled, past windows and in ragged batches."""
    model = fresh_model(name)
    warmed(model, batch)
    hot = {"do_sample": True, "temperature": 0.7}
    for strategy, settings in zip(STRATEGIES, ({}, hot, {}) if batch > 1 else (hot, {}, hot), strict=True):
        same_as_plain(model, prompts(batch), strategy, max_new_tokens=32, **settings)
    assert known(model).failure is None
    assert replace(TREE, batch=batch) in known(model).made


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_other_dtypes(kind: Any) -> None:
    """Each has its own traces; logits are those of the model's own passes, to the last bit."""
    model = fresh_model("llama", hidden_size=64, intermediate_size=96)
    if kind.startswith("int") and not adds_exactly():
        pytest.skip("no exact kernel for products of bytes here")
    model = quantize(model.to(torch.bfloat16), kind) if kind.startswith("int") else model.to(getattr(torch, kind))
    found = warmed(model)
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "use_lookahead": True}
    settings |= {
        "return_dict_in_generate": True,
        "output_logits": True,
        "lookahead_strategy": Lookahead(nodes=6, seed=1),
    }
    traced = model.generate(**prompts(1), **settings)
    assert known(model).made
    found.fail("for comparison")
    usual = model.generate(**prompts(1), **settings)
    assert traced.sequences.tolist() == usual.sequences.tolist()
    assert all(torch.equal(*pair) for pair in zip(traced.logits, usual.logits, strict=True))


def test_grouped_heads_are_packed_as_usual() -> None:
    """Where query heads of one key head are packed, the trace is another one."""
    model = fresh_model(
        "llama", max_position_embeddings=4096, num_attention_heads=16, num_key_value_heads=1, head_dim=16
    )
    settings: dict[str, Any] = {"max_new_tokens": 12, "lookahead_strategy": Lookahead(nodes=3), "use_lookahead": True}
    inputs = prompts(1, 2000)
    for _ in range(3):
        model.generate(**inputs, do_sample=False, **settings)
    assert {kind.packed for kind in known(model).made} >= {True}
    same_as_plain(model, inputs, Lookahead(nodes=3), max_new_tokens=12)


def test_made_only_after_passes_that_pay_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes as long as a few dozen passes: short use never has one."""
    monkeypatch.setattr(tracing, "_COST", 20.0)
    model = fresh_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "use_lookahead": True}
    for _ in range(2):
        model.generate(**prompts(1), lookahead_strategy=Lookahead(nodes=1), **settings)
        assert not known(model).made
    for _ in range(6):
        model.generate(**prompts(1), lookahead_strategy=Lookahead(nodes=1), **settings)
    assert known(model).made


def test_large_models_pay_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python is a small part of a pass, more passes are needed for a trace to pay."""
    model = fresh_model("llama")
    python_ms = 0.03 * len(list(model.modules()))
    assert list(tracing._due(model, Traces(None, missed={TREE: Missed(40, 40.0)}))) == [TREE]
    for name, value in {"_COST": 35.0, "_COMPARED": 9.0}.items():
        monkeypatch.setattr(tracing, name, value)
    for ms in (5.0, 50.0, 500.0):
        price = 35 + 9 * ms / python_ms
        passes = next(
            count
            for count in range(1, 10_000)
            if tracing._due(model, Traces(None, missed={TREE: Missed(count, count * ms)}))
        )
        assert passes == pytest.approx(price, abs=1)


@pytest.mark.parametrize("batch", [1, 3])
def test_made_in_the_middle_of_a_long_call(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """The first call has them as soon as the rest of it promises twice what they cost."""
    monkeypatch.setattr(tracing, "_COST", 20.0)
    made: list[int] = []
    look = tracing.Upgrades.buy

    def noting(self: tracing.Upgrades, nodes: int, ms: float, written: int) -> None:
        look(self, nodes, ms, written)
        made.extend([self._passes] * (len(self._traces.made) - len(made)))

    monkeypatch.setattr(tracing.Upgrades, "buy", noting)
    hot = {"do_sample": True, "temperature": 9.0}  # no loop that ends early
    short, long = fresh_model("llama"), fresh_model("llama")
    same_as_plain(short, prompts(batch), NOTHING_DRAFTED, max_new_tokens=56, **hot)
    assert not made
    same_as_plain(long, prompts(batch), NOTHING_DRAFTED, max_new_tokens=100, **hot)
    assert 20 < made[0] <= 20 + tracing.LOOKS
    assert known(long).failure is None


def test_a_curve_of_its_own_from_the_middle_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What traced passes take is not mixed with what other passes took before."""
    monkeypatch.setattr(tracing, "_COST", 20.0)
    model = fresh_model("llama")
    costs: list[PassCosts] = []
    renew = PassCosts.renew
    monkeypatch.setattr(PassCosts, "renew", lambda self, ms: (costs.append(self), renew(self, ms)))
    hot = {"do_sample": True, "temperature": 9.0}
    same_as_plain(model, prompts(1), NOTHING_DRAFTED, max_new_tokens=120, **hot)
    assert {len(key[-1]) for key in memory_of(model).times} == {0, 1}
    assert costs[-1].limits.plain_ms == known(model).untraced_ms(1) is not None
    traced = {key: times for key, times in memory_of(model).times.items() if key[-1]}
    assert costs[-1].times in traced.values()
    assert costs[-1].times.knows_single, "what is known of other passes is a guess about these"


def test_traces_that_another_call_makes() -> None:
    """A call goes on with them, and is told that its passes take another time."""
    model = fresh_model("llama")
    inner = [True]
    found: list[TracedExecutor] = []

    def write(count: int) -> None:
        """Another text in the middle of this one."""
        if inner and count > 1:
            inner.pop()
            warmed(model)
            model.generate(**prompts(1), max_new_tokens=8, do_sample=False, use_lookahead=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "LOOKS", 1000)  # this call makes none
        start = TracedExecutor.__init__
        patch.setattr(TracedExecutor, "__init__", lambda self, *args: (found.append(self), start(self, *args))[1])
        settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "use_lookahead": True}
        model.generate(**prompts(1), streamer=Puts(write), **settings)
    assert found[0].traces is known(model) and known(model).made
    assert found[0].route == "traced"


def test_heads_are_told_what_the_output_layer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed trees and the automatic mode: texts of usual passes, and hidden states to the last bit."""
    told: dict[HiddenStates, list[Tensor]] = {}
    put = HiddenStates.put

    def noting(self: HiddenStates, hidden: Any) -> None:
        told.setdefault(self, []).append(hidden[0])
        put(self, hidden)

    monkeypatch.setattr(HiddenStates, "put", noting)
    model = fresh_model("llama")
    torch.manual_seed(3)
    heads = MedusaHeads.for_model(model, num_heads=2)
    calls = []
    for _ in range(4):
        told.clear()
        same_as_plain(model, prompts(1), Medusa(heads, choices=[2, 1]), max_new_tokens=24)
        calls.append(max(told.values(), key=len))  # beside those that are told while a trace is made
    assert known(model).made
    assert known(model).taps == ("last",)
    assert all(torch.equal(*pair) for call in calls[1:] for pair in zip(calls[0], call, strict=True))
    same_as_plain(model, prompts(1), Medusa(heads, sources=("heads", "suffix"), nodes=5), max_new_tokens=24)
    assert known(model).failure is None


def test_weights_are_read_anew() -> None:
    """Changed in place or replaced, it is the model's weights of now that count."""
    model = fresh_model("llama")
    warmed(model)
    before = same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=24).sequences
    with torch.no_grad():
        model.lm_head.weight.neg_()
    changed = same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=24).sequences
    assert before.tolist() != changed.tolist()
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())
    again = same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=24).sequences
    assert again.tolist() == before.tolist()


def test_nothing_is_left_behind() -> None:
    """A model that is gone is gone, traces and weights; nor has tracing left anything on it."""
    model = fresh_model("llama")
    functions = len(_python_cu.get_functions())  # nor are traces kept for ever, as torch.jit.trace keeps them
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    warmed(model)
    model.generate(**prompts(1), max_new_tokens=8, do_sample=False, use_lookahead=True)
    assert known(model).made
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    weights = [weakref.ref(tensor) for tensor in weights_of(model).values()]
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert all(ref() is None for ref in weights)
    assert len(_python_cu.get_functions()) == functions


class Derived(LlamaForCausalLM):
    """Somebody's own class."""


@torch.no_grad()
def test_what_is_not_traced() -> None:
    """Each for a reason that is told."""
    model = fresh_model("llama")
    assert untraceable(model) is None
    hook = model.model.register_forward_hook(lambda *_: None)
    assert "code other than" in str(untraceable(model))
    hook.remove()
    assert "code other than" in str(untraceable(Derived(model.config).eval()))
    model.train()
    assert "code other than" in str(untraceable(model))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=48, hidden_size=32, n_layer=1, n_head=2)).eval()
    assert "positions" in str(untraceable(bloom))
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "length" in str(untraceable(LlamaForCausalLM(config).eval()))


def test_experts_that_python_chooses_are_not_traced() -> None:
    """Which experts run is read by Python, and a trace would freeze it."""
    model = fresh_model("mixtral")
    model.set_experts_implementation("eager")
    for _ in range(3):
        same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=16)
    found = known(model)
    assert not found.made
    assert "reads" in str(found.failure)


@pytest.mark.parametrize(
    ("break_", "failure"),
    [
        (lambda right: lambda *tensors: right(*tensors) + 1.0, "something else"),
        (lambda right: lambda *tensors: right(*tensors[:-1]), "missing value"),
    ],
    ids=["wrong", "cannot be run"],
)
def test_a_trace_that_is_broken_is_found_out(break_: Callable[[Any], Any], failure: str) -> None:
    """It is compared again as the history grows; from then on passes are the model's own."""
    model = fresh_model("llama")
    for _ in range(2):
        same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=8)
    found = known(model)
    trace = found.made[TREE]
    trace.function, trace.slots = break_(trace.function), 1
    same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=40)
    assert failure in str(found.failure)
    assert not found.made


CHANGES: dict[str, Callable[[Any], Any]] = {
    "two weights over one memory": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "inside a dict": lambda model: model.config.rope_parameters.update(llama_4_scaling_beta=5.0),
    "code": lambda model: setattr(modeling_ministral3, "rotate_half", lambda states: states.flip(-1)),
    "smaller vocabulary": lambda model: model.resize_token_embeddings(24),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_between_calls(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call writes what the changed model writes."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
    changes = {"rope_parameters": rope, "tie_word_embeddings": True, "sliding_window": None, "head_dim": 8}
    config = Ministral3Config(**SIZES | changes | {"pad_token_id": 0})
    torch.manual_seed(0)
    model = Ministral3ForCausalLM(config).to(torch.float64).eval()
    inputs = {"input_ids": prompts(1)["input_ids"] % 24}
    for _ in range(3):
        before = same_as_plain(model, inputs, Lookahead(nodes=4), max_new_tokens=40).sequences
    assert known(model).made
    monkeypatch.setattr(modeling_ministral3, "rotate_half", modeling_ministral3.rotate_half)
    CHANGES[change](model)
    after = same_as_plain(model, inputs, Lookahead(nodes=4), max_new_tokens=40).sequences
    assert (after.tolist() == before.tolist()) == (change == "two weights over one memory")


def test_a_tracer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tracer passes are run as ever."""

    def gone(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(torch._C, "_create_graph_by_tracing", gone)
    model = fresh_model("llama")
    for _ in range(3):
        same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=16)
    assert known(model).failure == "RuntimeError: no such thing here"


def test_calls_that_are_given_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not among a trace's inputs keeps a call from using it."""
    model = fresh_model("llama")
    warmed(model)
    used = counting(monkeypatch, TracedExecutor, "_pass")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_lookahead": True}
    model.generate(**prompts(1), **settings)
    assert used
    used.clear()
    model.generate(**prompts(1), lookahead_strategy=Lookahead(static=True, nodes=4), **settings)
    assert not used


def test_what_is_gained_is_told_against_transformers_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced pass over one node is no measure of plain decoding."""
    monkeypatch.setattr(tracing, "_COST", 20.0)
    model = fresh_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 9.0}
    settings["lookahead_strategy"] = NOTHING_DRAFTED
    for _ in range(3):
        model.generate(**prompts(1), **settings)
    found = known(model)
    assert found.made
    own = found.untraced_ms(1)
    assert own is not None
    stats = model.generate(**prompts(1), **settings, return_dict_in_generate=True).stats
    assert stats.single_ms >= 0.999 * own * (stats.steps - 2)


def test_the_oldest_of_many_kinds_has_to_pay_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_PASSES", 2)
    monkeypatch.setattr(tracing, "record", lambda *given: "a trace")
    kinds = [replace(TREE, batch=batch) for batch in (1, 2, 3)]
    traces = Traces(None, missed={kind: Missed(40, 40.0) for kind in kinds})
    tracing._make(fresh_model("llama"), traces, None, kinds, None)
    assert list(traces.made) == kinds[1:]
    assert [traces.missed[kind].passes for kind in kinds] == [0, 40, 40]


def test_calls_at_once() -> None:
    """Calls in several threads share traces, and each has its own history."""
    model = fresh_model("llama")
    warmed(model)
    given = [prompts(1, length) for length in (5, 9, 14)]
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    plain = [model.generate(**inputs, **settings).tolist() for inputs in given]
    settings["lookahead_strategy"] = Lookahead(nodes=5)
    texts = together(*(partial(model.generate, **inputs, **settings) for inputs in given * 3))
    assert [text.tolist() for text in texts] == plain * 3
    assert known(model).made

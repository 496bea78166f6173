"""What others put in the place of ``generate``'s own steps: such models are written by plain passes, with a warning."""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, initialised, prompts, run, same_as_plain, same_tokens, tiny_model
from helpers.refusals import refuses
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationMixin, LlamaForCausalLM

from lookahead import Lookahead, LookaheadError, Scheduler
from lookahead.models.code_safety import replaced_step
from lookahead.models.names import CACHE, CACHES
from lookahead.support.route import route, verdict

pytestmark = pytest.mark.usefixtures("augmented")


def moved(original: Callable[..., Any], late: int = 0) -> Callable[..., Any]:
    """Positions three further on in passes over one token, once the text has ``late`` tokens."""

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        if inputs["input_ids"].shape[1] == 1 and int(inputs["position_ids"].max()) >= late:
            inputs["position_ids"] = inputs["position_ids"] + 3
        return inputs

    return prepare


def written_plainly(model: Any, name: str) -> None:
    """The text is plain decoding's, of a call and of a scheduler, and the reason names the method."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True}
    for inputs in (prompts(1), prompts(2)):
        (reason,) = same_as_plain(model, inputs, **settings).stats.plain
        assert f"LlamaForCausalLM.{name} was replaced" in reason
    with Scheduler(model, 2) as scheduler:
        tickets = [scheduler.submit(**prompts(1), **settings, seed=7) for _ in range(3)]
        scheduler.run()
    plain, _ = run(model, prompts(1), **settings)
    assert {str(ticket.result().tolist()) for ticket in tickets} == {str(plain.tolist())}
    way, why = verdict(model)
    assert way == "plain" and name in str(why)


@pytest.mark.parametrize("late", [0, 30])
def test_inputs_that_an_object_prepares(late: int, caplog: pytest.LogCaptureFixture) -> None:
    """At once, or only where no short self-test looks."""
    model = fresh_model("llama")
    untouched, _ = run(model, prompts(1), max_new_tokens=24, use_lookahead=True)
    model.prepare_inputs_for_generation = moved(model.prepare_inputs_for_generation, late)
    with caplog.at_level(logging.WARNING, logger="lookahead"):
        written_plainly(model, "prepare_inputs_for_generation")
    assert "use_lookahead has no effect, plain decoding goes on: LlamaForCausalLM.prepare_inputs" in caplog.text
    del model.prepare_inputs_for_generation
    again, _ = run(model, prompts(1), max_new_tokens=24, use_lookahead=True)
    assert again.tolist() == untouched.tolist() and route(model)[0] == "tree"


@pytest.mark.parametrize("home", [LlamaForCausalLM, GenerationMixin])
def test_inputs_that_a_class_prepares(home: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a wrapper that takes the name and the module of what it wraps."""
    original = GenerationMixin.prepare_inputs_for_generation
    monkeypatch.setattr(home, "prepare_inputs_for_generation", moved(original), raising=False)
    written_plainly(fresh_model("llama"), "prepare_inputs_for_generation")


@pytest.mark.parametrize("name", ["_update_model_kwargs_for_generation", "_prefill"])
def test_other_steps(name: str) -> None:
    """Whatever they do otherwise is not looked into."""
    model = fresh_model("llama")
    setattr(model, name, functools.partial(getattr(model, name)))
    written_plainly(model, name)


def test_a_models_own_method_that_is_set_on_it_again() -> None:
    """As PEFT leaves it behind; a method of another model is none of its own."""
    model, other = fresh_model("llama"), fresh_model("llama", 1)
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    assert replaced_step(model) is None and route(model)[0] == "tree"
    model.prepare_inputs_for_generation = other.prepare_inputs_for_generation
    assert replaced_step(model) == "prepare_inputs_for_generation"


class Prepares(LlamaForCausalLM):
    """A family of one's own: its class is what it is, and the self-test judges it."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


def test_a_class_of_ones_own() -> None:
    model = initialised(tiny_model("llama").config, kind=Prepares)
    same_as_plain(model, prompts(2), max_new_tokens=20)
    assert replaced_step(model) is None
    model.prepare_inputs_for_generation = moved(model.prepare_inputs_for_generation)
    assert route(model)[0] == "plain"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # peft uses old names
@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_soft_prompts(kind: Any) -> None:
    base = fresh_model("llama").float()
    more = {"encoder_hidden_size": 16} if kind is PromptEncoderConfig else {}
    model = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=5, **more)).eval()
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
            weight.normal_(generator=torch.Generator().manual_seed(0))
    for inputs in (prompts(1), prompts(2)):
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            same_tokens(model, inputs, max_new_tokens=24, **settings)
    same_tokens(base, prompts(1), max_new_tokens=24)
    assert route(base)[0] == "tree", "the base is what it was"


def test_a_forward_that_is_replaced_is_judged_anew() -> None:
    """A verdict does not outlive what it is about."""
    model = fresh_model("llama").float()
    model.config.use_cache = True
    assert run(model, prompts(1), max_new_tokens=8, lookahead_strategy=Lookahead())[0].shape[1] == 20
    forward = model.forward

    def deaf(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = deaf
    with pytest.raises(LookaheadError, match="does not keep the branches of a tree apart"):
        model.generate(**prompts(1), max_new_tokens=8, use_lookahead=True)


def test_a_cache_by_a_name_of_another_version() -> None:
    """Plain decoding itself would give it no past, and write another text in silence."""
    (old, *_) = sorted(CACHES - {CACHE, "cache_params"})

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return LlamaForCausalLM.forward(self, input_ids)

    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in ("self", old)]
    forward.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    kind = type("OtherName", (LlamaForCausalLM,), {"forward": forward})
    model = kind(copy.deepcopy(fresh_model("llama").config)).eval()
    match = f"OtherName.forward takes its KV cache as {old}, but transformers .* gives it as {CACHE}"
    refuses(match, model.generate, **prompts(1), max_new_tokens=4, use_lookahead=True)
    assert verdict(model)[0] == "plain"


class Loops(LlamaForCausalLM):
    """Appends copies of its cache's layers in its first pass, as looped models do."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, position_ids=position_ids, **kwargs)
        cache = outputs[CACHE]
        if len(cache.layers) == self.config.num_hidden_layers:
            cache.layers += copy.deepcopy(cache.layers)
        return outputs


def test_a_model_that_changes_the_number_of_its_caches_layers() -> None:
    model = initialised(tiny_model("llama").config, kind=Loops)
    ours = same_as_plain(model, prompts(2), max_new_tokens=12, do_sample=True)
    reason = "Loops changes its cache's 2 layers to 4 in a pass"
    assert ours.stats.plain == {reason: 1} and verdict(model) == ("plain", reason)
    with Scheduler(model, 2) as scheduler:
        ticket = scheduler.submit(**prompts(1), max_new_tokens=12, do_sample=False)
        scheduler.run()
    assert ticket.result().tolist() == run(model, prompts(1), max_new_tokens=12, do_sample=False)[0].tolist()


def test_gradient_checkpointing() -> None:
    """In training mode layers keep no KV cache then; in evaluation it changes nothing."""
    model = fresh_model("llama")
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    assert not same_as_plain(model, prompts(1), max_new_tokens=16).stats.plain
    model.train()
    (reason,) = same_as_plain(model, prompts(1), max_new_tokens=16).stats.plain
    assert "checkpoints gradients in training mode" in reason and "model.eval()" in reason


def test_flex_attention_on_a_cpu() -> None:
    """Each shape of a tree's mask would take a minute to be compiled; the way out is named."""
    model = fresh_model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    way, why = route(model)
    assert way == "plain" and "model.set_attn_implementation('sdpa')" in str(why)

"""Models that do not do what they are told are found out by the self-test."""

from typing import Any

import pytest
import torch
from helpers.hybrids import CHAIN, SCANNED, counting_hybrid, fresh_hybrid, hybrid, known
from helpers.models import F32, fresh_model, initialised, prompts, same_as_plain, tiny_model
from helpers.refusals import Passes, refused, refuses, unchanged
from transformers import LlamaForCausalLM, Qwen3NextForCausalLM, ZayaForCausalLM

from lookahead import Lookahead, LookaheadError
from lookahead.models.names import CACHE
from lookahead.support.route import route, verdict
from lookahead.support.route import self_test as self_test_of

pytestmark = pytest.mark.usefixtures("self_tested")


class IgnoresMasks(LlamaForCausalLM):
    """Attends causally to slots, whatever the mask says."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=position_ids, **kwargs)


class IgnoresPositions(LlamaForCausalLM):
    """Numbers tokens by their slot."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class Stumbles(LlamaForCausalLM):
    """Cannot do with a mask of its caller's."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            raise RuntimeError("no such mask")
        return super().forward(*args, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (
            IgnoresMasks,
            "IgnoresMasks does not keep the branches of a tree apart.*ignores attention masks or position_ids",
        ),
        (IgnoresPositions, "IgnoresPositions does not keep the branches of a tree apart"),
        (Stumbles, "Stumbles did not run a pass with a tree mask.*no such mask"),
    ],
)
def test_the_self_test(kind: type[LlamaForCausalLM], match: str, passes: Passes) -> None:
    """Such a model is found out by a few passes over made-up tokens, once; then it is refused without any."""
    model = initialised(tiny_model("llama").config, kind=kind)
    seen = passes(model)
    with unchanged(model), pytest.raises(LookaheadError, match=match):
        model.generate(**prompts(1), max_new_tokens=8, use_lookahead=True)
    assert 0 < len(seen) <= 8
    assert max(seen) < 12, "the prompt was never run"
    refused(passes, model, match)
    refused(passes, model, match, prompts(3), do_sample=True)


def test_the_self_test_runs_once(passes: Passes) -> None:
    """A good model is tested once, and again when its dtype or its attention changes."""
    model = fresh_model("llama")

    def test_passes() -> int:
        seen = passes(model)
        model.generate(**prompts(1), max_new_tokens=4, do_sample=False, use_lookahead=True)
        return seen.index(12)

    assert test_passes() > 0
    assert test_passes() == 0
    model.float()
    assert test_passes() > 0
    assert test_passes() == 0
    model.set_attn_implementation("eager")
    assert test_passes() > 0
    assert test_passes() == 0


def test_a_model_in_training_mode() -> None:
    """Dropout makes branches differ, also where nothing told of it; the message says what was forgotten."""
    model = fresh_model("gpt2", resid_pdrop=0.3).train()
    refuses(r"model.eval\(\) was not called", self_test_of, model)
    same_as_plain(model.eval(), prompts(1), max_new_tokens=4)


def recurrent_states(cache: Any) -> list[Any]:
    return [layer.recurrent_states for layer in cache.layers if getattr(layer, "recurrent_states", None)]


class StartsAnew(Qwen3NextForCausalLM):
    """Forgets the cached state where more than ``most`` tokens continue it."""

    most = 1

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids.shape[1] > self.most:
            for states in recurrent_states(kwargs[CACHE]):
                states.update({index: 0.0 * state for index, state in states.items() if state is not None})
        return super().forward(input_ids, **kwargs)


class StartsAnewInLongPasses(StartsAnew):
    most = 64


class Unrecorded(ZayaForCausalLM):
    """Somebody's own class, which does as it should."""


class UnrecordedTree(Qwen3NextForCausalLM):
    """Another."""


class KeepsItsState(Qwen3NextForCausalLM):
    """Writes no state where several tokens continue one."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        before = [dict(states) for states in recurrent_states(kwargs[CACHE])]
        before = [{index: None if state is None else state.clone() for index, state in own.items()} for own in before]
        outputs = super().forward(input_ids, **kwargs)
        if 1 < input_ids.shape[1] < 6:
            for states, own in zip(recurrent_states(kwargs[CACHE]), before, strict=True):
                states.update(own)
        return outputs


@pytest.mark.parametrize("kind", [StartsAnew, StartsAnewInLongPasses, KeepsItsState])
def test_the_self_test_of_linear_drafts(kind: type[Qwen3NextForCausalLM]) -> None:
    """States that several tokens leave out, forget or do not write are found; the call falls back."""
    model = initialised(hybrid("qwen3_next").config, dtype=F32, kind=kind)
    way, reason = route(model)
    assert way == "plain" and "scores or states differ" in str(reason)


@pytest.mark.parametrize("name", known(CHAIN))
def test_the_self_test_of_linear_drafts_is_short(name: str, passes: Passes) -> None:
    """As many passes as a few tokens take, also where several tokens take several times as long as one; that of trees
    goes on from a branch."""
    seen = passes(model := fresh_hybrid(name))
    assert verdict(model)[0] == ("tree" if name in SCANNED else "chain")
    assert len(seen) <= (10 if name in ("inkling", "inkling2", "mamba2", "zaya") else 16)
    older = name not in SCANNED and name in ("kimi_linear", "bailing_hybrid")  # these are tried as trees first
    assert sum(tokens > 1 for tokens in seen) <= (10 if older else 6)


def of_kind(kind: Any, like: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = initialised(like.config, dtype=dtype, kind=kind)
    model.load_state_dict(like.state_dict())
    return model


def written(model: Any, tokens: int, **settings: Any) -> Any:
    """The statistics of a call that writes plain decoding's text."""
    return same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=tokens, **settings).stats


@pytest.mark.parametrize("kind", [StartsAnew, KeepsItsState])
def test_drafts_of_a_model_that_fails_are_never_given(kind: type[Qwen3NextForCausalLM]) -> None:
    """It is found out before its first call; one that does as it should is given drafts in it."""
    (reason,) = written(of_kind(kind, counting_hybrid("qwen3_next")), 40).plain
    assert "by its self-test a recurrent state cannot follow a tree" in reason and "scores or states differ" in reason
    for name, own in (("qwen3_next", UnrecordedTree), ("zaya", Unrecorded)):
        first = written(of_kind(own, counting_hybrid(name)), 60)
        assert first.mean_acceptance_length > 1.5


def test_coarse_numbers_of_an_unrecorded_class_take_no_pass_to_be_refused(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookahead.support.self_test.recorded_routes", lambda _: set())
    model = of_kind(Unrecorded, hybrid("zaya"), torch.bfloat16)
    seen = passes(model)
    way, reason = route(model)
    assert way == "plain" and reason is not None and "in bfloat16" in reason
    assert seen == []

"""End tokens, lengths, stopping criteria, stop strings and time limits, also in the middle of an accepted path."""

import time
from typing import Any

import pytest
import torch
from helpers.calls import LengthIs
from helpers.curves import measured
from helpers.marks import few
from helpers.models import counting_model, prompts, run, same_as_plain, same_outputs, same_tensors, tiny_model
from helpers.streaming import Harmless
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("batch", few([1, 3], 3))
@pytest.mark.parametrize("new_tokens", range(1, 14))
def test_length_inside_a_block(new_tokens: int, batch: int) -> None:
    """Every length is met exactly, though blocks of five tokens are accepted."""
    output = same_as_plain(
        counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), max_new_tokens=new_tokens
    )
    assert output.sequences.shape[1] == 12 + new_tokens
    settings = {"max_length": 12 + new_tokens, "output_scores": True}
    output = same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)
    assert output.sequences.shape[1] == 12 + new_tokens


@pytest.mark.parametrize("eos", [None, 40, 6], ids=["no-eos", "unused-eos", "eos"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", few(range(13, 41, 3), *range(13, 41, 6)))
def test_a_criterion_inside_a_block(length: int, batch: int, eos: int | None) -> None:
    """A rule of the user's is asked after every token, once, and obeyed at once."""
    kept: list[LengthIs] = []

    def new() -> StoppingCriteriaList:
        kept.append(LengthIs(length))
        return StoppingCriteriaList([kept[-1]])

    settings = {"max_new_tokens": 40, "stopping_criteria_new": new, "eos_token_id": eos}
    output = same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)
    plain, ours = kept
    lengths = range(13, output.sequences.shape[1] + 1)
    assert ours.shown == plain.shown == [output.sequences[:, :shown].tolist() for shown in lengths]
    if eos is None and length > 30:
        assert output.stats.mean_acceptance_length > 2


class EndsAt(StoppingCriteria):
    """A rule of the user's with an attribute by which transformers knows rules about end tokens, of any type."""

    def __init__(self, eos_token_id: Any) -> None:
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], torch.as_tensor(self.eos_token_id))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rule", ["int", "list", "tensor", "transformers", "length", "both"])
def test_rules_given_as_criteria(rule: str, batch: int) -> None:
    """End tokens and lengths that come as criteria rather than as settings."""
    model = tiny_model("llama")
    text = run(model, prompts(3), max_new_tokens=20)[0]
    ends = [int(text[0, 16]), int(text[1, 20])]

    def new() -> StoppingCriteriaList:
        rules = {
            "int": [EndsAt(ends[0])],
            "list": [EndsAt(ends)],
            "tensor": [EndsAt(torch.tensor(ends))],
            "transformers": [EosTokenCriteria(ends)],
            "length": [MaxLengthCriteria(19)],
            "both": [EosTokenCriteria(ends[0]), EndsAt(ends[1]), MaxLengthCriteria(22)],
        }
        return StoppingCriteriaList(rules[rule])

    same_as_plain(model, prompts(batch), max_new_tokens=25, stopping_criteria_new=new, output_scores=True)
    same_as_plain(model, prompts(batch), max_new_tokens=25, stopping_criteria_new=new, do_sample=True)
    same_as_plain(counting_model(), prompts(batch), max_new_tokens=25, stopping_criteria_new=new)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_criterion_sees_the_scores(batch: int) -> None:
    """If scores are recorded, a rule is given all of them up to now; otherwise None."""

    def shown(recorded: bool, **asked: Any) -> list[Any]:
        seen: list[Any] = []

        def look(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            seen.append(None if scores is None else [line.double() for line in scores])
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        settings = {"return_dict_in_generate": True, "output_scores": recorded, "max_new_tokens": 12}
        run(counting_model(), prompts(batch), stopping_criteria=[look], **settings, **asked)
        return seen

    assert shown(False, use_lookahead=True) == shown(False) == [None] * 12
    for ours, plain in zip(shown(True, use_lookahead=True), shown(True), strict=True):
        same_tensors(tuple(ours), tuple(plain), 1e-5)


@pytest.mark.parametrize(("batch", "eos"), [(1, 40), (3, None), (3, 40)])
@pytest.mark.parametrize("strings", ["d", ["cde"], ["gab", "nm"], ["t", "g", "m"], ["x", "ijk"], ["never"]], ids=str)
def test_stop_strings(strings: Any, batch: int, eos: int | None, tokenizer: PreTrainedTokenizerFast) -> None:
    """Strings that are a token, are a part of one, span several, or never come."""
    settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 24, "eos_token_id": eos}
    same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)
    same_as_plain(tiny_model("llama"), prompts(batch), output_scores=True, **settings)


def test_stop_strings_that_rows_meet_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    """Row by row, with and without an end token, greedy and sampled."""
    model = tiny_model("llama")
    text = run(model, prompts(3), max_new_tokens=30)[0]
    strings = [tokenizer.decode(text[row, 12 + at : 14 + at]) for row, at in ((0, 3), (1, 11), (2, 20))]
    for eos in (None, 40):
        for sample in (False, True):
            settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 40, "eos_token_id": eos}
            settings |= {"do_sample": sample}
            same_as_plain(model, prompts(3), **settings)


@pytest.mark.parametrize("batch", [1, 3])
def test_max_time(batch: int) -> None:
    """Time runs out between two tokens: after the first if there is none, never if there is enough."""
    output = same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, max_time=1e-9)
    assert output.sequences.shape[1] == 13
    same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, max_time=1000.0)

    def slow(input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.02)
        return scores

    output = counting_model().generate(
        **prompts(1), max_new_tokens=200, max_time=0.3, logits_processor=[slow], use_lookahead=True
    )
    assert 13 <= output.shape[1] <= 12 + 16


class Ticks:
    """In place of the module ``time``: it is a second later whenever somebody asks."""

    def __init__(self) -> None:
        self.now = 0

    def time(self) -> float:
        self.now += 1
        return float(self.now)


TIMED: list[dict[str, Any]] = [
    {"eos_token_id": 40},
    {"eos_token_id": [40, 5, 12], "temperature": 1.3},
    {"eos_token_id": 40, "do_sample": False, "repetition_penalty": 1.02},
    {"eos_token_id": 40, "return_dict_in_generate": True},
    {"eos_token_id": [5, 12], "return_dict_in_generate": True, "output_scores": True, "use_cache": False},
    {},
]


@pytest.mark.parametrize("settings", TIMED, ids=str)
@pytest.mark.parametrize("batch", [3, 5])
def test_time_ends_all_rows_of_a_batch_at_one_length(
    batch: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that plain decoding may write: where the slowest row stands, with the generator behind that token."""
    model = counting_model(sharpness=5.0)
    given = {"do_sample": True, "max_new_tokens": 40} | settings
    monkeypatch.setattr(stopping_criteria, "time", (clock := Ticks()))
    lengths = set()
    for seconds in range(1, 12):
        strategy = Lookahead(nodes=12 if seconds % 2 else None, seed=0, tuning=measured({1: 10.0, 3: 13.0, 9: 30.0}))
        more = {"max_time": seconds - 0.5, "streamer": (puts := Harmless()), "lookahead_strategy": strategy}
        output, state = run(model, prompts(batch), **given, **more, seed=seconds)
        length = output.sequences.shape[1] - 12 if "return_dict_in_generate" in given else output.shape[1] - 12
        expected, expected_state = run(model, prompts(batch), **given | {"max_new_tokens": length}, seed=seconds)
        if "return_dict_in_generate" in given:
            same_outputs((output, state), (expected, expected_state), model.dtype)
            output, expected = output.sequences, expected.sequences
        assert output.tolist() == expected.tolist()
        assert torch.equal(state, expected_state)
        assert torch.stack(puts.puts[1:], dim=1).tolist() == output[:, 12:].tolist()
        lengths.add(length)
    assert clock.now > 50
    assert len(lengths) > 5

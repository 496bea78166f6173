"""Reference texts: drafted from the first pass on, never written unless the model writes them."""

from typing import Any

import pytest
import torch
from helpers.models import prompts, same_as_plain, tiny_model
from helpers.refusals import refuses

from lookahead import Lookahead
from lookahead.sources.references import ReferenceSource

pytestmark = pytest.mark.usefixtures("augmented")


def written(model: Any, inputs: Any, **settings: Any) -> list[int]:
    torch.manual_seed(7)
    ids: torch.Tensor = model.generate(**inputs, max_new_tokens=60, **settings)
    return list(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_candidates_stand_where_the_text_stands() -> None:
    source = ReferenceSource(((5, 6, 7, 8), (5, 9)))
    source.start([1, 2], None)
    assert {token for token, _ in source.propose(source.root())} == {5}
    at = source.step(source.root(), 5)
    assert [token for token, _ in source.propose(at)] == [9, 6]
    at = source.step(source.step(at, 6), 7)
    assert source.propose(at)[0][0] == 8
    assert not source.propose(source.step(at, 8))  # the end, and no marker of the next text
    assert source.step(at, 40) == (0, 0)
    source.start([1, 5, 6, 7], None)
    assert source.propose(source.root())[0][0] == 8


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_right_reference_doubles_the_tokens_a_pass(sample: bool) -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    settings = {"do_sample": sample, "temperature": 0.8} if sample else {"do_sample": False}
    answer = written(model, inputs, **settings)
    passes = []
    for references in (None, (answer,), (answer[20:],)):
        strategy = Lookahead(nodes=16, seed=0, references=references)
        output = same_as_plain(model, inputs, strategy, max_new_tokens=60, **settings)
        passes.append(output.stats.steps)
    assert 2 * passes[1] <= passes[0]
    assert passes[2] < passes[0]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_wrong_references_change_no_text(sample: bool) -> None:
    wrong = tuple(torch.randint(0, 48, (3, 30), generator=torch.Generator().manual_seed(1)))
    for batch in (1, 3):
        strategy = Lookahead(references=wrong, seed=0)
        same_as_plain(tiny_model("llama"), prompts(batch), strategy, max_new_tokens=30, do_sample=sample)


def test_bad_references_are_refused() -> None:
    for given in ("text", 7, [["a"]], [[1, -2]], [[True]], [3, 4], torch.tensor([1, 2])):
        refuses("references must be a sequence of texts", Lookahead, references=given)
    refuses("belongs to the automatic mode", Lookahead, window_size=3, references=((1, 2),))
    beyond = {"lookahead_strategy": Lookahead(references=((48,),)), "max_new_tokens": 5}
    refuses("token 48: expected tokens below the model's 48", tiny_model("llama").generate, **prompts(1), **beyond)

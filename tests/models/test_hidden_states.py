"""Hidden states are noted for the call that asked, in its thread, and no longer."""

from typing import Any

import pytest
import torch
from helpers.medusa import counting, hooks
from helpers.models import prompts, run, same_as_plain
from helpers.refusals import refuses
from helpers.threads import together
from torch import Tensor
from transformers import LogitsProcessor

from lookahead.medusa import Medusa
from lookahead.models.hidden_states import HiddenStates

pytestmark = pytest.mark.usefixtures("augmented")


class Breaks(LogitsProcessor):
    """Raises after some calls; counts the hooks that are there meanwhile."""

    def __init__(self, model: Any, calls: int) -> None:
        self.model, self.calls, self.seen = model, calls, set[int]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.add(hooks(self.model))
        self.calls -= 1
        if not self.calls:
            raise RuntimeError("broken")
        return scores


def test_the_hook_is_there_for_the_call_only() -> None:
    model, heads = counting(3)
    for calls in (1, 5):
        breaks = Breaks(model, calls)
        with pytest.raises(RuntimeError, match="broken"):
            run(model, prompts(1), lookahead_strategy=Medusa(heads), max_new_tokens=20, logits_processor=[breaks])
        assert breaks.seen == {1}
        assert hooks(model) == 0
    whole = Breaks(model, 1000)
    same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=20, logits_processor=[whole])
    assert whole.seen == {0, 1}  # 0 in plain decoding
    assert hooks(model) == 0


class Thinks(LogitsProcessor):
    """Runs the same model inside of a call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            self.model(torch.full((len(input_ids), 3), 40))
        return scores


def test_passes_inside_a_processor_are_not_noted() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(2), Medusa(heads), max_new_tokens=21, logits_processor=[Thinks(model)])
    assert output.stats.mean_acceptance_length == pytest.approx(21 / 6)


def test_hidden_states_of_other_threads_are_not_noted() -> None:
    layer = torch.nn.Linear(3, 5)
    with HiddenStates(layer) as states:
        states.expect()
        together(lambda: layer(torch.ones(2, 7, 3)))
        refuses("was not called at all", states.take, torch.zeros(2, 7, 5))
        layer(torch.ones(2, 4, 3))  # not expected
        states.expect()
        logits = layer(torch.full((2, 7, 3), 2.0))
        assert states.take(logits)[0].tolist() == torch.full((2, 7, 3), 2.0).tolist()
        states.expect()
        layer(torch.ones(14, 3))
        refuses(r"called with \[14, 3\] in a pass whose logits are \[2, 7, 5\]", states.take, logits)
    assert not layer._forward_pre_hooks

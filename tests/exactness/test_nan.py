"""NaN and infinite scores are named; nothing is sampled from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.models import VOCAB, counting_model, fresh_model, prompts, same_as_plain, tiny_model
from helpers.refusals import filled, unchanged
from torch import Tensor

from lookahead import Lookahead, LookaheadError
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("self_tested")


@contextmanager
def logits_changed(model: Any, change: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """``change(pass number, fed ids, logits)`` is called after every pass and may write into the logits."""
    numbers: list[int] = []

    def alter(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        numbers.append(len(numbers) + 1)
        change(numbers[-1], kwargs["input_ids"][:, -output.logits.shape[1] :], output.logits)

    handle = model.register_forward_hook(alter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_nan_logits(step: int, batch: int, settings: dict[str, Any]) -> None:
    """Whatever chooses the token, the error names the pass."""
    model = fresh_model("mistral")
    same_as_plain(model, prompts(2), max_new_tokens=12)  # with the self-test, whose passes are not counted below
    cache = filled(model, prompts(batch, 6))

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        if number == step:
            logits[-1] = torch.nan

    with (
        logits_changed(model, spoil),
        unchanged(model, cache),
        pytest.raises(LookaheadError, match=f"logits are NaN at step {step} .row {batch - 1}, token"),
    ):
        model.generate(**prompts(batch), **{CACHE: cache}, max_new_tokens=12, use_lookahead=True, **settings)
    same_as_plain(model, prompts(batch), max_new_tokens=12)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_nan_beside_the_path(batch: int, settings: dict[str, Any]) -> None:
    """A drafted token that the model would never write may be as broken as it likes."""
    model, drafted = counting_model(), []
    same_as_plain(model, prompts(1), max_new_tokens=2)
    inputs = prompts(batch, ragged=False)
    inputs["input_ids"][:, :9] = 40

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        logits[..., 40] = -1e4
        if number > 1:
            drafted.append(int((fed == 40).sum()))
            logits[fed == 40] = torch.nan

    with logits_changed(model, spoil):
        same_as_plain(model, inputs, Lookahead(window_size=7, seed=0), max_new_tokens=20, **settings)
    assert sum(drafted) > 20


def test_nan_that_a_processor_removes() -> None:
    """``remove_invalid_values`` is asked for exactly this."""
    model = fresh_model("llama")
    same_as_plain(model, prompts(1), max_new_tokens=2)

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        logits[..., 7] = torch.nan
        logits[..., 8] = torch.inf * torch.where(fed % 2 == 0, 1, -1)

    for batch in (1, 3):
        for sample in (False, True):
            with logits_changed(model, spoil):
                same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample, remove_invalid_values=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_weights(batch: int) -> None:
    """Broken from the start: found by the first pass over the prompt, not blamed on the masks."""
    model = fresh_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 4] = torch.nan
    for _ in range(2):
        with pytest.raises(LookaheadError, match=r"logits are NaN at step 1 \(row 0, token 1\)"):
            model.generate(**prompts(batch), max_new_tokens=12, use_lookahead=True)


def test_infinite_logits() -> None:
    """Tokens that are excluded by the model itself are nothing unusual."""
    model = fresh_model("llama")
    with logits_changed(model, lambda number, fed, logits: logits[..., 40:].fill_(-torch.inf)):
        for batch in (1, 3):
            for sample in (False, True):
                output = same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample)
                assert output.sequences[:, 12:].max() < 40


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "settings", [{"suppress_tokens": list(range(VOCAB))}, {"sequence_bias": [[[3], float("inf")]]}], ids=["none", "inf"]
)
def test_nothing_to_sample_from(settings: dict[str, Any], batch: int) -> None:
    """Where processors leave no distribution, plain generate fails; lookahead does not make a token up."""
    model = tiny_model("llama")
    for asked in ({}, {"use_lookahead": True}):
        with unchanged(model), pytest.raises((RuntimeError, LookaheadError), match=r"nan|give no probabilities"):
            model.generate(**prompts(batch), max_new_tokens=5, do_sample=True, **settings, **asked)
    same_as_plain(model, prompts(batch), max_new_tokens=5, do_sample=False, **settings)

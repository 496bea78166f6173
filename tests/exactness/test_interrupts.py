"""Errors in the middle of a call, scores that are NaN or infinite, calls of several threads: the next call works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.marks import few
from helpers.models import VOCAB, counting_model, fresh_model, prompts, registries, run, same_as_plain, tiny_model
from helpers.refusals import Passes, filled, unchanged
from helpers.streaming import Puts
from helpers.threads import together
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

import lookahead
from lookahead import Lookahead, LookaheadError
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("self_tested")


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def raise_at(count: int, error: BaseException) -> Callable[[], None]:
    """A function that raises the ``count``-th time it is called."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) == count:
            raise error

    return call


def troublemaker(where: str, tick: Callable[[], None], model: Any) -> dict[str, Any]:
    """Settings with a ``tick`` in this place of the decode."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        tick()
        return scores

    def judge(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return {
        "streamer": lambda: {"streamer": Puts(lambda count: tick())},
        "processor": lambda: {"logits_processor": [process]},
        "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([judge])},
        "model": dict,
    }[where]()


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.slow), Interrupted()], ids=repr
)
@pytest.mark.parametrize("where", ["streamer", "processor", "criterion", "model"])
@pytest.mark.parametrize("count", few([1, 2, 5], 1, 5))
def test_an_exception_in_the_middle(where: str, count: int, error: BaseException) -> None:
    """It comes through as it is; the model, the patch and the caller's caches are as before; the next call works."""
    for name, batch in (("llama", 1), ("mistral", 3)):
        model = tiny_model(name)
        for cache in (filled(model, prompts(batch, 6)), DynamicCache()):
            model.generate(**prompts(batch), max_new_tokens=2, use_lookahead=True)
            tick = raise_at(count, error)
            handle = model.register_forward_hook(lambda *_, tick=tick: tick()) if where == "model" else None
            with unchanged(model, cache), pytest.raises(type(error)) as caught:
                settings = {"max_new_tokens": 12, "lookahead_strategy": Lookahead(window_size=7)}
                model.generate(**prompts(batch), **{CACHE: cache}, **troublemaker(where, tick, model), **settings)
            assert caught.value is error
            if handle is not None:
                handle.remove()
        same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=True)


def test_an_exception_in_the_self_test(passes: Passes) -> None:
    """A verdict that was not reached is not remembered."""
    model = fresh_model("llama")
    tick = raise_at(2, KeyboardInterrupt())
    handle = model.register_forward_hook(lambda *_: tick())
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        model.generate(**prompts(1), max_new_tokens=4, use_lookahead=True)
    handle.remove()
    seen = passes(model)
    same_as_plain(model, prompts(1), max_new_tokens=4)
    assert seen.index(12) == 0, "the plain call comes first"
    assert seen.count(12) == 2


@pytest.mark.parametrize("asked", [True, None])
def test_the_patch_is_taken_off_in_the_middle(asked: bool | None) -> None:
    """A call that has begun goes on to its end."""
    model = tiny_model("llama")
    text = run(model, prompts(1), max_new_tokens=12)[0]
    for where in ("streamer", "processor", "criterion"):
        lookahead.augment_all()
        settings = troublemaker(where, lookahead.restore_all, model)
        output = model.generate(**prompts(1), max_new_tokens=12, do_sample=False, use_lookahead=asked, **settings)
        assert output.tolist() == text.tolist()


@pytest.mark.parametrize(
    "names",
    few([["llama"], ["llama", "mistral"], ["gemma3", "gpt2", "llama"]], ["llama"], ["gemma3", "gpt2", "llama"]),
    ids=str,
)
def test_threads(names: list[str]) -> None:
    """On one model or several, some with lookahead and some without, the first calls (self-tests) among them."""
    chosen = [fresh_model(name) for name in names]
    jobs = [(chosen[index % len(chosen)], prompts(1 + index % 3, seed=index), index % 4 != 3) for index in range(6)]
    expected = [model.generate(**inputs, max_new_tokens=30, do_sample=False).tolist() for model, inputs, _ in jobs]
    tables = registries()
    for _ in range(3):
        results = together(
            *(
                lambda m=model, i=inputs, a=asked: m.generate(
                    **i, max_new_tokens=30, do_sample=False, **({"use_lookahead": True} if a else {})
                ).tolist()
                for model, inputs, asked in jobs
            )
        )
        assert results == expected
        assert registries() == tables


def test_an_error_in_one_thread() -> None:
    """The others go on."""
    model = tiny_model("llama")
    expected = run(model, prompts(1), max_new_tokens=30)[0].tolist()
    tables = registries()

    def good() -> Any:
        return model.generate(**prompts(1), max_new_tokens=30, do_sample=False, use_lookahead=True).tolist()

    def bad() -> Any:
        settings = troublemaker("processor", raise_at(4, RuntimeError("boom")), model)
        return model.generate(**prompts(1), max_new_tokens=30, do_sample=False, use_lookahead=True, **settings)

    results = together(good, bad, good, bad)
    assert results[0] == results[2] == expected
    assert [str(result) for result in results[1::2]] == ["boom", "boom"]
    assert registries() == tables


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
    """``remove_invalid_values`` is asked for exactly this; tokens that a model itself excludes are nothing unusual."""
    model = fresh_model("llama")
    same_as_plain(model, prompts(1), max_new_tokens=2)

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        logits[..., 7] = torch.nan
        logits[..., 8] = torch.inf * torch.where(fed % 2 == 0, 1, -1)

    for batch in (1, 3):
        for sample in (False, True):
            with logits_changed(model, spoil):
                same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample, remove_invalid_values=True)
            with logits_changed(model, lambda number, fed, logits: logits[..., 40:].fill_(-torch.inf)):
                output = same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample)
            assert output.sequences[:, 12:].max() < 40


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_weights(batch: int) -> None:
    """Broken from the start: found by the first pass over the prompt, not blamed on the masks."""
    model = fresh_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 4] = torch.nan
    for _ in range(2):
        with pytest.raises(LookaheadError, match=r"logits are NaN at step 1 \(row 0, token 1\)"):
            model.generate(**prompts(batch), max_new_tokens=12, use_lookahead=True)


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

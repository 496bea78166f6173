"""Errors in the middle of a call, and calls of several threads: the next call works as ever."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.marks import few
from helpers.models import fresh_model, prompts, registries, run, same_as_plain, same_caches, tiny_model
from helpers.refusals import Passes, filled, unchanged
from helpers.threads import together
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import Lookahead
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


class Streamer(BaseStreamer):
    """Calls ``tick`` with every put."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.put = lambda value: tick()  # type: ignore[method-assign]
        self.end = lambda: None  # type: ignore[method-assign]


def troublemaker(where: str, tick: Callable[[], None], model: Any) -> dict[str, Any]:
    """Settings with a ``tick`` in this place of the decode."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        tick()
        return scores

    def judge(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return {
        "streamer": lambda: {"streamer": Streamer(tick)},
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
                model.generate(
                    **prompts(batch),
                    **{CACHE: cache},
                    max_new_tokens=12,
                    lookahead_strategy=Lookahead(window_size=7),
                    **troublemaker(where, tick, model),
                )
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


def test_a_filled_cache_after_an_error_goes_on() -> None:
    """A continuation that broke off can be asked for again with the same cache."""
    for name in ("llama", "mistral"):
        model = tiny_model(name)
        caches = [filled(model, prompts(1, 8)) for _ in range(2)]
        following = {"input_ids": torch.cat([prompts(1, 8)["input_ids"], prompts(1, 5, seed=3)["input_ids"]], dim=1)}
        plain, _ = run(model, following, **{CACHE: caches[0]}, max_new_tokens=12)
        with pytest.raises(KeyboardInterrupt):
            settings = troublemaker("processor", raise_at(6, KeyboardInterrupt()), model)
            model.generate(**following, **{CACHE: caches[1]}, max_new_tokens=12, use_lookahead=True, **settings)
        ours, _ = run(model, following, **{CACHE: caches[1]}, max_new_tokens=12, use_lookahead=True)
        assert ours.tolist() == plain.tolist()
        same_caches(caches[1], caches[0], 1e-9)


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

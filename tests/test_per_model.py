"""The registry of what is kept for a model."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.automatic import FLAT, Oracle, drafted
from helpers.models import fresh_model, prompts
from helpers.refusals import refuses
from helpers.threads import together

from lookahead import Lookahead, Scheduler, _per_model, release
from lookahead._per_model import PerModel


class Model:
    """Something that can be referred to weakly."""


def test_what_is_taken_is_gone_until_it_is_put_back() -> None:
    lists: PerModel[list[int]] = PerModel(list)
    model = Model()
    lists.of(model).append(1)
    taken = lists.take(model)
    assert taken == [1]
    assert lists.take(model) is None
    lists.put(model, [2])
    lists.put(model, taken)  # another call was faster
    assert lists.of(model) == [2]


def test_release_and_clear() -> None:
    """Of one model all kinds of things go, or of every model; and it may be one of which nothing is kept."""
    lists, others = PerModel(list), PerModel(list)
    model, second = Model(), Model()
    for things in (lists, others):
        things.of(model).append(1)
        things.of(second).append(2)
    release(model)
    assert lists.of(model) == others.of(model) == []
    assert lists.of(second) == others.of(second) == [2]
    release()
    assert lists.of(second) == others.of(second) == []
    release(Model())
    model = Model()
    lists.of(model).append(1)
    others.of(model).append(2)
    lists.clear()
    assert lists.of(model) == [] and others.of(model) == [2]


def remembered(model: Any) -> None:
    drafted(model, Lookahead())
    drafted(model, Lookahead(tuning=FLAT), 3, do_sample=True)


def static(model: Any) -> None:
    drafted(model, Lookahead(static=True))


def own_source(model: Any) -> None:
    """A source of the user's own holds the model."""
    drafted(model, Lookahead(sources=(lambda row, held=model: Oracle(row),)))


def scheduled(model: Any) -> None:
    scheduler = Scheduler(model, 3)
    for _ in range(5):
        scheduler.submit(**prompts(1), max_new_tokens=8)
    scheduler.run()


def refused(model: Any) -> None:
    """By the self-test."""
    model.get_input_embeddings().register_forward_hook(lambda *_: torch.rand(()) and None)
    refuses("draws random numbers in its passes", drafted, model, Lookahead())


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("use", [remembered, static, own_source, scheduled, refused])
def test_nothing_that_is_kept_of_a_model_outlives_it(use: Callable[[Any], None]) -> None:
    model = fresh_model("llama")
    use(model)
    known, gone = len(_per_model._registry), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(_per_model._registry) < known


def test_threads_see_one_thing() -> None:
    made = []

    def make() -> object:
        made.append(object())
        return made[-1]

    things: PerModel[object] = PerModel(make)
    model = Model()
    together(*[partial(things.of, model)] * 16)
    assert len(made) == 1


@pytest.mark.parametrize("thing", ["x", 3])
def test_what_can_be_no_model_is_refused(thing: object) -> None:
    refuses(rf"release\(\) takes a model, .*: got a {type(thing).__name__}", release, thing)

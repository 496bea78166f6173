"""Fixtures that every test shares: the patch, a tokenizer, and what a call was decoded by."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported, and for processes that tests start: threads of several processes that share a few cores wait
# for each other so long that what takes seconds takes minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import save_tiny_model
from helpers.models import letters_tokenizer, prompts, tiny_model
from transformers import PreTrainedTokenizerFast

import lookahead
from lookahead import _native
from lookahead.draft.guard import Guard
from lookahead.draft.latency import StepTimes
from lookahead.generation import session
from lookahead.runtime import packing
from lookahead.runtime.cuda_graphs import buffers
from lookahead.runtime.open import open_tree
from lookahead.runtime.tracing import schedule
from lookahead.runtime.tree import TreeModel
from lookahead.training.recipe import Recipe


def pytest_collection_finish() -> None:
    """What was imported stays to the end, so that no later collection of garbage has to look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step-time curves of the user's own are neither read nor written, and traces left to no other test."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path_factory.getbasetemp() / "no-curves"))
    monkeypatch.setattr(schedule, "file_of", lambda *about: None)


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for what is measured and learnt, which is not there yet."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "curves"))
    return tmp_path / "curves"


@pytest.fixture
def batches_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts of batches go on, whatever the clock says of them on the machine that runs the tests."""
    monkeypatch.setattr(Guard, "rests", False)
    monkeypatch.setattr(Guard, "wins", True)


@pytest.fixture
def nodes_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node more costs a pass a hundredth, whatever passes take on the machine that runs the tests."""
    monkeypatch.setattr(StepTimes, "curve", lambda self, context, most: [1.0 + 0.01 * node for node in range(most)])


@pytest.fixture
def passes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes may be traced and run on packed weights, however long the clock says that prompts take."""
    monkeypatch.setattr(packing, "_LEAST_SHARE", 0.0)


@pytest.fixture
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass is enough for a trace."""
    monkeypatch.setattr(schedule, "_COST", 0.0)
    monkeypatch.setattr(schedule, "_COMPARED", 0.0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test does, the next one starts with an untouched transformers."""
    lookahead.restore_all()
    yield
    lookahead.restore_all()


@pytest.fixture(params=["python", "c"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with what is built in C, and once with its twins in Python."""
    if request.param == "python":
        monkeypatch.setattr(_native, "speedups", None)
    elif _native.speedups is None:
        pytest.skip("nothing is built in C here")


@pytest.fixture
def augmented() -> None:
    """``generate`` knows ``use_lookahead`` during the test."""
    lookahead.augment_all()


@pytest.fixture
def no_grad() -> Iterator[None]:
    """No gradients are kept during the test."""
    with torch.no_grad():
        yield


@pytest.fixture
def self_tested(restored: None) -> None:
    """``generate`` knows ``use_lookahead``, and the usual tiny models have passed their self-test."""
    lookahead.augment_all()
    for name in ("llama", "gpt2", "mistral"):
        tiny_model(name).generate(**prompts(1), max_new_tokens=1, use_lookahead=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are bytes, which tests must leave as it is."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def brief_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that train compare passes on two short texts."""
    for name, value in (("evaluation_prompts", 2), ("new_tokens", 8)):
        monkeypatch.setitem(Recipe.fit.__func__.__kwdefaults__, name, value)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """See :func:`letters_tokenizer`."""
    return letters_tokenizer()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TreeModel]]:
    """The view of the model that every call of ``generate`` made; nothing waits for another test's call."""
    views: list[TreeModel] = []

    def noting(*args: Any, **kwargs: Any) -> TreeModel:
        views.append(open_tree(*args, **kwargs))
        return views[-1]

    monkeypatch.setattr(session, "open_tree", noting)
    buffers.release()
    yield views
    buffers.release()


@pytest.fixture
def passes() -> Iterator[Callable[[Any], list[int]]]:
    """``count = passes(model)``: a list that grows by the number of tokens fed with every forward pass of ``model``."""
    handles = []

    def watch(model: Any) -> list[int]:
        seen: list[int] = []

        def note(_module: Any, _args: Any, kwargs: Any) -> None:
            fed = kwargs.get("input_ids")
            fed = kwargs.get("inputs_embeds") if fed is None else fed
            seen.append(fed.shape[1])

        handles.append(model.register_forward_pre_hook(note, with_kwargs=True))
        return seen

    yield watch
    for handle in handles:
        handle.remove()

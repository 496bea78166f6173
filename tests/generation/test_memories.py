"""Memories: what a model has said, kept in a file for later calls, whose texts stay the same."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import fresh_model, prompts
from helpers.refusals import refuses
from safetensors.numpy import load_file, save_file

import lookahead
from lookahead import Lookahead, LookaheadError, learning
from lookahead.draft.guard import Mode
from lookahead.draft.memory import exchange
from lookahead.draft.planner import Planner
from lookahead.generation.memories import about, memory_file
from lookahead.sources.learned import MOST_ROWS, Learned

pytestmark = pytest.mark.usefixtures("augmented", "curves")


def said(model: Any, drawn: bool = False, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    strategy = Lookahead(**{"nodes": 16, **settings})
    how = {"do_sample": drawn, "max_new_tokens": 40, "return_dict_in_generate": True, "eos_token_id": None}
    return model.generate(**prompts(1, 12), **how, lookahead_strategy=strategy)


def plain(model: Any, drawn: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**prompts(1, 12), do_sample=drawn, max_new_tokens=40, eos_token_id=None)


@pytest.mark.parametrize("drawn", [False, True])
def test_what_was_learnt_is_found_and_texts_stay_plain_ones(drawn: bool) -> None:
    model = fresh_model("llama")
    cold = said(model, drawn, remember=False)
    with learning(model) as file:
        said(model, drawn)
    assert file == memory_file(model)
    later = fresh_model("llama")
    found, given = said(later, drawn), said(later, drawn, remember=False, memory=file)
    for output in (cold, found, given):
        assert torch.equal(output.sequences, plain(model, drawn))
    assert found.stats.steps < cold.stats.steps and given.stats.steps < cold.stats.steps
    assert said(later, drawn, remember=False).stats.steps == cold.stats.steps, "calls that remember nothing"


def test_rows_are_what_the_model_says() -> None:
    model = fresh_model("llama")
    with learning(model) as file:
        output = said(model)
    learned = Learned.load(file, about(model))
    text = output.sequences[0].tolist()
    expected = [text[at - 3 : at] for at in range(12, len(text))]
    assert learned.contexts.tolist() == expected
    assert learned.tokens[:, 0].tolist() == text[12:], "greedy: the best token is the next one"
    assert (learned.logits[:, 0] == 0.0).all() and (np.diff(learned.logits[:, :16].astype(np.float32)) <= 0.0).all()
    assert learned.weights


def test_passes_that_draft_nothing_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(planner: Planner) -> None:
        planner.mode, planner.sizes = Mode.REST, ([1.0], [0.0])

    monkeypatch.setattr(Planner, "_choose", rest)
    model = fresh_model("llama")
    with learning(model) as file:
        output = said(model, nodes=None)
    assert output.stats.drafted == 0
    assert len(Learned.load(file)) == 40


def test_several_writers_lose_nothing() -> None:
    model = fresh_model("llama")
    with learning(model) as file:
        said(model)
    first = Learned.load(file)
    with learning(model, file):
        said(model, True, seed=1)
        said(model, True, seed=2)
    both = Learned.load(file)
    assert len(both) == len(first) + 80
    assert (both.contexts[: len(first)] == first.contexts).all()


def _add(file: Path, about: dict[str, str], number: int) -> None:
    from lookahead.generation import memories

    rows = np.full((5, 3), number, np.int32)
    learned = Learned(rows, np.zeros((5, 32), np.int32), np.zeros((5, 32), np.float16))
    for _ in range(4):
        with memories._alone(file):
            (Learned.load(file, about) + learned if file.exists() else learned).save(file, about)


@pytest.mark.skipif(os.name == "nt", reason="processes are forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_add_at_once(tmp_path: Path) -> None:
    file, told = tmp_path / "memory.safetensors", {"model": "Llama"}
    context = multiprocessing.get_context("fork")
    adding = [context.Process(target=_add, args=(file, told, number)) for number in (1, 2, 3)]
    for process in adding:
        process.start()
    for process in adding:
        process.join()
    assert np.bincount(Learned.load(file, told).contexts[:, 0]).tolist() == [0, 20, 20, 20]


def test_the_oldest_rows_go() -> None:
    def rows(first: int, count: int) -> Learned:
        numbers = np.arange(first, first + count, dtype=np.int32)
        zeros = np.zeros((count, 32), np.int32)
        return Learned(np.stack([numbers] * 3, 1), zeros, zeros.astype(np.float16), {"kept": [float(first)]})

    both = rows(0, MOST_ROWS - 5) + rows(MOST_ROWS, 10)
    assert len(both) == MOST_ROWS
    assert both.contexts[0].tolist() == [5, 5, 5] and both.contexts[-1, 0] == MOST_ROWS + 9
    assert both.weights == {"kept": [float(MOST_ROWS)]}


def test_what_fails_leaves_what_was_said_and_no_notes() -> None:
    model = fresh_model("llama")
    with pytest.raises(ZeroDivisionError), learning(model) as file:
        said(model)
        raise ZeroDivisionError
    assert len(Learned.load(file)) == 40
    kept = exchange(model)
    assert kept is not None and kept.notes is None
    exchange(model, kept)
    said(model)
    assert len(Learned.load(file)) == 40, "outside of the block nothing is kept"


def broken(file: Path, **changes: Any) -> None:
    held = load_file(file)
    told = {"format": "1", "weights": "{}", **about(fresh_model("llama"))}
    told |= {name: value for name, value in changes.items() if isinstance(value, str)}
    held |= {name: value for name, value in changes.items() if isinstance(value, np.ndarray)}
    save_file(held, file, told)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "cannot be read as a memory"),
        (lambda file: file.write_bytes(b"{}"), "cannot be read as a memory"),
        (lambda file: file.unlink(), "cannot be read as a memory"),
        (lambda file: broken(file, format="2"), "no memory of format 1"),
        (lambda file: broken(file, weights="[1"), "cannot be read as a memory"),
        (lambda file: broken(file, more=np.zeros(3)), "no memory of format 1"),
        (lambda file: broken(file, logits=np.zeros((3, 32), np.float16)), "other tokens or shapes"),
        (lambda file: broken(file, tokens=np.full((40, 32), -7, np.int32)), "other tokens or shapes"),
    ],
)
def test_bad_files_are_refused_before_any_work(change: Any, match: str) -> None:
    model = fresh_model("llama")
    with learning(model) as file:
        said(model)
    change(file)
    refuses(match, Lookahead, memory=file)
    if file.exists():
        with pytest.raises(LookaheadError, match=match), learning(model):
            raise AssertionError("the block must not run")
        assert torch.equal(said(fresh_model("llama")).sequences, plain(model)), "what is found by itself is left aside"


def test_files_of_other_models_and_tokens_are_refused() -> None:
    model, other = fresh_model("llama"), fresh_model("qwen2")
    with learning(other) as file:
        said(other)
    assert file != memory_file(model)
    refuses("of another model", said, model, memory=file)
    with pytest.raises(LookaheadError, match="of another model"), learning(model, file):
        raise AssertionError("the block must not run")
    with learning(model) as own:
        said(model)
    broken(own, tokens=np.full((40, 32), 60_000, np.int32))
    refuses("other tokens", said, model, memory=own)


@pytest.mark.parametrize("given", [3, True, [1]])
def test_what_is_no_file_is_refused(given: Any) -> None:
    refuses(r"memory=\) must be the file", Lookahead, memory=given)
    refuses(r"memory=\) belongs to the automatic mode", Lookahead, window_size=3, memory="memory")


def test_a_checkpoint_is_the_same_in_any_dtype() -> None:
    model = fresh_model("llama").to(torch.bfloat16)
    assert memory_file(model) == memory_file(fresh_model("llama").to(torch.bfloat16).to(torch.float32))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 1.0
    assert memory_file(model) != memory_file(fresh_model("llama"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LookaheadError, match="cannot be written"),
        learning(fresh_model("llama"), tmp_path / "file" / "m"),
    ):
        raise AssertionError("the block must not run")


def test_scheduled_requests_learn_and_recall() -> None:
    model = fresh_model("llama")
    asked = {**prompts(1, 12), "max_new_tokens": 40, "eos_token_id": None}
    with learning(model) as file, lookahead.Scheduler(model) as scheduler:
        tickets = [scheduler.submit(**asked) for _ in range(2)]
        scheduler.run()
    assert all(torch.equal(ticket.result(), plain(model)) for ticket in tickets)
    assert len(Learned.load(file)) == 80
    with lookahead.Scheduler(fresh_model("llama")) as scheduler:
        later = scheduler.submit(**asked, return_dict_in_generate=True)
        scheduler.run()
    assert torch.equal(later.result().sequences, plain(model)) and later.result().stats.steps < 40


class Packed(torch.Tensor):
    """Weights that are no plain numbers, as those of quantized models."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("no numbers at hand")


def test_models_whose_embeddings_are_no_plain_numbers_have_memories() -> None:
    model = fresh_model("llama")
    embeddings = model.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.detach().as_subclass(Packed), requires_grad=False)
    assert about(model)["model"] == about(fresh_model("llama"))["model"]


def test_copies_of_a_strategy_do_not_read_the_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    with learning(model) as file:
        said(model)
    strategy, read = Lookahead(memory=file), list[Any]()
    monkeypatch.setattr(Learned, "load", lambda *given: read.append(given))
    assert replace(strategy, references=[[1, 2]]).memory == str(file) and not read
    assert Lookahead.from_dict(strategy.to_dict()) == strategy and len(read) == 1

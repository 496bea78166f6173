"""Prompts that begin together are read in one pass, each as if it were alone."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conformance.families import FAMILIES, build
from helpers.models import VOCAB, fresh_model, same_caches, same_tensors, tiny_model
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

import lookahead
from jacobi import Wants
from lookahead import Scheduler
from lookahead.generation.prefixes import Prefixes
from lookahead.models.names import CACHE
from lookahead.runtime.forward import TreeForward
from lookahead.scheduling import batch, prompts
from lookahead.scheduling.prompts import Asked, groups
from lookahead.scheduling.requests import prepared

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The lengths of the prompts of every pass that reads some."""
    passes: list[list[int]] = []
    before = batch.read

    def noting(asked: Sequence[Asked], *kept: Any) -> Any:
        passes.append([one.length for one in asked])
        return before(asked, *kept)

    monkeypatch.setattr(batch, "read", noting)
    yield passes


def prompt(length: int) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def submit(scheduler: Scheduler, ids: Tensor, **settings: Any) -> Any:
    return scheduler.submit(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY | settings)


def plain(model: Any, ids: Tensor, **settings: Any) -> Any:
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY | settings)


def asked(model: Any, *lengths: int, wants: Wants | None = None, **more: Any) -> list[Asked]:
    """Requests whose prompts all differ."""
    lookahead.augment_all()
    found = []
    for at, length in enumerate(lengths):
        inputs = {"input_ids": prompt(length).roll(at)} | more
        found.append(Asked(prepared(model, GREEDY | inputs), wants or Wants(), 8, frozenset(inputs)))
    return found


def test_prompts_of_much_the_same_length_are_read_in_one_pass(read: list[list[int]]) -> None:
    model, lengths = tiny_model("llama"), [9, 30, 10, 11, 28, 3]
    wanted = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    with Scheduler(model, 6) as scheduler:
        tickets = [submit(scheduler, prompt(length), **wanted) for length in lengths]
        scheduler.run()
    assert read == [[3], [9, 10, 11], [28, 30]]
    for ticket, length in zip(tickets, lengths, strict=True):
        ours, expected = ticket.result(), plain(model, prompt(length), **wanted)
        assert ours.sequences.tolist() == expected.sequences.tolist()
        same_tensors(ours.logits, expected.logits, 1e-9)
        same_caches(ours[CACHE], expected[CACHE], 1e-9)


def test_a_prompt_that_many_ask_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = tiny_model("gemma3"), list[tuple[int, int]]()
    before = TreeForward.prefill

    def noting(self: TreeForward) -> Tensor:
        logits = before(self)
        passes.append((logits.shape[0], self.layout.cache.get_seq_length()))
        return logits

    monkeypatch.setattr(TreeForward, "prefill", noting)

    class Marks(LogitsProcessor):
        """Writes into what it is given, as processors may."""

        def __init__(self, token: int) -> None:
            self.token = token

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, self.token] -= 1e9
            return scores

    one, other = prompt(40), prompt(41)
    given = [one, other, one, one, other, prompt(42), one]
    drawn: dict[str, Any] = {"do_sample": True, "max_new_tokens": 40, "return_dict_in_generate": True}
    with Scheduler(model, 6) as scheduler:
        tickets = [
            submit(scheduler, ids, **drawn, seed=at, logits_processor=[Marks(at)]) for at, ids in enumerate(given)
        ]
        scheduler.run()
    read = [(rows, length) for rows, length in passes if length > 30]  # the others are the self-test's
    assert read == [(1, 40), (1, 41), (1, 42), (1, 40)]  # the last one found no room at first
    for at, (ticket, ids) in enumerate(zip(tickets, given, strict=True)):
        torch.manual_seed(at)
        ours, expected = ticket.result(), plain(model, ids, **drawn, logits_processor=[Marks(at)])
        assert ours.sequences.tolist() == expected.sequences.tolist()
        same_caches(ours[CACHE], expected[CACHE], 1e-9)


def test_prompts_join_those_that_are_being_written(read: list[list[int]]) -> None:
    model = tiny_model("gemma3")
    with Scheduler(model, 4) as scheduler:
        tickets = [submit(scheduler, prompt(length), max_new_tokens=30) for length in (5, 6)]
        for _ in range(3):
            scheduler.step()
        tickets += [submit(scheduler, prompt(length), max_new_tokens=30) for length in (24, 25)]
        scheduler.run()
    assert read == [[5, 6], [24, 25]]
    for ticket, length in zip(tickets, (5, 6, 24, 25), strict=True):
        assert ticket.result().tolist() == plain(model, prompt(length), max_new_tokens=30).tolist()


def test_a_pass_is_neither_too_long_nor_mostly_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert list(groups(asked(model, *[100] * 7))) == [[0, 1, 2, 3, 4], [5, 6]]
    assert list(groups(asked(model, 600, 600))) == [[0], [1]]
    assert list(groups(asked(model, 8, 1, 8))) == [[1], [0, 2]]
    assert list(groups(asked(model, 8))) == [[0]]
    assert list(groups([*asked(model, 600), *asked(model, 600), *asked(model, 599)])) == [[0, 1], [2]]
    monkeypatch.setattr(prompts, "MOST_LOGITS", 2 * VOCAB * 4)
    told = Wants(8, 8)  # of eight tokens in all
    assert list(groups(asked(model, 20, 20, 20, wants=told))) == [[0, 1, 2]]
    assert list(groups(asked(model, 20, 22, wants=told))) == [[0], [1]]


def test_prompts_with_something_of_their_own_are_read_alone() -> None:
    model = tiny_model("llama")
    usual = asked(model, 7, 7)
    masked = asked(model, 7, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]]))
    placed = asked(model, 7, position_ids=torch.arange(7)[None] + 3)
    in_chunks = asked(model, 7, prefill_chunk_size=4)
    given = asked(model, 7, **{CACHE: DynamicCache(config=model.config)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # users go on writing the name of earlier versions
        old = asked(model, 7, past_key_values=DynamicCache(config=model.config))
    other = asked(model, 7, wants=Wants(4, 4))
    behind = DynamicCache(config=model.config)
    model(prompt(3), **{CACHE: behind})
    goes_on = asked(model, 7, **{CACHE: behind})
    everything = [*usual, *masked, *placed, *in_chunks, *given, *old, *goes_on, *other]
    assert sorted(groups(everything)) == [[0, 5, 6], [1], [2], [3], [4], [7], [8]]


def test_models_that_see_the_whole_prompt_get_no_padding(read: list[list[int]]) -> None:
    model = build(next(family for family in FAMILIES if family.key == "bert-BertLMHeadModel")).double()
    with Scheduler(model, 4) as scheduler:
        tickets = [submit(scheduler, prompt(length)) for length in (8, 9, 9)]
        scheduler.run()
    assert read == [[8], [9, 9]]
    for ticket, length in zip(tickets, (8, 9, 9), strict=True):
        assert ticket.result().tolist() == plain(model, prompt(length)).tolist()


def test_a_prompt_that_cannot_be_read_ends_alone(read: list[list[int]]) -> None:
    model = fresh_model("llama")
    embed = model.get_input_embeddings()
    lookup = type(embed).forward

    def forward(ids: Tensor) -> Tensor:
        if bool((ids == 40).any()):
            raise RuntimeError("no such token")
        return lookup(embed, ids)

    embed.forward = forward
    ids, other = prompt(6), prompt(7)
    ids[ids == 40] = other[other == 40] = 41
    broken = torch.cat([ids, torch.tensor([[40]])], dim=1)
    settings = {"suppress_tokens": [40]}  # which drafts may hold nevertheless
    with Scheduler(model, 3) as scheduler:
        tickets = [submit(scheduler, each, use_lookahead=False, **settings) for each in (ids, broken, other)]
        scheduler.run()
    assert [len(each) for each in read[:4]] == [3, 1, 1, 1]
    for ticket, each in ((tickets[0], ids), (tickets[2], other)):
        assert ticket.result().tolist() == plain(model, each, **settings).tolist()
    with pytest.raises(RuntimeError, match="no such token"):
        tickets[1].result()


def test_an_interrupt_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before, calls = batch.read, []

    def interrupted(asked: Sequence[Asked], *kept: Any) -> Any:
        calls.append(len(asked))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return before(asked, *kept)

    monkeypatch.setattr(batch, "read", interrupted)
    lengths = [20, 5, 21, 6]
    with Scheduler(model, 4) as scheduler:
        tickets = [submit(scheduler, prompt(length)) for length in lengths]
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
        assert (scheduler.running, scheduler.waiting) == (4, 0)
        scheduler.run()
    for ticket, length in zip(tickets, lengths, strict=True):
        assert ticket.result().tolist() == plain(model, prompt(length)).tolist()


def test_drafts_of_several_prompts_are_told_as_much_as_those_of_one() -> None:
    model = tiny_model("llama")
    told = Wants(4, 12)
    for count, tokens in ((1, 12), (3, 4), (20, 1)):
        view, scores = prompts.read(asked(model, *[14] * count, wants=told), Prefixes(model, 0))
        view.close()
        assert [said.successors[0].tokens.shape for said in scores if said.successors] == [(tokens, 4)] * count

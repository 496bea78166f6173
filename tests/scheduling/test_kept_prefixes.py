"""Requests that begin alike read their beginning once, and long prompts are read in parts."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conformance.families import FAMILIES, build
from helpers.models import VOCAB, tiny_model
from torch import Tensor

from lookahead import Scheduler
from lookahead.generation.prefixes import BLOCK
from lookahead.scheduling import batch, prompts
from lookahead.scheduling.prompts import Asked

KINDS = ("llama-", "gemma3_text", "gemma3n_text", "deepseek_v3", "gpt_oss", "qwen2_moe", "falcon-", "qwen3_next")
MOST = 1 << 26  # bytes

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """How many tokens of each prompt are read, pass by pass."""
    passes: list[list[int]] = []
    before = prompts.read

    def noting(asked: Sequence[Asked], *kept: Any) -> Any:
        passes.append([one.length for one in asked])
        return before(asked, *kept)

    for module in (batch, prompts):
        monkeypatch.setattr(module, "read", noting)
    yield passes


def prompts_of(lengths: Sequence[int], common: int) -> list[Tensor]:
    """Prompts that begin alike."""
    made = torch.Generator().manual_seed(common)
    begin = torch.randint(3, VOCAB, (1, common), generator=made)
    return [torch.cat([begin, torch.randint(3, VOCAB, (1, length - common), generator=made)], 1) for length in lengths]


def settings_of(at: int) -> dict[str, Any]:
    return {"do_sample": at % 2 == 1, "max_new_tokens": 24, "min_new_tokens": 24}


def plain(model: Any, ids: Tensor, at: int) -> list[list[int]]:
    torch.manual_seed(at)
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings_of(at))
    return [list(map(int, row)) for row in found]


def submit(scheduler: Scheduler, ids: Tensor, at: int, **more: Any) -> Any:
    return scheduler.submit(input_ids=ids, attention_mask=torch.ones_like(ids), seed=at, **settings_of(at), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_begin_alike_are_plain_ones(kind: str) -> None:
    model = build(next(family for family in FAMILIES if family.key.startswith(kind)))
    given = prompts_of([60, 50, 75, 64], 3 * BLOCK)
    with Scheduler(model, 2, prefix_bytes=MOST) as scheduler:
        tickets = [submit(scheduler, ids, at) for at, ids in enumerate(given)]
        scheduler.run()
        whole = torch.tensor(plain(model, given[0], 0))
        again = torch.cat([whole, given[1][:, -7:]], 1)  # the conversation goes on
        tickets.append(submit(scheduler, again, 4))
        scheduler.run()
    for at, (ticket, ids) in enumerate(zip(tickets, [*given, again], strict=True)):
        assert ticket.result().tolist() == plain(model, ids, at), at
    cached = [ticket.cached for ticket in tickets]
    assert cached == ([0] * 5 if kind == "qwen3_next" else [48, 0, 48, 48, 80])  # the shorter one is read first


def test_only_new_tokens_are_read_and_together(read: list[list[int]]) -> None:
    model, given = tiny_model("llama"), prompts_of([50, 70, 71, 72], 3 * BLOCK)
    with Scheduler(model, 4, prefix_bytes=MOST) as scheduler:
        for count, salt in ((1, None), (4, None), (4, "other")):
            tickets = [submit(scheduler, ids, 0, salt=salt) for ids in given[:count]]
            scheduler.run()
            for ticket, ids in zip(tickets, given, strict=False):
                assert ticket.result().tolist() == plain(model, ids, 0)
    assert read == [[50], *[[2], [22, 23, 24]], *[[48], [2], [22, 23, 24]]]


@pytest.mark.parametrize("most", [MOST, 0, 1 << 12])
def test_a_long_prompt_is_read_in_parts_while_others_write(read: list[list[int]], most: int) -> None:
    model = tiny_model("llama")
    long, short, other = prompts_of([1300, 20, 30], 5)
    with Scheduler(model, 4, prefix_bytes=most) as scheduler:
        tickets = [submit(scheduler, ids, at) for at, ids in enumerate((long, short))]
        scheduler.step()
        told = list(read)
        tickets.append(submit(scheduler, other, 2))
        scheduler.step()
        assert scheduler.running == 3
        scheduler.run()
    for at, (ticket, ids) in enumerate(zip(tickets, (long, short, other), strict=True)):
        assert ticket.result().tolist() == plain(model, ids, at)
    if most == MOST:
        assert told == [[512], [20]] and read[2:] == [[512], [30], [276]]
        assert tickets[0].cached == 0
    elif most == 0:
        assert told == [[20], [1300]]
    else:  # a part was read in vain
        assert told == [[512], [20], [1300]]


def test_a_long_prompt_that_cannot_be_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    long, short = prompts_of([1300, 20], 5)
    before = prompts.read

    def failing(asked: Sequence[Asked], *kept: Any) -> Any:
        if asked[0].length > 500 and asked[0].past:
            raise RuntimeError("no memory")
        return before(asked, *kept)

    monkeypatch.setattr(prompts, "read", failing)
    with Scheduler(model, 4, prefix_bytes=MOST) as scheduler:
        tickets = [submit(scheduler, ids, at) for at, ids in enumerate((long, short))]
        scheduler.run()
    with pytest.raises(RuntimeError, match="no memory"):
        tickets[0].result()
    assert tickets[1].result().tolist() == plain(model, short, 1)


def test_a_request_that_waits_for_its_prompt_may_be_cancelled() -> None:
    model = tiny_model("llama")
    long, short = prompts_of([1300, 20], 5)
    with Scheduler(model, 4, prefix_bytes=MOST) as scheduler:
        tickets = [submit(scheduler, ids, at) for at, ids in enumerate((long, short))]
        scheduler.step()
        tickets[0].cancel()
        scheduler.run()
        assert tickets[0].done and scheduler.running == 0
    assert tickets[1].result().tolist() == plain(model, short, 1)


def test_what_shares_no_passes_begins_where_others_ended() -> None:
    model, ids = tiny_model("llama"), prompts_of([40], 30)[0]
    both = ids.expand(2, -1)
    with Scheduler(model, 4, prefix_bytes=MOST) as scheduler:
        settings = {"return_dict_in_generate": True, "lookahead_strategy": {"static": True}}
        tickets = [submit(scheduler, given, 0, **settings) for given in (ids, ids, both)]
        scheduler.run()
    assert [ticket.cached for ticket in tickets] == [0, 32, None]
    for ticket, given in zip(tickets, (ids, ids, both), strict=True):
        assert ticket.result().sequences.tolist() == plain(model, given, 0)


def test_what_many_begin_with_is_read_before_them(read: list[list[int]]) -> None:
    model, given = tiny_model("llama"), prompts_of([70, 71, 72, 73, 74], 4 * BLOCK + 3)
    with Scheduler(model, 5, prefix_bytes=MOST) as scheduler:
        tickets = [submit(scheduler, ids, 0) for ids in given]
        scheduler.run()
        tickets += [submit(scheduler, ids.flip(1), 0, salt=str(at // 2)) for at, ids in enumerate(given)]
        scheduler.run()
    assert read[:2] == [[64], [6, 7, 8, 9, 10]] and [ticket.cached for ticket in tickets[:5]] == [0, 64, 64, 64, 64]
    assert read[2:] == [[70, 71, 72, 73, 74]], "texts of several salts have nothing in common"
    for ticket, ids in zip(tickets, [*given, *(ids.flip(1) for ids in given)], strict=True):
        assert ticket.result().tolist() == plain(model, ids, 0)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_is_behind_several_beginnings_is_read_together(kind: str, read: list[list[int]]) -> None:
    """Of texts of other lengths, two of them equal; what they go on with has much in common."""
    model = build(next(family for family in FAMILIES if family.key.startswith(kind)))
    begun = [prompts_of([length], length)[0] for length in (32, 48, 64, 96)]
    given = [torch.cat(pair, 1) for pair in zip(begun, prompts_of([70, 73, 75, 78], 66), strict=True)]
    given.append(given[1])
    with Scheduler(model, 5, prefix_bytes=MOST) as scheduler:
        for ids in begun:
            submit(scheduler, ids, 0)
            scheduler.run()
        read.clear()
        tickets = [submit(scheduler, ids, 2 * at) for at, ids in enumerate(given)]
        scheduler.run()
    assert read == [[73, 73], [70, 75, 78]]
    assert [ticket.cached for ticket in tickets] == [32, 48, 64, 96, 48]
    for at, (ticket, ids) in enumerate(zip(tickets, given, strict=True)):
        assert ticket.result().tolist() == plain(model, ids, 2 * at)


@pytest.mark.parametrize("kind", ["mamba2-", "zaya"])
def test_models_with_one_branch_keep_nothing(kind: str) -> None:
    model, ids = build(next(family for family in FAMILIES if family.key.startswith(kind))), prompts_of([40], 30)[0]
    with Scheduler(model, 2, prefix_bytes=MOST) as scheduler:
        tickets = [submit(scheduler, ids, 0) for _ in range(2)]
        scheduler.run()
    assert [(ticket.cached, ticket.result().tolist()) for ticket in tickets] == [(None, plain(model, ids, 0))] * 2

"""Requests that share passes are each exactly what plain ``generate`` writes for them alone."""

import random
from typing import Any

import pytest
import torch
from helpers.hybrids import hybrid
from helpers.medusa import fitted
from helpers.models import VOCAB, counting_model, fresh_model, same_caches, same_tensors, tiny_model
from helpers.refusals import refuses
from helpers.streaming import Puts
from torch import Tensor
from transformers import StoppingCriteria

from lookahead import Jacobi, Lookahead, Scheduler
from lookahead.bundled import load_bundled
from lookahead.medusa import Medusa
from lookahead.models.names import CACHE

OTHERS = ["mistral", "qwen2_mixed", "gpt2", "gemma3", "llama_eager"]
KINDS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "temperature": 1.2, "top_k": 20},
    {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2},
    {"do_sample": False, "repetition_penalty": 1.3},
]


def asked(count: int, seed: int = 0, longest: int = 40) -> list[tuple[Tensor, dict[str, Any], int]]:
    """Requests of many kinds: a prompt ``[1, token]``, settings and a seed."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        ids = torch.tensor([[rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 20))]])
        requests.append((ids, KINDS[number % len(KINDS)] | {"max_new_tokens": rng.randrange(1, longest)}, number))
    return requests


def plain(model: Any, ids: Tensor, settings: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)


def submit(scheduler: Scheduler, ids: Tensor, settings: dict[str, Any], seed: int) -> Any:
    return scheduler.submit(input_ids=ids, attention_mask=torch.ones_like(ids), seed=seed, **settings)


def check(model: Any, requests: list[Any], rows: int, strategy: Any = None) -> None:
    """Texts are plain ones, and the process's generator is left alone."""
    before = torch.get_rng_state()
    with Scheduler(model, rows, strategy) as scheduler:
        tickets = [submit(scheduler, *request) for request in requests]
        scheduler.run()
    assert torch.equal(torch.get_rng_state(), before)
    same(model, tickets, requests)


def same(model: Any, tickets: list[Any], requests: list[Any]) -> None:
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.result().tolist() == plain(model, *request).tolist()


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 2), ("llama", 5), *((name, 3) for name in OTHERS)])
def test_texts_are_plain_ones(name: str, rows: int) -> None:
    check(tiny_model(name), asked(12, rows, 40 if name != "gpt2" else 30), rows)


@pytest.mark.parametrize("strategy", [Lookahead(window_size=3, ngram_size=3, verification_set_size=3), Jacobi()])
def test_other_strategies_share_passes_too(strategy: Any) -> None:
    check(tiny_model("llama"), asked(8), 3, strategy)


@pytest.mark.usefixtures("batches_draft")
def test_drafts_save_passes() -> None:
    model = counting_model()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 0, 1, 2]])
    with Scheduler(model, 3) as scheduler:
        tickets = [
            submit(scheduler, ids, {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}, 0)
            for _ in range(6)
        ]
        scheduler.run()
    stats = sum(ticket.result().stats for ticket in tickets)
    assert stats.emitted == 360
    assert stats.mean_acceptance_length > 2.0
    assert sum(stats.sources.values()) == stats.accepted > 0


def test_plain_requests_and_others_share_passes() -> None:
    model, requests = tiny_model("llama"), asked(6)
    with Scheduler(model, 4) as scheduler:
        tickets = [
            submit(scheduler, ids, settings | {"use_lookahead": bool(number % 2)}, number)
            for number, (ids, settings, _) in enumerate(requests)
        ]
        scheduler.run()
    same(model, tickets, requests)


@pytest.mark.slow
def test_200_requests_that_come_and_go() -> None:
    model, requests, rng = tiny_model("llama"), asked(200, 7), random.Random(3)
    scheduler, tickets = Scheduler(model, 6), []
    for request in requests:
        tickets.append(submit(scheduler, *request))
        for _ in range(rng.randrange(6)):
            scheduler.step()
    scheduler.run()
    same(model, tickets, requests)


def test_scores_and_caches_are_plain_ones() -> None:
    model = tiny_model("llama")
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    requests = [(ids, settings | wanted, seed) for ids, settings, seed in asked(5)]
    with Scheduler(model, 3) as scheduler:
        tickets = [submit(scheduler, *request) for request in requests]
        scheduler.run()
    for ticket, request in zip(tickets, requests, strict=True):
        ours, expected = ticket.result(), plain(model, *request)
        same_tensors(ours.scores, expected.scores, 1e-9)
        same_tensors(ours.logits, expected.logits, 1e-9)
        same_caches(ours[CACHE], expected[CACHE], 1e-9)


def test_a_cache_goes_on() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8, 9]])
    settings = {"max_new_tokens": 6, "do_sample": False}
    with Scheduler(model, 2) as scheduler:
        first = submit(scheduler, ids, settings | {"return_dict_in_generate": True}, 0)
        scheduler.run()
        kept = first.result()
        longer = torch.cat([kept.sequences, torch.tensor([[11, 12]])], dim=1)
        second = submit(scheduler, longer, settings | {CACHE: kept[CACHE]}, 0)
        other = submit(scheduler, ids, settings, 0)
        scheduler.run()
    assert second.result().tolist() == plain(model, longer, settings, 0).tolist()
    assert other.result().tolist() == plain(model, ids, settings, 0).tolist()


def test_streams_and_watchers_see_their_own_request() -> None:
    model, requests = tiny_model("llama"), asked(5)
    seen: list[list[int]] = [[] for _ in requests]
    streams = [Puts() for _ in requests]
    with Scheduler(model, 3) as scheduler:
        for number, (ids, settings, seed) in enumerate(requests):

            def watch(record: Any, number: int = number) -> None:
                seen[number] += record.rows[0].written

            scheduler.submit(input_ids=ids, seed=seed, streamer=streams[number], watcher=watch, **settings)
        scheduler.run()
    for request, stream, written in zip(requests, streams, seen, strict=True):
        expected = plain(model, *request)[0].tolist()
        assert torch.cat([put.flatten() for put in stream.puts]).tolist() == expected and stream.ends == 1
        assert written == expected[request[0].shape[1] :]


class Fails(StoppingCriteria):
    lookahead_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 24:
            raise RuntimeError("a rule of the caller's")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def enough(count: int) -> None:
    if count > 10:
        raise RuntimeError("enough")


def test_what_fails_fails_alone() -> None:
    model = tiny_model("llama")
    good = [(ids, settings | {"max_new_tokens": 30}, seed) for ids, settings, seed in asked(4)]
    ids = good[0][0]
    with Scheduler(model, 8) as scheduler:
        tickets = [submit(scheduler, *request) for request in good]
        broken = [
            submit(scheduler, ids, {"max_new_tokens": 40, "streamer": Puts(enough)}, 0),
            submit(scheduler, ids, {"max_new_tokens": 40, "stopping_criteria": [Fails()]}, 0),
            submit(scheduler, ids, {"max_new_tokens": 40, "num_beams": 3}, 0),
            submit(scheduler, torch.tensor([[VOCAB + 5]]), {"max_new_tokens": 4}, 0),
        ]
        scheduler.run()
    same(model, tickets, good)
    for ticket, expected in zip(broken, ("enough", "caller's", "beam", "outside the vocabulary"), strict=True):
        with pytest.raises(Exception, match=expected):
            ticket.result()


def test_logits_that_are_nan_end_their_row_alone() -> None:
    model = fresh_model("llama")
    model.get_input_embeddings().weight.data[40] = torch.nan
    good, bad = torch.tensor([[5, 6, 7]]), torch.tensor([[40]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [40]}
    with Scheduler(model, 2) as scheduler:
        tickets = [submit(scheduler, ids, settings, 0) for ids in (good, bad)]
        scheduler.run()
    assert tickets[0].result().tolist() == plain(model, good, settings, 0).tolist()
    refuses("NaN", tickets[1].result)


def test_what_is_cancelled_or_left_over_says_so() -> None:
    model = tiny_model("llama")
    requests = [(ids, {"max_new_tokens": 200, "do_sample": False}, 0) for ids, _, _ in asked(4)]
    scheduler = Scheduler(model, 2)
    tickets = [submit(scheduler, *request) for request in requests]
    refuses("not done yet", tickets[0].result)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    tickets[0].cancel()
    tickets[2].cancel()
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 0)
    scheduler.close()
    assert (scheduler.running, scheduler.waiting) == (0, 0)
    for ticket, word in zip(tickets, ("cancelled", "closed", "cancelled", "closed"), strict=True):
        refuses(word, ticket.result)


def test_what_cannot_share_passes_is_decoded_alone() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8]])
    several = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    heads = Medusa(fitted(model))
    with Scheduler(model, 3) as scheduler:
        tickets = [
            submit(scheduler, ids, several, 4),
            submit(scheduler, ids, {"do_sample": False, "max_new_tokens": 9, "lookahead_strategy": heads}, 0),
            submit(scheduler, ids, {"do_sample": False, "max_new_tokens": 9}, 0),
        ]
        scheduler.run()
    greedy = plain(model, ids, {"do_sample": False, "max_new_tokens": 9}, 0).tolist()
    assert tickets[0].result().tolist() == plain(model, ids, several, 4).tolist()
    assert tickets[1].result().tolist() == tickets[2].result().tolist() == greedy


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "zaya"])
def test_recurrent_models(name: str) -> None:
    """States join and leave with their rows, in trees; what takes one branch a pass is decoded alone."""
    check(hybrid(name), asked(5, longest=12), 3)


def test_refusals() -> None:
    model = tiny_model("llama")
    refuses("rows", Scheduler, model, 0)
    scheduler = Scheduler(model)
    refuses("custom_generate", scheduler.submit, input_ids=torch.tensor([[1]]), custom_generate="x")
    refuses("seed", scheduler.submit, input_ids=torch.tensor([[1]]), seed=1.5)
    refuses("Unknown strategy", Scheduler, model, strategy={"strategy": "x"})


@pytest.mark.parametrize("healed", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_what_needs_a_tokenizer(sampled: bool, healed: bool) -> None:
    """Stop strings, of a call and of the model's generation config, and token healing; the model stays as it was."""
    model, tokenizer = load_bundled()
    before = dict(vars(model))
    ids = tokenizer("def fibonacci(n", return_tensors="pt")["input_ids"]
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sampled, "token_healing": healed}
    first = plain(model, ids, settings | {"tokenizer": tokenizer}, 3)
    stop = tokenizer.decode(first[0, ids.shape[1] + 5 : ids.shape[1] + 8])
    given = settings | {"tokenizer": tokenizer, "stop_strings": [stop]}
    expected = plain(model, ids, given, 3)
    assert expected.shape[1] < first.shape[1]
    check(model, [(ids, given, 3)] * 3, 2)
    if not healed:  # heal_tokens generates itself, and has no tokenizer for stop strings of the config
        model.generation_config.stop_strings = stop
        check(model, [(ids, settings | {"tokenizer": tokenizer}, 3)] * 2, 2)
        model.generation_config.stop_strings = None
    assert vars(model) == before


def test_stop_strings_without_a_tokenizer() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7]])
    with Scheduler(model, 2) as scheduler:
        ticket = submit(scheduler, ids, {"max_new_tokens": 4, "stop_strings": ["a"]}, 0)
        scheduler.run()
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        ticket.result()

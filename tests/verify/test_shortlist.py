"""Draws that a list of the best logits decides: always what the whole vocabulary would have drawn, or nothing."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.devices import working_alone
from helpers.marks import built
from helpers.models import counting_model, prompts, same_as_plain, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from jacobi import Successors, TokenTree
from lookahead import Lookahead, Scheduler, _native
from lookahead.verify.noise import NoiseAt, NoiseLine
from lookahead.verify.shortlist import UNSURE, Shortlist

PLACES = 6


def warpers(rng: random.Random) -> LogitsProcessorList:
    made = LogitsProcessorList([TemperatureLogitsWarper(rng.choice([0.5, 0.8, 1.3]))] if rng.random() < 0.8 else [])
    if rng.random() < 0.6:
        made.append(TopKLogitsWarper(rng.choice([1, 2, 5, 20, 50, 300])))
    if rng.random() < 0.6:
        made.append(TopPLogitsWarper(rng.choice([0.1, 0.5, 0.8, 0.95, 0.999])))
    if rng.random() < 0.4:
        made.append(MinPLogitsWarper(rng.choice([0.02, 0.2, 1.0])))
    return made


def logits_of(rng: random.Random) -> torch.Tensor:
    """Sharp and flat ones, with ties as bfloat16 has them, and with what no logits should be."""
    found = torch.randn(PLACES, rng.choice([20, 70, 3000])) * rng.choice([0.5, 2.0, 5.0]) + rng.choice([0, 10, -40])
    if rng.random() < 0.3:
        found = (found * 4).round() / 4
    if rng.random() < 0.3:
        found = found.bfloat16().float()
    if rng.random() < 0.1:
        found[0, 0] = torch.inf
    if rng.random() < 0.1:
        found[1, : found.shape[1] - 9] = -torch.inf
    return found


def line_of(noise: torch.Tensor) -> NoiseLine:
    """Noise ``[place, vocab]``."""
    return NoiseLine(noise, torch.empty(0), noise.numpy().data)


def on_device(shortlist: Shortlist, logits: torch.Tensor, noise: torch.Tensor) -> list[tuple[int, int]]:
    """The choices of lists that a device makes, and Python where nothing is built in C."""
    at = NoiseAt({0: line_of(noise)}, [(row, 0) for row in range(len(noise))])
    return shortlist.unpacked(shortlist.listed(logits, at).numpy(), logits.shape[1])


def drawn(shortlist: Shortlist, logits: torch.Tensor, noise: torch.Tensor, listed: int = 0) -> list[tuple[int, int]]:
    """The choice at each place, by all that is known, of which so many best logits are ``listed``."""
    line, said = line_of(noise), None
    if listed:
        values, tokens = logits.float().topk(min(listed, logits.shape[1]))
        said = Successors(tokens.numpy(), values.numpy())
    if _native.speedups is None:
        return on_device(shortlist, logits.float(), noise)
    return [shortlist.path(logits, row, TokenTree(0), [line.view], row, said)[0] for row in range(len(noise))]


@pytest.mark.usefixtures("either_way")
@examples(400)
@given(st.integers(0, 1 << 30))
def test_what_is_sure_is_what_the_whole_vocabulary_draws(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    processors, logits = warpers(rng), logits_of(rng)
    noise = torch.empty_like(logits).exponential_()
    whole = (processors(torch.zeros(PLACES, 1, dtype=torch.long), logits).softmax(-1) / noise).argmax(-1)
    found = Shortlist.of(processors)
    assert found is not None
    listed = rng.choice([0, 6, 20, 64])
    narrow = logits.bfloat16() if logits.bfloat16().float().equal(logits) else logits
    made = [drawn(found, narrow, noise, listed)] if found.decides(waits=True) else []
    if found.top_k:
        made.append(on_device(found, logits, noise))
    for choices in map(np.array, made):
        sure = choices[:, 1] == 1
        assert set(choices[~sure, 1].tolist()) <= {UNSURE}
        assert choices[sure, 0].tolist() == whole[torch.from_numpy(sure)].tolist()


@built
@pytest.mark.parametrize("settings", [{"top_k": 20, "top_p": 0.8}, {"top_p": 0.8}, {"min_p": 0.05}, {}], ids=str)
def test_hardly_anything_is_unsure(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2000, 500) * 3
    for each in (logits, logits.bfloat16().float()):
        noise = torch.empty_like(each).exponential_()
        choices = drawn(Shortlist(temperature=0.7, **settings), each, noise)
        assert np.mean([sure == UNSURE for _, sure in choices]) < 0.02


@built
def test_a_token_that_is_not_listed_is_drawn_if_its_noise_is_small_enough() -> None:
    logits, noise = torch.linspace(3.0, -3.0, 500)[None], torch.ones(1, 500)
    noise[0, 300] = 0.001
    assert drawn(Shortlist(), logits, noise) == [(300, 1)]
    noise[0, 300] = 0.1
    assert drawn(Shortlist(), logits, noise) == [(0, 1)]
    noise[0, 301:303] = torch.tensor([0.001, 0.001 * math.exp(logits[0, 302] - logits[0, 301])])
    assert drawn(Shortlist(), logits, noise)[0][1] == UNSURE, "nobody can tell them apart"
    assert drawn(Shortlist(min_p=0.5), logits, noise) == [(0, 1)], "they are cut"


@built
@pytest.mark.parametrize("size", [40.540386, 300.0, 1e4])
@pytest.mark.parametrize("temperature", [0.1, 0.3, 0.8])
def test_large_logits_are_rounded_before_the_best_is_taken_off(size: float, temperature: float) -> None:
    """A second token at the very boundary of ``min_p`` or ``top_p``: plain decoding cuts it or not."""
    for share, warper in ((0.3, MinPLogitsWarper(0.3)), (0.1, TopPLogitsWarper(1.0 / 1.1))):
        processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), warper])
        found = Shortlist.of(processors)
        assert found is not None
        boundary = torch.tensor(size + math.log(share) * temperature)
        least = boundary.nextafter(boundary + 1.0) - boundary
        for step in range(-20, 21):
            logits, noise = torch.full((1, 300), size - 90.0 * temperature), torch.ones(1, 300)
            logits[0, :2], noise[0, 1] = torch.stack([torch.tensor(size), boundary + step * least]), 1e-4
            whole = (processors(torch.zeros(1, 1, dtype=torch.long), logits).softmax(-1) / noise).argmax(-1)
            token, sure = drawn(found, logits, noise)[0]
            assert sure == UNSURE or token == whole.item()


@built
def test_logits_that_give_no_probabilities_are_unsure() -> None:
    logits = torch.randn(1, 300)
    assert drawn(Shortlist(temperature=1e-38, top_k=5), logits, torch.ones(1, 300))[0][1] == UNSURE
    assert drawn(Shortlist(temperature=1e-38, min_p=0.1), logits, torch.ones(1, 300))[0][1] == UNSURE


@pytest.mark.usefixtures("either_way")
def test_the_drawn_example() -> None:
    """The example of the docstring."""
    logits, noise = torch.tensor([[5.1, 7.9, 9.0, 5.9, -1.0]]), torch.tensor([[1.0, 0.9, 0.8, 0.02, 1.0]])
    cut = drawn(Shortlist(top_k=3, top_p=0.9), logits, noise)
    assert cut == [(2, 1)]
    assert drawn(Shortlist(top_k=3), logits, noise) == [(3, 1)]


@pytest.mark.usefixtures("either_way")
def test_ties_that_nobody_can_tell_apart_are_unsure() -> None:
    noise = torch.tensor([[1.0, 0.001, 0.002, 1.0]])

    def of(values: list[float], **settings: Any) -> list[tuple[int, int]]:
        return drawn(Shortlist(**settings), torch.tensor([values]), noise)

    assert of([3.0, 2.0, 2.0, 1.0], top_k=2) == [(1, 1)], "top_k keeps both"
    assert of([3.0, 2.0, 2.0, 1.0], top_k=3, top_p=0.6)[0][1] == UNSURE, "top_p keeps one of them"
    assert of([2.0, 2.0, 2.0, 2.0], top_k=2)[0][1] == 1, "all there are"
    assert drawn(Shortlist(top_k=1), torch.zeros(1, 20), torch.rand(1, 20))[0][1] == UNSURE


def test_other_processors_have_no_list() -> None:
    top_k, top_p = TopKLogitsWarper(20), TopPLogitsWarper(0.8)
    for given_ in (
        [top_p, top_k],
        [top_k, top_k],
        [RepetitionPenaltyLogitsProcessor(1.1), top_k],
        [TopKLogitsWarper(20, min_tokens_to_keep=3), TopPLogitsWarper(0.8, min_tokens_to_keep=3)],
        [TopKLogitsWarper(20, filter_value=-9.0)],
        [TopKLogitsWarper(5000)],
    ):
        assert Shortlist.of(LogitsProcessorList(given_)) is None
    assert Shortlist.of(LogitsProcessorList([top_k, top_p])) == Shortlist(top_k=20, top_p=0.8)


@built
def test_a_path_goes_on_as_far_as_it_is_certain() -> None:
    """Node 0 draws 5, node 1 draws 6, node 2 is open, and node 3 would draw 8."""
    logits, noise = torch.zeros(4, 300), torch.ones(4, 1, 300)
    for node, token in enumerate((5, 6, 7, 8)):
        logits[node, token] = 9.0
    logits[2, 1] = 9.0
    lines = [each.numpy().data for each in noise]
    tree = TokenTree.chain(0, [5, 6, 7])
    for raw in (logits, logits.bfloat16(), logits.half()):
        path = Shortlist().path(raw, 0, tree, lines)
        assert path[:2] == [(5, 1), (6, 1)]
        assert [sure for _, sure in path[2:]] == [UNSURE]
        assert Shortlist().path(raw, 0, tree, lines[:1]) == [(5, 1)], "no more noise is known"
        assert Shortlist().path(raw, 0, TokenTree.chain(0, [4]), lines) == [(5, 1)], "it was not drafted"
        assert Shortlist().path(raw, 3, tree, lines) == [(8, 1)]
        assert Shortlist(top_k=1).path(raw, 0, tree, lines)[:2] == [(5, 1), (6, 1)], "lists are made on the way"
    values, tokens = logits.topk(16)
    said = Successors(tokens.numpy(), values.numpy())
    assert Shortlist(top_k=1).path(logits, 0, tree, lines, 0, said)[:2] == [(5, 1), (6, 1)]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How each choice ended."""
    ends: list[int] = []

    def note(name: str) -> None:
        method = getattr(Shortlist, name)

        def noted(self: Shortlist, *given_: Any) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = method(self, *given_)
            ends.extend(sure for _, sure in found)
            return found

        monkeypatch.setattr(Shortlist, name, noted)

    note("path")
    note("unpacked")
    return ends


SETTINGS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"temperature": 0.6, "top_k": 8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "eos_token_id": [5, 6, 30]},
]
WITHOUT_TOP_K: list[dict[str, Any]] = [
    {"top_k": 0},
    {"temperature": 0.6, "top_k": 0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 0, "min_p": 0.05, "eos_token_id": [5, 6, 30]},
]


@pytest.mark.usefixtures("augmented", "either_way")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS + WITHOUT_TOP_K, ids=str)
def test_texts_and_generator_are_plain_decodings(settings: dict[str, Any], batch: int, decided: list[int]) -> None:
    for model in (counting_model(sharpness=6.0), tiny_model("llama")):
        same_as_plain(model, prompts(batch), Lookahead(nodes=12), do_sample=True, max_new_tokens=30, **settings)
    assert 1 in decided or not Shortlist(top_k=settings["top_k"]).decides(waits=True)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("unsure", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_lists_that_a_device_made(
    settings: dict[str, Any], unsure: bool, decided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a list does not decide, the whole vocabulary does."""
    if unsure:
        choice = Shortlist._choice
        monkeypatch.setattr(Shortlist, "_choice", lambda *given_: (choice(*given_)[0], UNSURE))
    for batch in (1, 3) if not unsure else (1,):
        with working_alone():
            same_as_plain(
                tiny_model("llama"),
                prompts(batch),
                Lookahead(nodes=12),
                do_sample=True,
                max_new_tokens=30,
                **settings | {"eos_token_id": None},
            )
    assert decided.count(UNSURE if unsure else 1) > 20


@pytest.mark.usefixtures("either_way")
def test_rows_of_a_scheduler(decided: list[int]) -> None:
    model = tiny_model("llama")
    settings = {"do_sample": True, "max_new_tokens": 25, "top_k": 20, "top_p": 0.9}
    ids = [torch.tensor([[3, 4, 5, 6, 7, number]]) for number in range(3, 9)]
    with Scheduler(model, 3) as scheduler:
        tickets = [scheduler.submit(input_ids=each, seed=at, **settings) for at, each in enumerate(ids)]
        scheduler.run()
    assert decided.count(1) > 100
    for at, (each, ticket) in enumerate(zip(ids, tickets, strict=True)):
        torch.manual_seed(at)
        assert ticket.result().tolist() == model.generate(each, **settings).tolist()

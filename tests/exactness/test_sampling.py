"""Sampling: a seed draws plain decoding's text, and rejection keeps the model's distribution, of drawn drafts too."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import BLOCKS, STRATEGIES
from helpers.devices import working_alone
from helpers.distributions import SMALL_VOCAB, drawn_by_the_model, small_model
from helpers.eagle import random_network
from helpers.graphs import counting
from helpers.marks import few
from helpers.medusa import random_heads
from helpers.models import VOCAB, counting_model, fresh_model, prompts, run, same_as_plain, successor_model, tiny_model
from helpers.mtp import mimo, written
from helpers.redrafter import random_head

from lookahead import Jacobi, Lookahead
from lookahead.draft import memory
from lookahead.eagle import Eagle, EagleHead
from lookahead.medusa import Medusa
from lookahead.mtp import Mtp
from lookahead.redrafter import ReDrafter

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("strategy", [*STRATEGIES[1:], Jacobi(), Jacobi(mode="jacobi", block_size=None), *BLOCKS])
def test_sampling_with_any_strategy(strategy: Any) -> None:
    """Drafts have no influence on draws."""
    for batch in (1, 4):
        settings = {"max_new_tokens": 40, "do_sample": True, "output_scores": True}
        same_as_plain(counting_model(sharpness=6.0), prompts(batch), strategy, **settings)


@pytest.mark.usefixtures("batches_draft")
@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
def test_sampled_rows_end(recorded: bool) -> None:
    """Noise is drawn once for each index that plain decoding reaches, however early a row ends or runs ahead."""
    accepted = 0
    for seed in range(10):
        settings = {"max_new_tokens": 40, "do_sample": True, "seed": seed, "eos_token_id": [30, 31, 32]}
        settings |= {"output_scores": recorded}
        output = same_as_plain(counting_model(sharpness=6.0), prompts(4), **settings)
        accepted += output.stats.accepted
    assert accepted > 100


def test_a_sampled_row_runs_far_ahead() -> None:
    """One row is as good as certain, the others are noise: the first has to wait for them, and for their draws."""
    model = successor_model({token: token % 7 + 1 for token in range(8)}, sharpness=20.0, free=8)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]])
    output = same_as_plain(
        model, {"input_ids": ids}, Lookahead(window_size=7, seed=0), max_new_tokens=150, do_sample=True
    )
    assert output.sequences[0, 6:].max() <= 7
    assert output.sequences[1:].min() >= 8
    assert output.stats.mean_acceptance_length > 1.1
    settings = {"max_new_tokens": 150, "do_sample": True, "eos_token_id": 40, "seed": 1}
    same_as_plain(model, {"input_ids": ids}, Lookahead(window_size=7, seed=0), **settings)


_WINDOW: dict[str, Any] = {"window_size": 4, "ngram_size": 4, "verification_set_size": 5}
_SAMPLED = {
    "rejection": Lookahead(**_WINDOW, verification="rejection", seed=2),
    "exact": Lookahead(**_WINDOW, seed=2),
    "noise": Lookahead(nodes=12, seed=2),
}


@pytest.mark.parametrize("strategy", _SAMPLED.values(), ids=list(_SAMPLED))
@pytest.mark.parametrize("alone", few([True, False], False), ids=["alone", "batch"])
def test_samples_follow_the_model(strategy: Any, alone: bool) -> None:
    """Three drafted tokens have the joint distribution that the model gives them."""
    samples = 500 if alone else 2000
    assert drawn_by_the_model(strategy, samples, 1 if alone else 250) > samples / 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("alone", [False, True], ids=["host", "device"])
def test_drafts_see_the_noise(batch: int, alone: bool) -> None:
    """Where all tokens are equally likely, noise alone decides, and drafts that see it are right."""
    model = successor_model({})
    same_as_plain(model, prompts(batch), Lookahead(), do_sample=True, max_new_tokens=4)  # with the self-test
    with working_alone() if alone else nullcontext():
        settings = {"do_sample": True, "max_new_tokens": 60, "top_k": 0, "temperature": 1.3}
        output = same_as_plain(model, prompts(batch), Lookahead(nodes=12, seed=0), **settings)
    assert output.stats.by_noise > 0.8 * output.stats.accepted, "of 48 tokens, one is called the likeliest"
    assert "thanks to the noise" in output.stats.explain()
    assert output.stats.steps < 60 / 3, "without noise it is one token in 48 that is right"


def test_drafts_that_see_the_noise_are_believed_at_any_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counting(monkeypatch, memory, "Acceptance")
    for sample in (False, True):
        for verification in ("exact", "rejection"):
            strategy = Lookahead(remember=False, verification=verification)
            settings = {"do_sample": sample, "temperature": 1.5 if sample else None, "max_new_tokens": 4}
            run(tiny_model("llama"), prompts(1), lookahead_strategy=strategy, use_lookahead=True, **settings)
    greedy, also_greedy, seeing, blind = (trust for _, trust in made)
    assert greedy == also_greedy == seeing
    assert blind < seeing / 2


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "strategy",
    [Lookahead(nodes=12), Lookahead(window_size=4, ngram_size=3), Jacobi(), "heads", "eagle", "redrafter", "draft"],
    ids=["automatic", "window", "jacobi", "heads", "eagle", "redrafter", "draft"],
)
def test_tokens_that_cannot_be_fed_are_not_drafted(strategy: Any, sampled: bool) -> None:
    """An output layer may score more tokens than the embeddings have; a call that excludes these can be decoded."""
    model = fresh_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.lm_head = torch.nn.Linear(model.config.hidden_size, 88, bias=False, dtype=model.dtype)
        torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    if strategy == "heads":
        strategy = Medusa(random_heads(model))
    if strategy == "eagle":
        strategy = Eagle(EagleHead(random_network(1)), tree="eagle-1")
    if strategy == "redrafter":
        strategy = ReDrafter(random_head(vocab_size=88), tree="beam")
    if strategy == "draft":
        strategy = Lookahead(draft_model=model, sources=("draft",), nodes=8)
    excluded = list(range(VOCAB, 88))
    same_as_plain(model, prompts(2), strategy, do_sample=sampled, max_new_tokens=30, suppress_tokens=excluded)


def strategies(vocab: int = SMALL_VOCAB) -> dict[str, Any]:
    head, recurrent = EagleHead(random_network(1)), random_head(vocab_size=vocab)
    draft = fresh_model("llama", seed=5, vocab_size=vocab, num_hidden_layers=1, initializer_range=0.2)
    how: Any = {"verification": "rejection"}
    return {
        "eagle-1": Eagle(head, tree="eagle-1", **how),
        "eagle-2": Eagle(head, tree="eagle-2", top_k=3, depth=2, total_tokens=10, **how),
        "eagle": Eagle(head, sources=("eagle",), nodes=6, **how),
        "redrafter": ReDrafter(recurrent, sources=("redrafter",), nodes=6, **how),
        "beams": ReDrafter(recurrent, tree="beam", beam_width=3, beam_length=4, **how),
        "draft model": Lookahead(draft_model=draft, sources=("draft",), nodes=6, **how),
    }


QUICK = ("eagle-1", "redrafter")


@pytest.mark.parametrize("kind", few([*strategies()], *QUICK))
def test_samples_of_drawn_candidates_follow_the_model(kind: str) -> None:
    samples, temperature = 1000, 0.7 if kind in QUICK else 1.0
    accepted = drawn_by_the_model(strategies()[kind], samples, 250, temperature)
    assert accepted > samples / 2, "six tokens of the vocabulary are soon guessed"


@pytest.mark.slow
def test_samples_of_mtp_layers_follow_the_model(tmp_path: Path) -> None:
    model = small_model()
    folder = written(tmp_path / "layers", model, mimo(model, prefix="mtp_layers"))
    strategy = Mtp(folder, sources=("mtp",), nodes=6, verification="rejection")
    assert drawn_by_the_model(strategy, 1500, 250) > 750


def test_greedy_texts_are_plain() -> None:
    """Without sampling nothing is drawn, neither tokens nor candidates."""
    for strategy in strategies(VOCAB).values():
        if isinstance(strategy, Lookahead):
            strategy = Lookahead(draft_model=1, sources=("draft",), nodes=6, verification="rejection")
        same_as_plain(tiny_model("llama"), prompts(2), strategy, max_new_tokens=16)


def test_a_seed_repeats_the_call() -> None:
    """Candidates are drawn by the generator that everybody seeds, so that no two calls have the same by mistake."""
    strategy = strategies(VOCAB)["redrafter"]
    settings = {
        "max_new_tokens": 20,
        "do_sample": True,
        "lookahead_strategy": strategy,
        "return_dict_in_generate": True,
    }
    first, again, other = (run(tiny_model("llama"), prompts(2), seed=seed, **settings)[0] for seed in (3, 3, 4))
    assert first.sequences.tolist() == again.sequences.tolist() != other.sequences.tolist()
    assert first.stats.drafted == again.stats.drafted > 40

"""Sampling: a seed draws plain decoding's text, and rejection keeps the model's distribution."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.calls import BLOCKS, STRATEGIES
from helpers.devices import working_alone
from helpers.distributions import drawn_by_the_model
from helpers.eagle import random_network
from helpers.marks import few
from helpers.medusa import random_heads
from helpers.models import VOCAB, counting_model, fresh_model, prompts, run, same_as_plain, successor_model, tiny_model
from helpers.redrafter import random_head

from lookahead import Jacobi, Lookahead
from lookahead.draft.acceptance import Acceptance
from lookahead.eagle import Eagle, EagleHead
from lookahead.medusa import Medusa
from lookahead.redrafter import ReDrafter

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("strategy", [*STRATEGIES[1:], Jacobi(), Jacobi(mode="jacobi", block_size=None), *BLOCKS])
def test_sampling_with_any_strategy(strategy: Any) -> None:
    """Drafts have no influence on draws."""
    for batch in (1, 4):
        same_as_plain(
            counting_model(sharpness=6.0),
            prompts(batch),
            strategy,
            max_new_tokens=40,
            do_sample=True,
            output_scores=True,
        )


@pytest.mark.usefixtures("batches_draft")
@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
def test_sampled_rows_end(recorded: bool) -> None:
    """Noise is drawn once for each index that plain decoding reaches, however early a row ends or runs ahead."""
    accepted = 0
    for seed in range(10):
        output = same_as_plain(
            counting_model(sharpness=6.0),
            prompts(4),
            max_new_tokens=40,
            do_sample=True,
            seed=seed,
            eos_token_id=[30, 31, 32],
            output_scores=recorded,
        )
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
    same_as_plain(
        model,
        {"input_ids": ids},
        Lookahead(window_size=7, seed=0),
        max_new_tokens=150,
        do_sample=True,
        eos_token_id=40,
        seed=1,
    )


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


def test_greedy_rejection_is_greedy() -> None:
    """Without sampling there is nothing to reject."""
    same_as_plain(tiny_model("llama"), prompts(3), Lookahead(verification="rejection"), max_new_tokens=30)


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
    trusts: list[float] = []

    def noted(sources: Any, trust: float) -> Acceptance:
        trusts.append(trust)
        return Acceptance(sources, trust)

    monkeypatch.setattr("lookahead.draft.memory.Acceptance", noted)
    for sample in (False, True):
        for verification in ("exact", "rejection"):
            strategy = Lookahead(remember=False, verification=verification)
            settings = {"do_sample": sample, "temperature": 1.5 if sample else None, "max_new_tokens": 4}
            run(tiny_model("llama"), prompts(1), lookahead_strategy=strategy, use_lookahead=True, **settings)
    greedy, also_greedy, seeing, blind = trusts
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

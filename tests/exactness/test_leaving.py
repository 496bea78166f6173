"""Sequences that have ended leave the passes of a batch, and the others write on as if nothing had happened."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.automatic import memory_of
from helpers.drafting import TableSource
from helpers.marks import few
from helpers.models import MODELS, fresh_model, prompts, run, same_as_plain, same_tokens, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from jacobi import Scores, Successors
from lookahead import Jacobi, Lookahead
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.scores import scores_of_all
from lookahead.runtime.tracing import schedule

pytestmark = pytest.mark.usefixtures("augmented", "batches_draft", "passes_count")

ENDS = [3, 17, 29, 41]
STRATEGIES = {
    "automatic": Lookahead(),
    "fixed": Lookahead(nodes=7),
    "published": Lookahead(window_size=4, ngram_size=4, verification_set_size=3, seed=0),
    "jacobi": Jacobi(),
}


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sequences passes went on with, each time some had left."""
    seen: list[int] = []
    before = TreeForward.follow

    def follow(forward: TreeForward, batch: int) -> None:
        seen.append(batch)
        before(forward, batch)

    monkeypatch.setattr(TreeForward, "follow", follow)
    yield seen


def same_text(model: Any, inputs: dict[str, Any], strategy: Any, **settings: Any) -> None:
    """Assert that sequences that end one after the other are plain decoding's."""
    same_tokens(model, inputs, strategy, **{"max_new_tokens": 40, "eos_token_id": ENDS} | settings)


@pytest.mark.parametrize("name", few(MODELS, "llama", "gpt2", "gemma3", "mixtral"))
def test_texts_are_plain_decodings(name: str, followed: list[int]) -> None:
    """In ragged batches, past windows and depth limits, greedy and sampled, whatever drafts."""
    model = tiny_model(name)
    for number, strategy in enumerate(STRATEGIES.values()):
        for batch, settings in ((8, {}), (3, {"do_sample": True, "top_p": 0.9}), (8, {"repetition_penalty": 1.3})):
            same_text(model, prompts(batch, seed=number), strategy, **settings)
    assert set(followed) >= {1, 2, 4} or len(followed) > 8


@examples(20)
@given(
    batch=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    ends=st.lists(st.integers(1, 47), min_size=1, max_size=5, unique=True),
    name=st.sampled_from(sorted(STRATEGIES)),
    settings=st.sampled_from([{}, {"do_sample": True}, {"do_sample": True, "temperature": 1.7, "top_k": 9}]),
)
def test_random_batches(batch: int, seed: int, ends: list[int], name: str, settings: dict[str, Any]) -> None:
    same_text(tiny_model("llama"), prompts(batch, seed=seed), STRATEGIES[name], eos_token_id=ends, **settings)


def test_half_of_them_leave_at_a_time(followed: list[int]) -> None:
    """A sequence's keys and values are moved at most as often as the batch halves."""
    for seed in range(6):
        followed.clear()
        same_text(tiny_model("llama"), prompts(16, seed=seed), Lookahead(nodes=3), max_new_tokens=60)
        assert followed and followed == sorted(followed, reverse=True)
        assert all(2 * after <= before for before, after in zip([16, *followed], followed, strict=False))


class Alone(LogitsProcessor):
    """A user's own: it is shown the whole batch, as plain decoding shows it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores) == 8
        return scores + 0.01 * (input_ids[:, -1:] % 3 == 0)


def test_they_stay_where_they_are_asked_about(followed: list[int]) -> None:
    """Where the cache or scores are returned, or a user's processor sees all sequences."""
    model, inputs = tiny_model("llama"), prompts(8)
    same_as_plain(model, inputs, Lookahead(), max_new_tokens=40, eos_token_id=ENDS, output_scores=True)
    same_text(model, inputs, Lookahead(), logits_processor=LogitsProcessorList([Alone()]))
    assert not followed


def test_each_number_of_sequences_has_traces_and_a_curve(monkeypatch: pytest.MonkeyPatch, followed: list[int]) -> None:
    monkeypatch.setattr(schedule, "_COST", 4.0)
    monkeypatch.setattr(schedule, "_COMPARED", 0.0)
    model = fresh_model("llama")
    for seed in range(12):
        same_text(model, prompts(8, seed=seed), Lookahead(), max_new_tokens=60)
    left = set(followed)
    made = {kind.batch for traces in schedule._kept.of(model) for kind in traces.made}
    assert {8} < made <= {8} | left, "and passes went on over them"
    assert {key[0] for key in memory_of(model).times} == {8} | left


def test_what_a_pass_says_is_put_in_its_place() -> None:
    logits = torch.arange(12.0).view(2, 2, 3)
    best = [Successors(*(logits[row].numpy() for _ in range(2))) for row in range(2)]
    scores = scores_of_all(Scores(logits, [[1, 2], [0, 1]], frozenset({(0, 1)}), best), (3, 1), 5)
    assert scores.logits.shape == (5, 2, 3) and len(scores.greedy) == len(scores.successors or ()) == 5
    assert torch.equal(scores.logits[3], logits[0]) and torch.equal(scores.logits[1], logits[1])
    assert (scores.greedy[3], scores.greedy[1]) == ([1, 2], [0, 1])
    assert scores.broken == {(3, 1)}
    assert scores.successors is not None and scores.successors[1] is best[1]


def test_nan_is_told_of_the_sequence_that_has_it(followed: list[int]) -> None:
    """By its number in the call, though others have left."""
    model, settings = fresh_model("llama"), {"do_sample": False, "max_new_tokens": 40, "eos_token_id": ENDS}
    in_step = Lookahead(sources=(lambda row: TableSource("nothing", {}),))
    for seed in range(20):  # until a sequence writes on alone, and then a token that was nowhere before
        text, _ = run(model, prompts(4, seed=seed), **settings)
        lengths = (text[:, 12:] != 0).sum(1).tolist()
        last, most = lengths.index(max(lengths)), max(lengths)
        bad = int(text[last, 12 + most - 2])
        if sorted(lengths)[2] + 3 < most and bad not in text[:, : 12 + most - 2]:
            break
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    with pytest.raises(ValueError, match=rf"NaN at step {most} \(row {last}, token {most}\)"):
        run(model, prompts(4, seed=seed), lookahead_strategy=in_step, **settings)
    assert followed

"""Statistics of whole calls add up, and trajectories hold every pass."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.models import counting_model, prompts, run, same_as_plain, tiny_model

from lookahead import Jacobi, Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("eos", [None, 6, [1, 2, 3, 25, 26]], ids=["none", "one", "many"])
@pytest.mark.parametrize(("batch", "sample"), [(1, True), (4, False)])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_stats_add_up(sample: bool, batch: int, eos: Any, together: bool) -> None:
    """Emitted tokens are those of every row up to its end, pads not counted; every other count fits to them."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    settings = {"pad_token_id": 7, "max_new_tokens": 33, "eos_token_id": eos, "do_sample": sample}
    if together:  # a processor that is not known has to see all rows at the same time
        settings["logits_processor"] = [lambda input_ids, scores: scores]
    for model in (counting_model(), tiny_model("llama")):
        for recorded in (False, True):  # with scores, finished rows are fed pads, which do not count
            output = same_as_plain(
                model,
                prompts(batch),
                Lookahead(window_size=7, seed=0, stats="detailed"),
                output_scores=recorded,
                **settings,
            )
            stats, rows = output.stats, output.sequences[:, 12:].tolist()
            lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
            assert stats.emitted == sum(lengths)
            assert stats.emitted == sum(tokens * count for tokens, count in stats.histogram.items())
            assert stats.row_steps == sum(stats.histogram.values())
            assert stats.accepted == stats.emitted - stats.row_steps
            assert stats.accepted <= stats.drafted
            assert stats.steps == len(stats.passes)
            assert max(lengths) / max(stats.histogram) <= stats.steps <= max(lengths)
            assert stats.mean_acceptance_length == stats.emitted / stats.row_steps
            assert stats.passes[0]["nodes"] == [1] * batch


@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_a_draft_of_pads_does_not_count(together: bool, recorded: bool) -> None:
    """Rows end inside a block, and their trees go on with what happens to be the pad token."""
    inputs = {"input_ids": torch.tensor([[(start + at) % 7 + 1 for at in range(15)] for start in (0, 2, 3)])}
    processors = [lambda input_ids, scores: scores] if together else []
    output = same_as_plain(
        counting_model(),
        inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])},
        Lookahead(window_size=7, seed=0),
        max_new_tokens=30,
        eos_token_id=6,
        pad_token_id=7,
        logits_processor=processors,
        output_scores=recorded,
    )
    rows = output.sequences[:, 15:].tolist()
    assert [row.index(6) for row in rows] == [4, 2, 1]
    assert output.stats.emitted == 5 + 3 + 2
    assert output.stats.accepted == output.stats.emitted - output.stats.row_steps


def test_how_much_is_counted(passes: Callable[[Any], list[int]]) -> None:
    """``none`` counts nothing, ``summary`` sums up, ``detailed`` keeps every pass; the text is the same."""
    model = tiny_model("llama")
    outputs = {
        kind: same_as_plain(model, prompts(1), Lookahead(window_size=7, seed=0, stats=kind), max_new_tokens=20)
        for kind in ("none", "summary", "detailed")
    }
    assert outputs["none"].stats is None
    assert outputs["summary"].stats.passes == []
    counted = outputs["detailed"].stats
    assert counted.steps == outputs["summary"].stats.steps
    seen = passes(model)
    settings = {"lookahead_strategy": Lookahead(window_size=7, seed=0, stats="detailed"), "max_new_tokens": 20}
    settings |= {"return_dict_in_generate": True}
    again, _ = run(model, prompts(1), **settings)
    assert seen[0] == 12
    assert seen[1:] == [step["nodes"][0] for step in again.stats.passes[1:]]
    assert len(seen) == counted.steps


def test_trajectories() -> None:
    """A Jacobi decode shows every iterate; the last ones are the text."""
    strategy = Jacobi(mode="jacobi", block_size=None, return_trajectory=True, seed=0)
    output = same_as_plain(tiny_model("llama"), prompts(2), strategy, max_new_tokens=15)
    assert len(output.trajectories) == 2
    for row, iterates in enumerate(output.trajectories):
        text = output.sequences[row, 12:].tolist()
        assert len(iterates[0]) == 13, "all but the first token, which the prompt gives, and the last, which is carried"
        assert all(len(after) < len(before) for before, after in pairwise(iterates))
        for before, after in pairwise(iterates):
            fixed = len(before) - len(after)
            assert before[: fixed - 1] == text[14 - len(before) :][: fixed - 1]
    plain = same_as_plain(tiny_model("llama"), prompts(2), Jacobi(), max_new_tokens=15)
    assert plain.trajectories is None


def test_ended_rows_are_fed_no_more_than_they_need() -> None:
    """Rows that have ended neither widen the passes of the others nor draft where nobody reads them."""
    model, rows = counting_model(), prompts(3)
    for processors in ([], [lambda ids, scores: scores]):
        settings = {"eos_token_id": 6, "pad_token_id": 7, "max_new_tokens": 60, "logits_processor": processors}
        strategy = Lookahead(window_size=1, ngram_size=1, verification_set_size=0, stats="detailed")
        output = model.generate(**rows, **settings, lookahead_strategy=strategy, return_dict_in_generate=True)
        nodes = [count for record in output.stats.passes for count in record["nodes"]]
        live = [record for record in output.stats.passes if any(record["tokens"])]
        assert max(count for record in live for count in record["nodes"]) == 1, nodes

"""Scores and logits that a call returns are those of plain decoding."""

import pytest
from helpers.marks import BATCH_AND_SAMPLE
from helpers.models import MODELS, VOCAB, prompts, same_as_plain, tiny_model

from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", MODELS)
def test_scores_logits_and_cache(name: str, batch: int, sample: bool) -> None:
    """One [batch, vocab] for each index; the cache holds all but the last token, in plain decoding's layers."""
    output = same_as_plain(
        tiny_model(name), prompts(batch), max_new_tokens=20, do_sample=sample, output_scores=True, output_logits=True
    )
    assert len(output.scores) == len(output.logits) == 20
    assert output.scores[0].shape == (batch, VOCAB)
    assert output[CACHE].get_seq_length() == 12 + 20 - 1


@pytest.mark.parametrize("kind", ["output_scores", "output_logits"])
def test_one_kind_of_scores(kind: str) -> None:
    """Only what is asked for is returned."""
    output = same_as_plain(tiny_model("llama"), prompts(3), max_new_tokens=9, repetition_penalty=1.3, **{kind: True})
    assert (output.scores is None) == (kind == "output_logits")
    assert (output.logits is None) == (kind == "output_scores")

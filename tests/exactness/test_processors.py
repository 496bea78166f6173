"""Logits processors and warpers: each sees the true prefix, and the text is plain decoding's."""

from typing import Any

import pytest
import torch
import transformers
from helpers.calls import Recorder, allowed_tokens
from helpers.graphs import counting
from helpers.marks import few
from helpers.models import counting_model, prompts, run, same_as_plain, tiny_model
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size_1": {"no_repeat_ngram_size": 1, "max_new_tokens": 20},
    "min_length": {"min_length": 25, "eos_token_id": list(range(1, 20))},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(1, 20))},
    "bad_words": {"bad_words_ids": [[3], [4, 5], [18, 4, 12], [7, 7]]},
    "forced_eos": {"forced_eos_token_id": [5], "eos_token_id": 5},
    "forced_eos_in_the_middle": {"forced_eos_token_id": 6, "max_length": 20, "max_new_tokens": None},
    "forced_bos": {"forced_bos_token_id": 9},
    "prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
    "sequence_bias": {"sequence_bias": [[[18], 4.0], [[4, 12], -10.0], [[2, 3, 4], 6.0]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 11},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 1},
    "suppress": {"suppress_tokens": [3, 4, 18], "begin_suppress_tokens": [8, 25]},
    "remove_invalid": {"remove_invalid_values": True, "renormalize_logits": True},
    "guidance": {"guidance_scale": 1.7},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 3.0, "seeding_scheme": "lefthash"}},
    "many": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4]],
        "min_new_tokens": 6,
        "eos_token_id": [5, 6, 7],
    },
}


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1},
    "prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5, "temperature": 0.5},
    "synthid": {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
}


@pytest.mark.parametrize("batch", few([1, 3], 3))
@pytest.mark.parametrize("name", GREEDY)
def test_processors(name: str, batch: int) -> None:
    """Greedy, on a chaotic text and on one that repeats itself, where whole blocks are accepted."""
    settings = {"max_new_tokens": 30, "output_scores": True, "output_logits": True} | GREEDY[name]
    same_as_plain(tiny_model("llama"), prompts(batch), **settings)
    same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)


@pytest.mark.parametrize("batch", few([1, 3], 3))
@pytest.mark.parametrize("name", SAMPLED)
def test_warpers(name: str, batch: int) -> None:
    """Sampled: the same draws from the same, warped distributions."""
    settings = {"max_new_tokens": 30, "output_scores": True, "do_sample": True} | SAMPLED[name]
    same_as_plain(tiny_model("llama"), prompts(batch), **settings)
    same_as_plain(counting_model(sharpness=6.0), prompts(batch), **settings)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("repetitive", [False, True])
def test_a_processor_sees_the_true_prefix(repetitive: bool, batch: int, sample: bool) -> None:
    """Every call shows exactly the text so far, in order, as in plain decoding; never a draft."""
    model = counting_model(sharpness=9.0) if repetitive else tiny_model("llama")
    kept: list[Recorder] = []

    def new() -> LogitsProcessorList:
        kept.append(Recorder())
        return LogitsProcessorList([kept[-1]])

    # Row 0 ends first, the others go on: finished rows are shown padded.
    text = run(model, prompts(batch), max_new_tokens=30, logits_processor_new=new, do_sample=sample)[0]
    kept.clear()
    settings = {"max_new_tokens": 30, "logits_processor_new": new}
    settings |= {"eos_token_id": None if repetitive else int(text[0, 30]), "do_sample": sample, "output_scores": True}
    settings |= {"output_logits": True}
    output = same_as_plain(model, prompts(batch), Lookahead(window_size=7, seed=0), **settings)
    plain, ours = kept
    assert ours.calls == plain.calls
    assert ours.calls[0] == prompts(batch)["input_ids"].tolist()
    assert ours.calls[-1] == output.sequences[:, :-1].tolist()
    assert not repetitive or output.stats.mean_acceptance_length > 2


@pytest.mark.parametrize("ignored", [None, 3, 100], ids=["whole", "after the prompt", "never"])
def test_sequences_of_any_lengths_are_asked_about_together(
    ignored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty looks at which tokens a text has; a shorter text is padded with a token of its own, but where that
    could lie behind what is ignored."""
    asked = counting(monkeypatch, RepetitionPenaltyLogitsProcessor, "__call__")
    for model in (counting_model(sharpness=9.0), tiny_model("llama")):
        output = same_as_plain(
            model,
            prompts(4),
            Lookahead(nodes=6, seed=0),
            max_new_tokens=40,
            logits_processor_new=lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.05, ignored)]),
        )
        ours = [len(scores) for _, _, scores in asked[40:]]  # plain decoding comes first
        asked.clear()
        assert sum(ours) > 2 * len(ours) or ignored is not None
    assert output.stats.steps


def test_a_processor_that_keeps_its_input() -> None:
    """What a processor was shown does not change under its hands afterwards."""
    shown: list[tuple[Tensor, list[list[int]]]] = []

    def keep(input_ids: Tensor, scores: Tensor) -> Tensor:
        shown.append((input_ids, input_ids.tolist()))
        return scores

    for batch in (1, 3):
        same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, logits_processor=[keep])
    assert all(ids.tolist() == then for ids, then in shown)


def test_the_callers_ids_are_never_written() -> None:
    """Nor are the mask, the prompt's list of processors or the config."""
    inputs = prompts(3)
    before = {name: value.clone() for name, value in inputs.items()}
    config = GenerationConfig(max_new_tokens=20, eos_token_id=4, use_lookahead=True)
    settings = config.to_dict()
    processors = LogitsProcessorList([Recorder()])
    tiny_model("llama").generate(**inputs, generation_config=config, logits_processor=processors)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert config.to_dict() == settings
    assert len(processors) == 1


def test_generate_inside_a_processor() -> None:
    """An inner call, with lookahead or without, on the same model or another, disturbs nothing."""
    model = tiny_model("llama")
    inner = [run(m, prompts(1, 6), max_new_tokens=6)[0].tolist() for m in (model, tiny_model("mistral"))]

    def nested(input_ids: Tensor, scores: Tensor) -> Tensor:
        for other, expected in zip((model, tiny_model("mistral")), inner, strict=True):
            for asked in ({"use_lookahead": True}, {}):
                assert other.generate(**prompts(1, 6), max_new_tokens=6, do_sample=False, **asked).tolist() == expected
        return scores

    for batch in (1, 2):
        same_as_plain(model, prompts(batch), max_new_tokens=8, logits_processor=[nested])

"""Medusa: the text is plain decoding's, with every setting of ``generate``."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.marks import few
from helpers.medusa import COMBINED, counting, fitted, flat, random_heads
from helpers.models import VOCAB, prompts, run, same_as_plain, tiny_model
from helpers.streaming import Puts
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

import lookahead
from lookahead.medusa import Medusa, MedusaHeads
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")
SMALL = [[0, 0, 0], [0, 1], [1, 0], [2], [3]]
SAMPLED = [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 8}]
KINDS: dict[str, Callable[[MedusaHeads], Medusa]] = {
    "published": lambda heads: Medusa(heads),
    "paths": lambda heads: Medusa(heads, SMALL),
    "dense": lambda heads: Medusa(heads, [3, 2, 1]),
    "static": lambda heads: Medusa(heads, SMALL, static=True),
    "combined": lambda heads: Medusa(heads, sources=COMBINED, tuning=flat(), seed=0),
    "fixed size": lambda heads: Medusa(heads, sources=("recycling", "heads", "pool"), nodes=20, seed=0),
    "heads alone": lambda heads: Medusa(heads, sources=("heads",), tuning=flat(), seed=0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", few(SAMPLED, SAMPLED[0], SAMPLED[2]), ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_decodings_text(batch: int, settings: dict[str, Any], kind: str) -> None:
    """Heads that are wrong, untrained, fitted and right; alone and in a left-padded batch."""
    llama = tiny_model("llama")
    for model, heads in (
        (llama, random_heads(llama)),
        (llama, MedusaHeads.for_model(llama, 3)),
        (llama, random_heads(llama, own_output=True)),
        counting(3, sharpness=6.0),
    ):
        output = same_as_plain(model, prompts(batch), KINDS[kind](heads), max_new_tokens=24, **settings)
        assert output.stats.emitted == 24 * batch


OTHERS = ["gpt2", "mistral", "qwen2_mixed", "gemma2", "gemma3", "cohere2", "phi3", "llama4"]


@pytest.mark.parametrize("name", few(OTHERS, "gpt2", "gemma3", "llama4"))
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_other_models(name: str, sample: bool) -> None:
    """Tied and scaled output layers, sliding windows, learned positions that end soon."""
    model = tiny_model(name)
    heads = random_heads(model, 2)
    for kind in ("published", "combined"):
        same_as_plain(model, prompts(3), KINDS[kind](heads), max_new_tokens=20, do_sample=sample)
    room = getattr(model.config, "n_positions", 64) - 12
    same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=min(room, 52), do_sample=sample)


@pytest.mark.parametrize("seed", few(range(8), 0, 1, 2))
def test_seeds(seed: int) -> None:
    """Fitted heads, so that much is accepted; sampled texts are those of plain decoding, seed for seed."""
    model = tiny_model("gpt2")
    heads = fitted(model)
    for kind in ("published", "combined"):
        output = same_as_plain(
            model, prompts(2, seed=seed), KINDS[kind](heads), max_new_tokens=24, do_sample=True, top_k=3, seed=seed
        )
        assert output.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_in_another_dtype(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    heads = random_heads(model).to(dtype)
    same_as_plain(model, prompts(2), Medusa(heads, SMALL), max_new_tokens=20)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": [3, 5]},
        {"suppress_tokens": [1, 4], "do_sample": True, "top_p": 0.7},
        {"repetition_penalty": 1.2, "do_sample": True, "temperature": 1.4},
        {"output_scores": True, "output_logits": True},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 17},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", few([1, 3], 3))
def test_settings_of_generate(batch: int, settings: dict[str, Any]) -> None:
    for model, heads in (counting(3), (tiny_model("llama"), random_heads(tiny_model("llama")))):
        for kind in ("published", "combined"):
            length = {} if "max_length" in settings else {"max_new_tokens": 24}
            same_as_plain(model, prompts(batch), KINDS[kind](heads), **length | settings)


@pytest.mark.parametrize("batch", [1, 4])
def test_end_tokens_inside_a_path(batch: int) -> None:
    """Rows end one after another, each inside what its pass accepts."""
    model, heads = counting(4)
    for end in ([2], [5], [7, 3], [1]):
        for recorded in (False, True):
            output = same_as_plain(
                model, prompts(batch), Medusa(heads), max_new_tokens=30, eos_token_id=end, output_scores=recorded
            )
            new = output.sequences[:, 12:].tolist()
            ends = [min([line.index(token) + 1 for token in end if token in line]) for line in new]
            assert output.stats.emitted == sum(ends)


@pytest.mark.parametrize("batch", [1, 3])
def test_stop_strings(batch: int, tokenizer: PreTrainedTokenizerFast) -> None:
    model, heads = counting(4)
    for strings in ("fga", ["cd", "ga"]):
        settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 24, "eos_token_id": 40}
        for strategy in (Medusa(heads), Medusa(heads, acceptance="typical")):
            same_as_plain(model, prompts(batch), strategy, **settings)


class Even(LogitsProcessor):
    """A processor of the user's own, which looks at the whole batch: what the other rows wrote last is excluded."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(len(scores)):
            others = [other for other in range(len(scores)) if other != row]
            scores[row, input_ids[others, -1]] = -1e4
        return scores


class Halts(StoppingCriteria):
    """A rule of the user's own: a row ends at its third token that 5 divides."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 12:] % 5 == 0).sum(1) >= 3


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_processors_and_rules_of_the_users_own(sample: bool) -> None:
    settings = {"do_sample": sample, "logits_processor": [Even()], "stopping_criteria": [Halts()]}
    for model, heads in (counting(3), (tiny_model("llama"), random_heads(tiny_model("llama")))):
        for kind in ("published", "combined"):
            same_as_plain(model, prompts(3), KINDS[kind](heads), max_new_tokens=20, **settings)


def test_rejection() -> None:
    """The papers' scheme goes with exact acceptance: greedy text is plain decoding's, sampled text has its odds."""
    model, heads = counting(3, sharpness=5.0)
    strategy = Medusa(heads, verification="rejection")
    same_as_plain(model, prompts(2), strategy, max_new_tokens=20)
    output, _ = run(model, prompts(2), lookahead_strategy=strategy, do_sample=True, max_new_tokens=20)
    assert output.shape == (2, 32)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_custom_generate_and_streams(batch: int, patched: bool) -> None:
    if not patched:
        lookahead.restore_all()
    model, heads = counting(3)
    for settings in SAMPLED:
        plain, state = run(model, prompts(batch), max_new_tokens=20, **settings)
        streamer = Puts()
        ours, after = run(
            model,
            prompts(batch),
            max_new_tokens=20,
            custom_generate=Medusa(heads),
            lookahead_streamer=streamer,
            **settings,
        )
        assert ours.tolist() == plain.tolist()
        assert torch.equal(after, state)
        assert torch.stack(streamer.puts[1:], dim=1).tolist() == plain[:, 12:].tolist()


@pytest.mark.parametrize("acceptance", ["exact", "typical", "nucleus"])
@pytest.mark.parametrize("batch", [1, 3])
def test_streaming(batch: int, acceptance: str) -> None:
    """Every token once, in order, one pass at a time."""
    model, heads = counting(3, sharpness=5.0)
    streamer = Puts()
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "eos_token_id": 40}
    text, _ = run(
        model, prompts(batch), lookahead_strategy=Medusa(heads, acceptance=acceptance), streamer=streamer, **settings
    )
    assert streamer.puts[0].tolist() == prompts(batch)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1


def test_a_cache_is_continued() -> None:
    """Turn by turn in one cache, with Medusa and without."""
    model = tiny_model("llama")
    heads = random_heads(model)
    for strategy in (Medusa(heads), Medusa(heads, sources=COMBINED, seed=0)):
        first = same_as_plain(model, prompts(2, ragged=False), strategy, max_new_tokens=9)
        following = torch.cat([first.sequences, torch.randint(1, VOCAB, (2, 5))], dim=1)
        caches = [copy.deepcopy(first[CACHE]) for _ in range(2)]
        inputs = {"input_ids": following, "attention_mask": torch.ones_like(following)}
        plain, _ = run(model, inputs, **{CACHE: caches[0]}, max_new_tokens=15)
        ours, _ = run(model, inputs, **{CACHE: caches[1]}, max_new_tokens=15, lookahead_strategy=strategy)
        assert ours.tolist() == plain.tolist()


def test_a_chunked_prompt() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21, prefill_chunk_size=5)
    assert output.stats.steps == 6

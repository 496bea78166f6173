"""Texts that grow past the place where a model changes: drafts end there, and plain passes go on, exactly."""

from typing import Any

import pytest
import torch
from helpers.calls import LengthIs
from helpers.marks import BATCH_AND_SAMPLE, few
from helpers.models import fresh_model, prompts, run, same_as_plain, same_tokens, shared, tiny_model
from helpers.mtp import of_family
from transformers import DynamicCache, StaticCache

from lookahead import Jacobi, Lookahead
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits, boundary
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented")

_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
STRATEGIES = [None, Lookahead(window_size=5, ngram_size=4, seed=0), Jacobi(block_size=7)]


def changing_models() -> dict[str, Any]:
    """Models that change at token 32."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    longrope = _LONGROPE | {"original_max_position_embeddings": 32}
    return {
        "dynamic": fresh_model("llama", rope_parameters=dynamic, max_position_embeddings=32),
        "longrope": fresh_model("llama", rope_parameters=longrope, max_position_embeddings=128),
        "longrope, recomputed": fresh_model(
            "phi3",
            sliding_window=None,
            max_position_embeddings=128,
            original_max_position_embeddings=32,
            rope_parameters=longrope,
        ),
        "indexed": of_family("deepseek_v32", index_topk=32),
    }


MODELS = {name: shared(model) for name, model in changing_models().items()}


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", MODELS)
def test_exact_across_the_boundary(name: str, batch: int, sample: bool) -> None:
    """Up to it, over it by one, and far past it; with ragged rows and with rows of one length."""
    for strategy in STRATEGIES:
        for new_tokens in (20, 21, 40):
            same_as_plain(MODELS[name], prompts(batch), strategy, max_new_tokens=new_tokens, do_sample=sample)
    settings = {"max_new_tokens": 40, "do_sample": sample, "output_scores": True, "output_logits": True}
    same_as_plain(MODELS[name], prompts(batch, ragged=False), STRATEGIES[1], **settings)


@pytest.mark.parametrize(("length", "batch"), [(30, 3), (31, 1), (32, 3), (33, 1), (50, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_around_the_boundary(name: str, batch: int, length: int) -> None:
    """The prompt itself may have crossed it."""
    for padded in (0, 2):
        inputs = prompts(batch, length)
        inputs["attention_mask"][0, :padded] = 0
        for strategy, sample in ((STRATEGIES[1], False), (None, True)):
            settings = {"max_new_tokens": 12, "do_sample": sample}
            texts = []
            for extra in ({}, {"use_lookahead": True, "lookahead_strategy": strategy}):
                run(MODELS[name], prompts(1, 4), max_new_tokens=1)  # dynamic RoPE forgets the longest text so far
                texts.append(run(MODELS[name], inputs, **settings, **extra)[0].tolist())
            assert texts[0] == texts[1]


@pytest.mark.parametrize("recorded", few([False, True], False), ids=["text", "scores"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_end_before_it(name: str, recorded: bool) -> None:
    """Rows that have ended do not hold the others up, and are fed what plain decoding feeds them."""
    text = run(MODELS[name], prompts(4), max_new_tokens=40)[0]
    for index in (3, 19, 20):
        ends = [int(text[index % 4, 12 + index])]
        for strategy in STRATEGIES[:2]:
            same_as_plain(
                MODELS[name], prompts(4), strategy, max_new_tokens=40, eos_token_id=ends, output_scores=recorded
            )


@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache(name: str) -> None:
    """Each plain pass then computes the whole text anew, as long as it is by then."""
    for length, new_tokens in ((12, 12), (12, 40), (40, 8)):
        texts = []
        for extra in ({}, {"use_lookahead": True}, {"lookahead_strategy": STRATEGIES[1]}):
            run(MODELS[name], prompts(1, 4), max_new_tokens=1)
            texts.append(run(MODELS[name], prompts(1, length), max_new_tokens=new_tokens, use_cache=False, **extra)[0])
        assert texts[0].tolist() == texts[1].tolist() == texts[2].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_write_together(name: str) -> None:
    """And a streamer's and a criterion's view of it."""
    for sample in (False, True):
        settings = {"max_new_tokens": 40, "do_sample": sample, "stopping_criteria": [LengthIs(44)]}
        settings |= {"repetition_penalty": 1.2}
        same_as_plain(MODELS[name], prompts(3), STRATEGIES[1], **settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_the_callers(name: str) -> None:
    """It holds the whole text afterwards, and a second turn goes on from it."""
    for kind in (DynamicCache, None):
        turns = []
        for use in (False, True):
            given = None if kind is None else kind(config=MODELS[name].config)
            settings = {"max_new_tokens": 25, "return_dict_in_generate": True, "use_lookahead": use}
            first = run(MODELS[name], prompts(1), **{CACHE: given}, **settings)[0]
            following = torch.cat([first.sequences, prompts(1, 4, seed=5)["input_ids"]], dim=1)
            inputs = {"input_ids": following, "attention_mask": torch.ones_like(following)}
            second = run(MODELS[name], inputs, **{CACHE: first[CACHE]}, **settings)[0]
            turns.append([first.sequences.tolist(), second.sequences.tolist()])
        assert turns[0] == turns[1]


def test_a_static_cache() -> None:
    """The history moves to a cache of transformers' for the plain passes, and back."""
    model = MODELS["dynamic"]
    same_as_plain(model, prompts(1), max_new_tokens=30, cache_implementation="static")
    caches = []
    for use in (False, True):
        cache = StaticCache(config=model.config, max_cache_len=64)
        run(model, prompts(1), **{CACHE: cache}, max_new_tokens=30, use_lookahead=use)
        caches.append(cache)
    for ours, plain in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :41], plain.keys[:, :, :41])


@pytest.mark.parametrize("name", MODELS)
def test_inputs_embeds(name: str) -> None:
    """A prompt of embeddings has no ids to recompute a text from."""
    inputs = prompts(1)
    embeds = MODELS[name].get_input_embeddings()(inputs.pop("input_ids")).detach()
    try:
        run(MODELS[name], inputs | {"inputs_embeds": embeds}, max_new_tokens=30)
    except ValueError:
        pytest.skip("transformers itself cannot decode it")
    same_tokens(MODELS[name], inputs | {"inputs_embeds": embeds}, max_new_tokens=30)


def test_the_boundary_is_where_the_model_changes(made: list[TreeModel]) -> None:
    """Drafts go as far as they can: one plain pass a token after it, fewer passes before."""
    for name, model in MODELS.items():
        assert boundary(ModelTraits.of(model), 12, [11]) is not None
        run(model, prompts(1), max_new_tokens=20, use_lookahead=True)
        assert made[-1]._plain is None, name
        run(model, prompts(1), max_new_tokens=40, use_lookahead=True)
        assert made[-1]._plain is not None, name
    assert boundary(ModelTraits.of(MODELS["dynamic"]), 12, [11])[0] == 32  # type: ignore[index]
    assert boundary(ModelTraits.of(MODELS["dynamic"]), 50, [49])[0] == 50  # type: ignore[index]
    assert boundary(ModelTraits.of(MODELS["longrope"]), 50, [49]) is None
    assert boundary(ModelTraits.of(tiny_model("llama")), 12, [11]) is None


def test_a_prompt_longer_than_rope_was_made_for() -> None:
    """Plain decoding runs it, and so do we; only a learned table ends."""
    model = fresh_model("llama", max_position_embeddings=16)
    for batch in (1, 3):
        same_as_plain(model, prompts(batch, 20), max_new_tokens=20)

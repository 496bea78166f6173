"""Prompts and caches that are refused before any pass, and leave no trace."""

from typing import Any

import pytest
import torch
import transformers
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model
from helpers.refusals import Passes, filled, refused
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("self_tested", "works_afterwards")


def test_a_foreign_cache_and_one_token(passes: Passes) -> None:
    """Calls that write one token are handed on at once, but not with a cache that has to be looked at."""
    other = filled(tiny_model("mistral"), prompts(1, 6), DynamicCache())
    refused(passes, tiny_model("gpt2"), "is the cache of another model", **{CACHE: other}, max_new_tokens=1)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_empty_prompt(shape: tuple[int, int], passes: Passes) -> None:
    """No token to start from, or no row (with several rows and no token, transformers itself fails earlier)."""
    ids = torch.zeros(shape, dtype=torch.long)
    refused(passes, tiny_model("llama"), "The prompt is empty", {"input_ids": ids})
    refused(passes, tiny_model("llama"), "The prompt is empty", {"input_ids": ids, "attention_mask": ids})


def test_right_padding(passes: Passes) -> None:
    """New tokens would follow the padding."""
    inputs = prompts(3, ragged=False)
    inputs["attention_mask"][1, -2:] = 0
    refused(passes, tiny_model("llama"), "Row 1 is padded on the right.*padding_side = 'left'", inputs)
    inputs = prompts(1)
    inputs["attention_mask"][0, -1:] = 0
    refused(passes, tiny_model("llama"), "Row 0 is padded on the right", inputs)
    inputs = prompts(2, ragged=False)
    inputs["attention_mask"][1] = 0
    refused(passes, tiny_model("llama"), "Row 1 is padded", inputs)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 7, -1, -100])
def test_ids_outside_the_vocabulary(token: int, passes: Passes) -> None:
    """As from another model's tokenizer."""
    inputs = prompts(2, ragged=False)
    inputs["input_ids"][1, 3] = token
    refused(passes, tiny_model("llama"), f"Token id {token} is outside the vocabulary: expected 0 to 47", inputs)


def test_a_prompt_longer_than_the_positions(passes: Passes) -> None:
    """A learned table has no more rows."""
    match = "The prompt reaches position 64, and the model's position table ends at 64"
    refused(passes, tiny_model("gpt2"), match, prompts(1, 65))
    # All tokens count, also those that a cache holds already.
    first, _ = run(tiny_model("gpt2"), prompts(1, 40), max_new_tokens=21, return_dict_in_generate=True)
    following = {"input_ids": prompts(1, 9)["input_ids"], "attention_mask": torch.ones(1, 69, dtype=torch.long)}
    refused(passes, tiny_model("gpt2"), "position", following, **{CACHE: first[CACHE]})
    given = prompts(1) | {"position_ids": torch.arange(55, 67)[None]}
    refused(passes, tiny_model("gpt2"), "position", given)
    same_as_plain(tiny_model("gpt2"), prompts(1) | {"position_ids": torch.arange(50, 62)[None]}, max_new_tokens=3)


def test_three_dimensional_positions(passes: Passes) -> None:
    """As vision-language models have them."""
    inputs = prompts(1) | {"position_ids": torch.arange(12).expand(3, 1, -1)}
    refused(passes, tiny_model("llama"), r"position_ids of shape \(3, 1, 12\) are not supported", inputs)


class OtherCache(DynamicCache):
    """A kind of cache that is not known."""


class OtherLayer(DynamicLayer):
    """A kind of layer that is not known."""


@pytest.mark.parametrize("full", [False, True], ids=["empty", "filled"])
def test_caches_that_cannot_keep_slots(full: bool, passes: Passes) -> None:
    """Unknown caches and layers, and windows that roll."""
    model, rolling = tiny_model("llama"), tiny_model("mistral")
    cache = OtherCache()
    if full:
        cache = filled(model, prompts(1, 6), cache)
    match = "A OtherCache cannot keep chosen slots of a tree: expected a DynamicCache"
    refused(passes, model, match, **{CACHE: cache})
    cache = DynamicCache(config=model.config)
    cache.layers[1] = OtherLayer()
    if full:
        cache = filled(model, prompts(1, 6), cache)
    refused(passes, model, "Layer 1 of the cache is a OtherLayer, and it cannot keep", **{CACHE: cache})
    cache = StaticCache(config=rolling.config, max_cache_len=40)
    if full:
        cache = filled(rolling, prompts(1, 6), cache)
    refused(passes, rolling, "is a StaticSlidingWindowLayer", **{CACHE: cache})
    run(rolling, prompts(1), max_new_tokens=2, cache_implementation="static")  # transformers keeps it on the model
    refused(passes, rolling, "is a StaticSlidingWindowLayer", cache_implementation="static")


@pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"),
    reason="this transformers has no quantized cache that runs without further packages",
)
def test_quantized_caches(passes: Passes) -> None:
    """Asked for by name and given."""
    match = "A QuantizedCache cannot keep chosen slots of a tree"
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    refused(passes, tiny_model("llama"), match, **settings)
    cache = transformers.QuantizedCache(backend="fp8", config=tiny_model("llama").config)
    refused(passes, tiny_model("llama"), match, **{CACHE: cache})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 3}, "the cache of another model: it has 3 layers, this model 2"),
        ({"num_key_value_heads": 4}, "the cache of another model: it has 4 key/value heads, this model 2"),
        ({"head_dim": 16}, "the cache of another model: it has 16 channels a head, this model 8"),
    ],
    ids=str,
)
def test_another_models_cache(changes: dict[str, Any], match: str, passes: Passes) -> None:
    """Told by its shape."""
    cache = filled(fresh_model("llama", **changes), prompts(1, 6))
    refused(passes, tiny_model("llama"), match, prompts(1), **{CACHE: cache})


def test_a_cache_of_other_rows(passes: Passes) -> None:
    """One row of history for each row of the prompt."""
    cache = filled(tiny_model("llama"), prompts(2, 6))
    refused(passes, tiny_model("llama"), f"{CACHE} holds 2 rows: expected 1", **{CACHE: cache})

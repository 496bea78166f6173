"""KV caches: returned, given, continued, static, offloaded, or none."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import F32, prompts, run, same_as_plain, same_caches, tiny_model
from helpers.refusals import refuses
from torch import Tensor
from transformers import DynamicCache, StaticCache

from lookahead import Lookahead
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


def same_in_caches(model: Any, inputs: Any, caches: list[Any], new_tokens: int, tolerance: float = 1e-9) -> Tensor:
    """The text that plain decoding and ours both write, each into a cache of its own, which end up the same."""
    plain, _ = run(model, inputs, **{CACHE: caches[0]}, max_new_tokens=new_tokens)
    ours, _ = run(model, inputs, **{CACHE: caches[1]}, max_new_tokens=new_tokens, use_lookahead=True)
    assert ours.tolist() == plain.tolist()
    same_caches(caches[1], caches[0], tolerance)
    return plain


@pytest.mark.parametrize("ours_first", [False, True], ids=["from-plain", "from-ours"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3", "qwen2_mixed", "cohere2", "llama4"])
def test_continue_from_a_cache(name: str, batch: int, ours_first: bool) -> None:
    """A second call with all ids and the first call's cache, which is updated in place."""
    model, inputs = tiny_model(name), prompts(batch)
    settings = {"return_dict_in_generate": True, "max_new_tokens": 15, "use_lookahead": ours_first}
    first, _ = run(model, inputs, **settings)
    more = prompts(batch, 4, seed=5, ragged=False)
    following = {
        "input_ids": torch.cat([first.sequences, more["input_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(batch, 19, dtype=torch.long)], dim=1),
    }
    caches = [copy.deepcopy(first[CACHE]) for _ in range(2)]
    same_in_caches(model, following, caches, 15, 1e-4 if model.dtype is F32 else 1e-9)
    assert caches[1].get_seq_length() == 12 + 15 + 4 + 15 - 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_continue_with_the_new_tokens_only(name: str, batch: int) -> None:
    """The other way transformers knows: new ids, and a mask for everything."""
    model, inputs = tiny_model(name), prompts(batch)
    first, _ = run(model, inputs, return_dict_in_generate=True, max_new_tokens=16)
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, 15 + 4, dtype=torch.long)], dim=1)
    following = {"input_ids": prompts(batch, 4, seed=5, ragged=False)["input_ids"], "attention_mask": mask}
    same_in_caches(model, following, [copy.deepcopy(first[CACHE]) for _ in range(2)], 15)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("configured", [False, True])
def test_an_empty_cache_given(name: str, batch: int, returned: bool, configured: bool) -> None:
    """A caller's own empty cache is filled, whether its layers are made already or not."""
    model = tiny_model(name)
    caches = [DynamicCache(config=model.config) if configured else DynamicCache() for _ in range(2)]
    settings = {"max_new_tokens": 15, "return_dict_in_generate": returned, "eos_token_id": 8}
    run(model, prompts(batch), **{CACHE: caches[0]}, **settings)
    output, _ = run(model, prompts(batch), **{CACHE: caches[1]}, use_lookahead=True, **settings)
    same_caches(caches[1], caches[0], 1e-9)
    assert not returned or output[CACHE] is caches[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_static_cache(batch: int) -> None:
    """A static cache is filled as plain decoding fills it, prepared by transformers or given."""
    model, inputs = tiny_model("llama"), prompts(batch)
    same_as_plain(model, inputs, max_new_tokens=20, cache_implementation="static")
    caches = [StaticCache(config=model.config, max_cache_len=12 + 20) for _ in range(2)]
    text = same_in_caches(model, inputs, caches, 10)
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, 10, dtype=torch.long)], dim=1)
    same_in_caches(model, {"input_ids": text, "attention_mask": mask}, caches, 9)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_without_a_cache(name: str) -> None:
    """``use_cache=False`` is about what is returned; the text is the same."""
    output = same_as_plain(tiny_model(name), prompts(3), max_new_tokens=15, use_cache=False)
    assert output.get(CACHE) is None


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_offloaded_caches(name: str, batch: int) -> None:
    """Plain decoding needs CUDA for them; here the history lies on the host anyway, and the text is the usual one."""
    model = tiny_model(name)
    settings = {"max_new_tokens": 20, "return_dict_in_generate": True}
    expected, _ = run(model, prompts(batch), **settings)
    kinds = ["offloaded", *(["offloaded_static"] if name == "llama" else [])]
    for kind in kinds:
        output, _ = run(model, prompts(batch), cache_implementation=kind, use_lookahead=True, **settings)
        assert torch.equal(output.sequences, expected.sequences)
        assert output[CACHE].offloading


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_given_offloaded_cache_is_filled_and_goes_on(name: str) -> None:
    model, inputs = tiny_model(name), prompts(2)
    caches = [DynamicCache(config=model.config, offloading=ours) for ours in (False, True)]
    for _ in range(2):
        text = same_in_caches(model, inputs, caches, 10)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 11), value=1)
        inputs = {"input_ids": torch.nn.functional.pad(text, (0, 1), value=5), "attention_mask": mask}


def test_an_offloaded_cache_and_static_shapes() -> None:
    """Static passes write on the device: they are left out, or refused where they were asked for."""
    model, inputs = tiny_model("llama"), prompts(1)
    settings = {"cache_implementation": "offloaded", "lookahead_strategy": Lookahead(static=True), "max_new_tokens": 5}
    refuses("the cache is offloaded", run, model, inputs, **settings)

"""What cannot be decoded is refused before any pass, by name, and nothing that goes wrong leaves a trace."""

import copy
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from helpers.models import (
    VOCAB,
    counting_model,
    fresh_model,
    prompts,
    registries,
    run,
    same_as_plain,
    same_caches,
    tiny_model,
)
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import Jacobi, Lookahead, LookaheadError, load_model
from lookahead.support import self_test

Passes = Callable[[Any], list[int]]

_SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": None, "bos_token_id": None}
_HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def patched(restored: None) -> None:
    """All tests here run with the patch, unless they take it off, and with models that have passed their self-test."""
    lookahead.augment_all()
    for name in ("llama", "gpt2", "mistral"):
        tiny_model(name).generate(**prompts(1), max_new_tokens=1, use_lookahead=True)


@contextmanager
def unchanged(model: Any, *caches: Any) -> Iterator[None]:
    """Assert that the block leaves the model, the patch, transformers' registries and the caches as they were."""

    def state() -> list[Any]:
        modules = [(name, set(vars(module)), module.training) for name, module in model.named_modules()]
        hooks = [list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values()) for m in model.modules()]
        settings = [model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation]
        return [modules, hooks, settings, dict(vars(GenerationMixin)), registries()]

    before = state()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies = copy.deepcopy(caches)
    yield
    assert state() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    for cache, kept in zip(caches, copies, strict=True):
        same_caches(cache, kept, 0.0)


def refused(passes: Passes, model: Any, match: str, inputs: dict[str, Any] | None = None, **settings: Any) -> None:
    """Assert that a call is refused with this text before any pass, and that a plain and a good call work after it."""
    inputs = prompts(1) if inputs is None else inputs
    settings = {"max_new_tokens": 8} | settings
    if not {"lookahead_strategy", "use_lookahead", "generation_config"} & set(settings):
        settings["use_lookahead"] = True
    seen, cache = passes(model), settings.get("past_key_values")
    state = torch.get_rng_state()
    with unchanged(model, *([cache] if cache is not None else [])), pytest.raises(LookaheadError, match=match):
        model.generate(**inputs, **settings)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def works_afterwards() -> Iterator[None]:
    """After the test, the tiny Llama and GPT-2 decode as ever."""
    yield
    for name in ("llama", "gpt2"):
        same_as_plain(tiny_model(name), prompts(2), max_new_tokens=8)


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"window_size": 0}, r"Lookahead\(window_size=\) must be at least 1: got 0"),
        ({"window_size": -3}, r"window_size=\) must be at least 1: got -3"),
        ({"ngram_size": 0}, r"ngram_size=\) must be at least 1: got 0"),
        ({"verification_set_size": -1}, r"verification_set_size=\) must be at least 0: got -1"),
        ({"ngram_size": 1}, r"ngram_size=1\) is plain decoding.*window_size=7, verification_set_size=7"),
        ({"ngram_size": 1, "window_size": 1}, "needs window_size=1 and verification_set_size=0"),
        ({"window_size": 2.0}, "must be a whole number: got 2.0 of type float"),
        ({"window_size": True}, "must be a whole number: got True of type bool"),
        ({"window_size": "7"}, "must be a whole number: got '7' of type str"),
        ({"window_size": "seven"}, "must be a whole number: got .seven."),
        ({"ngram_size": [5]}, r"must be a whole number: got \[5\]"),
        ({"pool_from_prompt": 1}, r"pool_from_prompt=\) must be True or False: got 1"),
        ({"always_forward_one": "yes"}, r"always_forward_one=\) must be True or False: got 'yes'"),
        ({"verification": "typical"}, r"verification=\) must be one of 'exact', 'rejection': got 'typical'"),
        ({"verification": ["exact"]}, r"verification=\) must be one of"),
        ({"stats": "some"}, r"stats=\) must be one of 'none', 'summary', 'detailed': got 'some'"),
        ({"seed": "x"}, r"seed=\) must be a whole number: got 'x'"),
        ({"seed": 1.5}, r"seed=\) must be a whole number: got 1.5"),
        ({"windows": 3}, "Unknown field 'windows' for Lookahead: it knows.*window_size"),
        ({"windows": 3, "n": 1}, "Unknown field 'n', 'windows'"),
        ({"strategy": "medusa2"}, "Unknown strategy 'medusa2'"),
        ({"strategy": None}, "Unknown strategy None"),
        ({"strategy": ["jacobi"]}, "Unknown strategy"),
        ({"strategy": "jacobi", "window_size": 3}, "Unknown field 'window_size' for Jacobi"),
        ({"strategy": "jacobi", "mode": "fast"}, r"Jacobi\(mode=\) must be one of.*got 'fast'"),
        ({"strategy": "jacobi", "block_size": 0}, r"Jacobi\(block_size=\) must be at least 1: got 0"),
        ({"strategy": "jacobi", "block_size": None}, r"Jacobi\(mode='sliding'\) needs a block_size"),
        ({"strategy": "jacobi", "initial_guess": "noise"}, r"initial_guess=\) must be one of"),
        ({"strategy": "jacobi", "initial_guess": []}, r"initial_guess=\) must be 'text', 'tail', 'pad' or a list"),
        ({"strategy": "jacobi", "initial_guess": [1, -1]}, r"initial_guess=\) must be 'text', 'tail', 'pad' or a list"),
        (
            {"strategy": "jacobi", "initial_guess": [1, "a"]},
            r"initial_guess=\) must be 'text', 'tail', 'pad' or a list",
        ),
        ({"strategy": "jacobi", "return_trajectory": 1}, r"return_trajectory=\) must be True or False"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], match: str, passes: Passes) -> None:
    """Impossible numbers, wrong types and unknown fields, given as a dict and made directly."""
    refused(passes, tiny_model("llama"), match, lookahead_strategy=settings)
    fields = {name: value for name, value in settings.items() if name != "strategy"}
    made = Jacobi if settings.get("strategy") == "jacobi" else Lookahead
    if settings.get("strategy", "jacobi") == "jacobi":
        with pytest.raises(LookaheadError, match=match):
            made.from_dict(fields)
        if not match.startswith("Unknown field"):
            with pytest.raises(LookaheadError, match=match):
                made(**fields)


@pytest.mark.parametrize(
    "strategy",
    ["lookahead", 5, [("window_size", 3)], Lookahead, object(), True],
    ids=lambda given: type(given).__name__,
)
def test_not_a_strategy(strategy: Any, passes: Passes) -> None:
    """Neither a strategy nor a dict."""
    refused(passes, tiny_model("llama"), "lookahead_strategy must be", lookahead_strategy=strategy)


@pytest.mark.parametrize("value", ["yes", 1, 0, "", [True]], ids=repr)
def test_use_lookahead_is_a_flag(value: Any, passes: Passes) -> None:
    """Something that is merely true is more likely a mistake."""
    refused(passes, tiny_model("llama"), "use_lookahead must be True or False", use_lookahead=value)


def test_settings_are_frozen() -> None:
    """A strategy is checked when it is made, so it cannot be changed afterwards."""
    with pytest.raises(AttributeError):
        Lookahead().window_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Lookahead(7, 5, 7)  # type: ignore[misc]


def test_a_guess_outside_the_vocabulary(passes: Passes) -> None:
    """Known only when the model is."""
    strategy = Jacobi(initial_guess=[3, VOCAB])
    refused(
        passes, tiny_model("llama"), f"holds token {VOCAB}: this model's vocabulary ends", lookahead_strategy=strategy
    )


# --- not combinable ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("works_afterwards")
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_beams": 2}, "cannot be combined with num_beams=2: set num_beams=1, or drop use_lookahead"),
        ({"num_beams": 3, "do_sample": True}, "cannot be combined with num_beams=3"),
        ({"prompt_lookup_num_tokens": 3}, "cannot be combined with prompt_lookup_num_tokens=3: drop prompt_lookup"),
        ({"use_mtp": True}, "cannot be combined with use_mtp=True: drop use_mtp"),
        ({"assistant_early_exit": 1}, "cannot be combined with assistant_early_exit=1"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "cannot be combined with output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "with output_hidden_states=True"),
        ({"synced_gpus": True}, "synced_gpus=True is not supported"),
    ],
    ids=str,
)
def test_modes(settings: dict[str, Any], match: str, passes: Passes) -> None:
    """Modes that decode in another way would otherwise ignore ``use_lookahead``, or be ignored."""
    refused(passes, tiny_model("llama"), match, **settings)
    refused(passes, tiny_model("llama"), match, lookahead_strategy=Lookahead(), **settings)
    if "synced_gpus" not in settings:
        config = GenerationConfig(use_lookahead=True, **settings)
        refused(passes, tiny_model("llama"), match, generation_config=config)


def test_assistant_model(passes: Passes) -> None:
    """A second model."""
    match = "cannot be combined with assistant_model: drop assistant_model"
    refused(passes, tiny_model("llama"), match, assistant_model=tiny_model("llama_mha"))


def test_continuous_batching(passes: Passes) -> None:
    """``paged`` decodes in a way of its own."""
    config = GenerationConfig(use_lookahead=True, cache_implementation="paged")
    refused(
        passes, tiny_model("llama"), "cannot be combined with cache_implementation='paged'", generation_config=config
    )


@pytest.mark.parametrize(
    "settings", [{"num_beams": 2}, {"output_attentions": True, "return_dict_in_generate": True}], ids=str
)
def test_modes_without_the_patch(settings: dict[str, Any], passes: Passes) -> None:
    """``custom_generate`` checks for itself."""
    lookahead.restore_all()
    seen = passes(tiny_model("llama"))
    with unchanged(tiny_model("llama")), pytest.raises(LookaheadError, match=r"cannot be combined|not supported"):
        tiny_model("llama").generate(**prompts(1), custom_generate=Lookahead(), max_new_tokens=8, **settings)
    assert seen == []


@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flash_attention_3", "paged|sdpa", "kernels-community/flash-attn"]
)
def test_attention_without_masks(name: str, passes: Passes) -> None:
    """These implementations take 2-D masks only, or none."""
    model = fresh_model("llama")
    model.config._attn_implementation_internal = name
    refused(passes, model, rf"{name.replace('|', '.')}' takes no custom mask: expected one of sdpa, eager")


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("works_afterwards")
def test_a_foreign_cache_and_one_token(passes: Passes) -> None:
    """Calls that write one token are handed on at once, but not with a cache that has to be looked at."""
    other = filled(tiny_model("mistral"), prompts(1, 6), DynamicCache())
    refused(passes, tiny_model("gpt2"), "is the cache of another model", past_key_values=other, max_new_tokens=1)


@pytest.mark.usefixtures("works_afterwards")
@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_empty_prompt(shape: tuple[int, int], passes: Passes) -> None:
    """No token to start from, or no row (with several rows and no token, transformers itself fails earlier)."""
    ids = torch.zeros(shape, dtype=torch.long)
    refused(passes, tiny_model("llama"), "The prompt is empty", {"input_ids": ids})
    refused(passes, tiny_model("llama"), "The prompt is empty", {"input_ids": ids, "attention_mask": ids})


@pytest.mark.usefixtures("works_afterwards")
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


@pytest.mark.usefixtures("works_afterwards")
@pytest.mark.parametrize("token", [VOCAB, VOCAB + 7, -1, -100])
def test_ids_outside_the_vocabulary(token: int, passes: Passes) -> None:
    """As from another model's tokenizer."""
    inputs = prompts(2, ragged=False)
    inputs["input_ids"][1, 3] = token
    refused(passes, tiny_model("llama"), f"Token id {token} is outside the vocabulary: expected 0 to 47", inputs)


@pytest.mark.usefixtures("works_afterwards")
def test_a_prompt_longer_than_the_positions(passes: Passes) -> None:
    """A learned table has no more rows."""
    match = "The prompt reaches position 64, and the model's position table ends at 64"
    refused(passes, tiny_model("gpt2"), match, prompts(1, 65))
    # All tokens count, also those that a cache holds already.
    first, _ = run(tiny_model("gpt2"), prompts(1, 40), max_new_tokens=21, return_dict_in_generate=True)
    following = {"input_ids": prompts(1, 9)["input_ids"], "attention_mask": torch.ones(1, 69, dtype=torch.long)}
    refused(passes, tiny_model("gpt2"), "position", following, past_key_values=first.past_key_values)
    given = prompts(1) | {"position_ids": torch.arange(55, 67)[None]}
    refused(passes, tiny_model("gpt2"), "position", given)
    same_as_plain(tiny_model("gpt2"), prompts(1) | {"position_ids": torch.arange(50, 62)[None]}, max_new_tokens=3)


def test_three_dimensional_positions(passes: Passes) -> None:
    """As vision-language models have them."""
    inputs = prompts(1) | {"position_ids": torch.arange(12).expand(3, 1, -1)}
    refused(passes, tiny_model("llama"), r"position_ids of shape \(3, 1, 12\) are not supported", inputs)


# --- caches --------------------------------------------------------------------------------------------------------


class OtherCache(DynamicCache):
    """A kind of cache that is not known."""


class OtherLayer(DynamicLayer):
    """A kind of layer that is not known."""


def filled(model: Any, inputs: dict[str, Tensor], cache: Any = None) -> Any:
    """The cache that a model fills with a prompt's text."""
    return run(model, inputs, past_key_values=cache, max_new_tokens=1, return_dict_in_generate=True)[0].past_key_values


@pytest.mark.usefixtures("works_afterwards")
@pytest.mark.parametrize("full", [False, True], ids=["empty", "filled"])
def test_caches_that_cannot_keep_slots(full: bool, passes: Passes) -> None:
    """Unknown caches and layers, and windows that roll."""
    model, rolling = tiny_model("llama"), tiny_model("mistral")
    cache = OtherCache()
    if full:
        cache = filled(model, prompts(1, 6), cache)
    match = "A OtherCache cannot keep chosen slots of a tree: expected a DynamicCache"
    refused(passes, model, match, past_key_values=cache)
    cache = DynamicCache(config=model.config)
    cache.layers[1] = OtherLayer()
    if full:
        cache = filled(model, prompts(1, 6), cache)
    refused(passes, model, "Layer 1 of the cache is a OtherLayer, and it cannot keep", past_key_values=cache)
    cache = StaticCache(config=rolling.config, max_cache_len=40)
    if full:
        cache = filled(rolling, prompts(1, 6), cache)
    refused(passes, rolling, "is a StaticSlidingWindowLayer", past_key_values=cache)
    run(rolling, prompts(1), max_new_tokens=2, cache_implementation="static")  # transformers keeps it on the model
    refused(passes, rolling, "is a StaticSlidingWindowLayer", cache_implementation="static")


@pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"),
    reason="this transformers has no quantized cache that runs without further packages",
)
@pytest.mark.usefixtures("works_afterwards")
def test_quantized_caches(passes: Passes) -> None:
    """Asked for by name and given."""
    match = "A QuantizedCache cannot keep chosen slots of a tree"
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    refused(passes, tiny_model("llama"), match, **settings)
    cache = transformers.QuantizedCache(backend="fp8", config=tiny_model("llama").config)
    refused(passes, tiny_model("llama"), match, past_key_values=cache)


@pytest.mark.usefixtures("works_afterwards")
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
    refused(passes, tiny_model("llama"), match, prompts(1), past_key_values=cache)


def test_a_cache_of_other_rows(passes: Passes) -> None:
    """One row of history for each row of the prompt."""
    cache = filled(tiny_model("llama"), prompts(2, 6))
    refused(passes, tiny_model("llama"), "past_key_values holds 2 rows: expected 1", past_key_values=cache)


# --- models that do not do what they are told ----------------------------------------------------------------------


class IgnoresMasks(LlamaForCausalLM):
    """Attends causally to slots, whatever the mask says."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=position_ids, **kwargs)


class IgnoresPositions(LlamaForCausalLM):
    """Numbers tokens by their slot."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class Stumbles(LlamaForCausalLM):
    """Cannot do with a mask of its caller's."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            raise RuntimeError("no such mask")
        return super().forward(*args, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (
            IgnoresMasks,
            "IgnoresMasks does not keep the branches of a tree apart.*ignores attention masks or position_ids",
        ),
        (IgnoresPositions, "IgnoresPositions does not keep the branches of a tree apart"),
        (Stumbles, "Stumbles did not run a pass with a tree mask.*no such mask"),
    ],
)
def test_the_self_test(kind: type[LlamaForCausalLM], match: str, passes: Passes) -> None:
    """Such a model is found out by a few passes over made-up tokens, once; then it is refused without any."""
    model = kind(tiny_model("llama").config).double().eval()
    model.generation_config.pad_token_id = 0
    seen = passes(model)
    with unchanged(model), pytest.raises(LookaheadError, match=match):
        model.generate(**prompts(1), max_new_tokens=8, use_lookahead=True)
    assert 0 < len(seen) <= 8
    assert max(seen) < 12, "the prompt was never run"
    refused(passes, model, match)
    refused(passes, model, match, prompts(3), do_sample=True)


def test_the_self_test_runs_once(passes: Passes) -> None:
    """A good model is tested once, and again when its dtype or its attention changes."""
    model = fresh_model("llama")

    def test_passes() -> int:
        seen = passes(model)
        model.generate(**prompts(1), max_new_tokens=4, do_sample=False, use_lookahead=True)
        return seen.index(12)

    assert test_passes() > 0
    assert test_passes() == 0
    model.float()
    assert test_passes() > 0
    assert test_passes() == 0
    model.set_attn_implementation("eager")
    assert test_passes() > 0
    assert test_passes() == 0


def test_the_self_test_draws_nothing() -> None:
    """The first call with a model is as repeatable as the second."""
    model = fresh_model("llama")
    first, second = (run(model, prompts(1), max_new_tokens=5, do_sample=True, use_lookahead=True) for _ in range(2))
    assert first[0].tolist() == second[0].tolist()
    assert torch.equal(first[1], second[1])


def test_verdicts_are_held_weakly() -> None:
    """A model that is gone leaves nothing behind, whichever way its verdict went."""
    gc.collect()
    before = len(self_test._verdicts)
    good, bad = fresh_model("llama"), IgnoresMasks(tiny_model("llama").config).eval()
    good.generate(**prompts(2), max_new_tokens=4, use_lookahead=True)
    with pytest.raises(LookaheadError):
        bad.generate(**prompts(1), max_new_tokens=4, use_lookahead=True)
    assert len(self_test._verdicts) == before + 2
    watched = [weakref.ref(good), weakref.ref(bad)]
    del good, bad
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert len(self_test._verdicts) == before


def test_a_model_in_training_mode() -> None:
    """Dropout makes branches differ; the message says what was forgotten."""
    model = fresh_model("gpt2", resid_pdrop=0.3).train()
    with pytest.raises(LookaheadError, match=r"model.eval\(\) was not called"):
        model.generate(**prompts(1), max_new_tokens=4, use_lookahead=True)
    same_as_plain(model.eval(), prompts(1), max_new_tokens=4)


# --- NaN -----------------------------------------------------------------------------------------------------------


@contextmanager
def logits_changed(model: Any, change: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """``change(pass number, fed ids, logits)`` is called after every pass and may write into the logits."""
    numbers: list[int] = []

    def alter(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        numbers.append(len(numbers) + 1)
        change(numbers[-1], kwargs["input_ids"][:, -output.logits.shape[1] :], output.logits)

    handle = model.register_forward_hook(alter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_nan_logits(step: int, batch: int, settings: dict[str, Any]) -> None:
    """Whatever chooses the token, the error names the pass."""
    model = fresh_model("mistral")
    same_as_plain(model, prompts(2), max_new_tokens=12)  # with the self-test, whose passes are not counted below
    cache = filled(model, prompts(batch, 6))

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        if number == step:
            logits[-1] = torch.nan

    with (
        logits_changed(model, spoil),
        unchanged(model, cache),
        pytest.raises(LookaheadError, match=f"logits are NaN at step {step} .row {batch - 1}, token"),
    ):
        model.generate(**prompts(batch), past_key_values=cache, max_new_tokens=12, use_lookahead=True, **settings)
    same_as_plain(model, prompts(batch), max_new_tokens=12)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_nan_beside_the_path(batch: int, settings: dict[str, Any]) -> None:
    """A drafted token that the model would never write may be as broken as it likes."""
    model, drafted = counting_model(), []
    same_as_plain(model, prompts(1), max_new_tokens=2)
    inputs = prompts(batch, ragged=False)
    inputs["input_ids"][:, :9] = 40

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        logits[..., 40] = -1e4
        if number > 1:
            drafted.append(int((fed == 40).sum()))
            logits[fed == 40] = torch.nan

    with logits_changed(model, spoil):
        same_as_plain(model, inputs, Lookahead(window_size=7, seed=0), max_new_tokens=20, **settings)
    assert sum(drafted) > 20


def test_nan_that_a_processor_removes() -> None:
    """``remove_invalid_values`` is asked for exactly this."""
    model = fresh_model("llama")
    same_as_plain(model, prompts(1), max_new_tokens=2)

    def spoil(number: int, fed: Tensor, logits: Tensor) -> None:
        logits[..., 7] = torch.nan
        logits[..., 8] = torch.inf * torch.where(fed % 2 == 0, 1, -1)

    for batch in (1, 3):
        for sample in (False, True):
            with logits_changed(model, spoil):
                same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample, remove_invalid_values=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_weights(batch: int) -> None:
    """Broken from the start: found by the first pass over the prompt, not blamed on the masks."""
    model = fresh_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 4] = torch.nan
    for _ in range(2):
        with pytest.raises(LookaheadError, match=r"logits are NaN at step 1 \(row 0, token 1\)"):
            model.generate(**prompts(batch), max_new_tokens=12, use_lookahead=True)


def test_infinite_logits() -> None:
    """Tokens that are excluded by the model itself are nothing unusual."""
    model = fresh_model("llama")
    with logits_changed(model, lambda number, fed, logits: logits[..., 40:].fill_(-torch.inf)):
        for batch in (1, 3):
            for sample in (False, True):
                output = same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=sample)
                assert output.sequences[:, 12:].max() < 40


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "settings", [{"suppress_tokens": list(range(VOCAB))}, {"sequence_bias": [[[3], float("inf")]]}], ids=["none", "inf"]
)
def test_nothing_to_sample_from(settings: dict[str, Any], batch: int) -> None:
    """Where processors leave no distribution, plain generate fails; lookahead does not make a token up."""
    model = tiny_model("llama")
    for asked in ({}, {"use_lookahead": True}):
        with unchanged(model), pytest.raises((RuntimeError, LookaheadError), match=r"nan|give no probabilities"):
            model.generate(**prompts(batch), max_new_tokens=5, do_sample=True, **settings, **asked)
    same_as_plain(model, prompts(batch), max_new_tokens=5, do_sample=False, **settings)


# --- interrupts ----------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def raise_at(count: int, error: BaseException) -> Callable[[], None]:
    """A function that raises the ``count``-th time it is called."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) == count:
            raise error

    return call


class Streamer(BaseStreamer):
    """Calls ``tick`` with every put."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.put = lambda value: tick()  # type: ignore[method-assign]
        self.end = lambda: None  # type: ignore[method-assign]


def troublemaker(where: str, tick: Callable[[], None], model: Any) -> dict[str, Any]:
    """Settings with a ``tick`` in this place of the decode."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        tick()
        return scores

    def judge(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return {
        "streamer": lambda: {"streamer": Streamer(tick)},
        "processor": lambda: {"logits_processor": [process]},
        "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([judge])},
        "model": dict,
    }[where]()


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), Interrupted()], ids=repr)
@pytest.mark.parametrize("where", ["streamer", "processor", "criterion", "model"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_exception_in_the_middle(where: str, count: int, error: BaseException) -> None:
    """It comes through as it is; the model, the patch and the caller's caches are as before; the next call works."""
    for name in ("llama", "mistral"):
        model = tiny_model(name)
        for batch in (1, 3):
            for cache in (filled(model, prompts(batch, 6)), DynamicCache()):
                model.generate(**prompts(batch), max_new_tokens=2, use_lookahead=True)
                tick = raise_at(count, error)
                handle = model.register_forward_hook(lambda *_, tick=tick: tick()) if where == "model" else None
                with unchanged(model, cache), pytest.raises(type(error)) as caught:
                    model.generate(
                        **prompts(batch),
                        past_key_values=cache,
                        max_new_tokens=12,
                        lookahead_strategy=Lookahead(window_size=7),
                        **troublemaker(where, tick, model),
                    )
                assert caught.value is error
                if handle is not None:
                    handle.remove()
            same_as_plain(model, prompts(batch), max_new_tokens=12, do_sample=True)


def test_an_exception_in_the_self_test(passes: Passes) -> None:
    """A verdict that was not reached is not remembered."""
    model = fresh_model("llama")
    tick = raise_at(2, KeyboardInterrupt())
    handle = model.register_forward_hook(lambda *_: tick())
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        model.generate(**prompts(1), max_new_tokens=4, use_lookahead=True)
    handle.remove()
    seen = passes(model)
    same_as_plain(model, prompts(1), max_new_tokens=4)
    assert seen.index(12) == 0, "the plain call comes first"
    assert seen.count(12) == 2


def test_a_filled_cache_after_an_error_goes_on() -> None:
    """A continuation that broke off can be asked for again with the same cache."""
    for name in ("llama", "mistral"):
        model = tiny_model(name)
        caches = [filled(model, prompts(1, 8)) for _ in range(2)]
        following = {"input_ids": torch.cat([prompts(1, 8)["input_ids"], prompts(1, 5, seed=3)["input_ids"]], dim=1)}
        plain, _ = run(model, following, past_key_values=caches[0], max_new_tokens=12)
        with pytest.raises(KeyboardInterrupt):
            settings = troublemaker("processor", raise_at(6, KeyboardInterrupt()), model)
            model.generate(**following, past_key_values=caches[1], max_new_tokens=12, use_lookahead=True, **settings)
        ours, _ = run(model, following, past_key_values=caches[1], max_new_tokens=12, use_lookahead=True)
        assert ours.tolist() == plain.tolist()
        same_caches(caches[1], caches[0], 1e-9)


@pytest.mark.parametrize("asked", [True, None])
def test_the_patch_is_taken_off_in_the_middle(asked: bool | None) -> None:
    """A call that has begun goes on to its end."""
    model = tiny_model("llama")
    text = run(model, prompts(1), max_new_tokens=12)[0]
    for where in ("streamer", "processor", "criterion"):
        lookahead.augment_all()
        settings = troublemaker(where, lookahead.restore_all, model)
        output = model.generate(**prompts(1), max_new_tokens=12, do_sample=False, use_lookahead=asked, **settings)
        assert output.tolist() == text.tolist()


# --- threads -------------------------------------------------------------------------------------------------------


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads that start at the same time; what each returns or raises."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def work(index: int) -> None:
        barrier.wait(60)
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("names", [["llama"], ["llama", "mistral"], ["gemma3", "gpt2", "llama"]], ids=str)
def test_threads(names: list[str]) -> None:
    """On one model or several, some with lookahead and some without, the first calls (self-tests) among them."""
    chosen = [fresh_model(name) for name in names]
    jobs = [(chosen[index % len(chosen)], prompts(1 + index % 3, seed=index), index % 4 != 3) for index in range(6)]
    expected = [model.generate(**inputs, max_new_tokens=30, do_sample=False).tolist() for model, inputs, _ in jobs]
    tables = registries()
    for _ in range(3):
        results = together(
            *(
                lambda m=model, i=inputs, a=asked: m.generate(
                    **i, max_new_tokens=30, do_sample=False, **({"use_lookahead": True} if a else {})
                ).tolist()
                for model, inputs, asked in jobs
            )
        )
        assert results == expected
        assert registries() == tables


def test_an_error_in_one_thread() -> None:
    """The others go on."""
    model = tiny_model("llama")
    expected = run(model, prompts(1), max_new_tokens=30)[0].tolist()
    tables = registries()

    def good() -> Any:
        return model.generate(**prompts(1), max_new_tokens=30, do_sample=False, use_lookahead=True).tolist()

    def bad() -> Any:
        settings = troublemaker("processor", raise_at(4, RuntimeError("boom")), model)
        return model.generate(**prompts(1), max_new_tokens=30, do_sample=False, use_lookahead=True, **settings)

    results = together(good, bad, good, bad)
    assert results[0] == results[2] == expected
    assert [str(result) for result in results[1::2]] == ["boom", "boom"]
    assert registries() == tables


# --- folders -------------------------------------------------------------------------------------------------------


def test_folders_without_a_model(tmp_path: Any) -> None:
    """Nothing there, no config, no weights, broken weights."""
    with pytest.raises(LookaheadError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(LookaheadError, match=r"holds no config\.json"):
        load_model(tmp_path)
    config = tiny_model("llama").config.to_dict() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(LookaheadError, match=r"holds no weights: expected .*safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(LookaheadError, match="could not be loaded"):
        load_model(tmp_path)
    with pytest.raises(LookaheadError, match="is not a folder"):
        load_model(tmp_path / "config.json")

"""Settings and modes that are refused before any pass, and leave no trace."""

from typing import Any

import pytest
from helpers.models import VOCAB, fresh_model, prompts, tiny_model
from helpers.refusals import Passes, refused, unchanged
from transformers import GenerationConfig

import lookahead
from lookahead import Jacobi, Lookahead, LookaheadError

pytestmark = pytest.mark.usefixtures("self_tested")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"window_size": 0}, r"Lookahead\(window_size=\) must be at least 1: got 0"),
        ({"windows": 3}, "Unknown field 'windows' for Lookahead: it knows.*window_size"),
        ({"strategy": "medusa2"}, "Unknown strategy 'medusa2'"),
        ({"strategy": ["jacobi"]}, "Unknown strategy"),
        ({"strategy": "jacobi", "window_size": 3}, "Unknown field 'window_size' for Jacobi"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], match: str, passes: Passes) -> None:
    """Impossible numbers, wrong types and unknown fields, given as a dict."""
    refused(passes, tiny_model("llama"), match, lookahead_strategy=settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"use_lookahead": value}, "use_lookahead must be True or False") for value in ("yes", 1, 0, "", [True])]
    + [
        ({"lookahead_strategy": value}, "lookahead_strategy must be")
        for value in ("lookahead", 5, [("window_size", 3)], Lookahead, object(), True)
    ]
    + [
        ({"lookahead_strategy": Jacobi(initial_guess=[3, VOCAB])}, f"holds token {VOCAB}: this model's vocabulary ends")
    ],
    ids=range(12),
)
def test_values_of_other_types(settings: dict[str, Any], match: str, passes: Passes) -> None:
    """What is merely true is more likely a mistake; a guess is known to be wrong only when the model is."""
    refused(passes, tiny_model("llama"), match, **settings)


@pytest.mark.usefixtures("works_afterwards")
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_beams": 2}, "cannot be combined with num_beams=2: set num_beams=1, or drop use_lookahead"),
        ({"num_beams": 3, "do_sample": True}, "cannot be combined with num_beams=3"),
        ({"prompt_lookup_num_tokens": 3}, "cannot be combined with prompt_lookup_num_tokens=3: drop prompt_lookup"),
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
    config = GenerationConfig(use_lookahead=True, cache_implementation="paged")  # continuous batching
    match = "cannot be combined with cache_implementation='paged'"
    refused(passes, tiny_model("llama"), match, generation_config=config)


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


@pytest.mark.parametrize("attribute", ["_device_mesh", "_tp_size"])
def test_sharded_models(attribute: str, passes: Passes) -> None:
    """Ranks that no group connects cannot be told trees."""
    model = fresh_model("llama")
    setattr(model, attribute, 2)
    refused(passes, model, "LlamaForCausalLM is sharded over several processes .tensor parallelism.*to be initialised")
    for way in (Lookahead(window_size=3, ngram_size=3, verification_set_size=3), Jacobi()):
        refused(passes, model, "sharded over several processes", lookahead_strategy=way)

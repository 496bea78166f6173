"""The bundled EAGLE head: complete, small, exact, and of use."""

import json
from typing import Any

import pytest
import torch

import lookahead
from lookahead import Lookahead
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.cli.prompts import PROMPTS
from lookahead.eagle import Eagle, EagleHead


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return lookahead.load_bundled()


def test_files_are_few_and_small(loaded: tuple[Any, Any]) -> None:
    assert {file.name for file in BUNDLED_EAGLE.iterdir()} == {
        "README.md",
        "config.json",
        "evaluation.json",
        "model.safetensors",
    }
    assert sum(file.stat().st_size for file in BUNDLED_EAGLE.iterdir()) <= 4_000_000
    held = json.loads((BUNDLED_EAGLE / "evaluation.json").read_text())
    assert held["parts"]["right_0"] > 0.6
    head = EagleHead.from_pretrained(BUNDLED_EAGLE, model=loaded[0])
    assert (head.network.sizes.version, head.network.sizes.base_model) == (3, "tiny-coder")
    assert head.taps(loaded[0]) == ("layer.2", "layer.4", "norm")


@pytest.mark.parametrize("sources", [None, ("eagle",)])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_texts_are_plain_ones_in_fewer_passes(loaded: tuple[Any, Any], sources: Any, sampling: dict[str, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    common = {**inputs, **sampling, "max_new_tokens": 48, "return_dict_in_generate": True}
    torch.manual_seed(0)
    plain = model.generate(**common)
    torch.manual_seed(0)
    ours = model.generate(**common, custom_generate=Eagle(BUNDLED_EAGLE, sources=sources, nodes=24, seed=0))
    assert torch.equal(plain.sequences, ours.sequences)
    assert ours.stats.mean_acceptance_length > 1.5


@pytest.mark.slow
def test_the_head_adds_to_the_free_sources(loaded: tuple[Any, Any]) -> None:
    """Tokens a pass at 24 nodes, temperature 0.8, over the command line's prompts."""
    model, tokenizer = loaded
    written: dict[str, float] = {}
    cold: dict[str, Any] = {"nodes": 24, "remember": False, "seed": 0}
    for name, strategy in {"free": Lookahead(**cold), "both": Eagle(BUNDLED_EAGLE, **cold)}.items():
        tokens = passes = 0
        for seed, prompt in enumerate(PROMPTS[:4]):
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            torch.manual_seed(seed)
            settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 96}
            output = model.generate(**inputs, **settings, return_dict_in_generate=True, custom_generate=strategy)
            tokens, passes = tokens + output.stats.emitted, passes + output.stats.row_steps
        written[name] = tokens / passes
    assert written["both"] > 1.1 * written["free"], written

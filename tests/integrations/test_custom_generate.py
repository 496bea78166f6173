"""The folder for ``custom_generate``: everything that ``generate`` can do, offline."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import counting_model, letters_tokenizer, prompts, tiny_model
from helpers.streaming import Puts
from transformers import AutoModelForCausalLM

from lookahead import Lookahead

HUB = Path(__file__).parents[2] / "hub"
TRUSTED: dict[str, Any] = {"custom_generate": str(HUB), "trust_remote_code": True}

pytestmark = pytest.mark.usefixtures("augmented")


def written(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompts(2), max_new_tokens=30, **settings)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_texts_are_plain_ones(sample: bool) -> None:
    model = tiny_model("llama")
    plain = written(model, do_sample=sample)
    assert written(model, do_sample=sample, **TRUSTED).tolist() == plain.tolist()
    output = written(model, do_sample=sample, return_dict_in_generate=True, **TRUSTED)
    assert output.sequences.tolist() == plain.tolist() and output.stats.steps
    strategy = Lookahead(window_size=3, ngram_size=3, verification_set_size=3, seed=0)
    assert written(model, do_sample=sample, lookahead_strategy=strategy, **TRUSTED).tolist() == plain.tolist()
    assert not hasattr(written(model, use_lookahead=False, return_dict_in_generate=True, **TRUSTED), "stats")


def test_streams_and_stop_strings() -> None:
    model, tokenizer = counting_model(), letters_tokenizer()
    kept = []
    for way in ({}, TRUSTED):
        streamer = Puts()
        settings = {"stop_strings": "fg", "tokenizer": tokenizer, "streamer": streamer, "max_new_tokens": 40}
        ids = model.generate(**prompts(1), do_sample=False, **settings, **way)
        kept.append((ids.tolist(), [put.tolist() for put in streamer.puts], streamer.ends))
    assert kept[0] == kept[1]
    assert 2 < len(kept[0][1]) < 42


def test_a_model_that_holds_the_folder(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    shutil.copytree(HUB / "custom_generate", tmp_path / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float64)
    output = model.generate(**prompts(1), max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    assert output.stats.steps <= 20
    plain = type(model).generate(model, **prompts(1), max_new_tokens=20, do_sample=False)
    assert output.sequences.tolist() == plain.tolist()


def test_the_folder_says_what_it_is() -> None:
    assert "- custom_generate" in (HUB / "README.md").read_text()
    assert (HUB / "custom_generate" / "requirements.txt").read_text().split() == ["lookahead-decoding"]

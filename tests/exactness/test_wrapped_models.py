"""Models that other libraries have wrapped: adapters, compiled forwards, weights on several devices or on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from helpers.marks import few
from helpers.models import fresh_model, prompts, run, same_as_plain
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lookahead import Lookahead

pytestmark = pytest.mark.usefixtures("augmented")
STRATEGIES = [None, Lookahead(window_size=4, ngram_size=3, verification_set_size=4, seed=0)]


def same(model: Any, batch: int = 2, samples: Sequence[bool] = (False, True), new_tokens: int = 24) -> None:
    for sample in samples:
        for strategy in STRATEGIES:
            settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": sample, "pad_token_id": 0}
            output = same_as_plain(model, prompts(batch), strategy, **settings)
            assert not output.stats.plain and output.stats.steps


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads an old name
def test_an_adapter() -> None:
    base = fresh_model("llama")
    before, _ = run(base, prompts(2), max_new_tokens=24, do_sample=False)
    settings: Any = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    model = get_peft_model(base, LoraConfig(**settings))
    same(model)
    after, _ = run(model, prompts(2), max_new_tokens=24, do_sample=False)
    assert after.tolist() != before.tolist()  # the adapter counts
    with model.disable_adapter():
        off, _ = run(model, prompts(2), max_new_tokens=24, do_sample=False, use_lookahead=True)
    assert off.tolist() == before.tolist()
    same(model.merge_and_unload())


@pytest.mark.parametrize("way", few(["function", "method", "forward"], "function", "forward"))
def test_a_compiled_model(way: str) -> None:
    """Each shape of a pass is compiled anew, so there are few."""
    model = fresh_model("llama", num_hidden_layers=1)
    if way == "function":
        model = torch.compile(model, backend="eager")
    elif way == "method":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    same(model, samples=[True], new_tokens=6)
    torch._dynamo.reset()


def test_a_device_map(tmp_path: Path) -> None:
    fresh_model("llama").save_pretrained(tmp_path)
    for places in ("cpu", "auto", {"": "cpu"}):
        same(AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, dtype=torch.float64))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offloaded_weights(where: str, tmp_path: Path) -> None:
    model = fresh_model("llama")
    if where == "memory":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), torch.device("cpu"))
    same(model)

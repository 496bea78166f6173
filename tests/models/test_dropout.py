"""Models in training mode whose passes are made by chance are left to transformers' own loop."""

from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from torch import nn

from lookahead.support.route import training_obstacle

MADE: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"attention_dropout": 0.2}, "attention_dropout=0.2"),
    "gpt2": ({"resid_pdrop": 0.3, "attn_pdrop": 0.0, "embd_pdrop": 0.0}, "Dropout(p=0.3)"),
    "mixtral": ({"router_jitter_noise": 0.1}, "jitter_noise=0.1"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_makes_passes_differ_is_named(name: str) -> None:
    made, named = MADE[name]
    model = fresh_model(name, **made)
    assert training_obstacle(model) is None
    found = training_obstacle(model.train())
    assert found is not None and f"({named}" in found
    quiet = dict.fromkeys(made, 0.0)
    assert training_obstacle(fresh_model(name, **quiet).train()) is None


def test_one_module_or_one_rate_of_the_config_is_enough() -> None:
    """As they are set to estimate how sure a model is; a rate of the config counts, too."""
    model = fresh_model("gpt2", resid_pdrop=0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not model.training
    assert "(Dropout(p=0.1))" in str(training_obstacle(model))
    model = fresh_model("llama").train()
    assert training_obstacle(model) is None
    model.config.hidden_dropout = 0.1
    assert "(hidden_dropout=0.1 of LlamaForCausalLM's config)" in str(training_obstacle(model))


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_the_text_is_plain_decodings(name: str, sample: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = fresh_model(name, **MADE[name][0]).train()
    for seed in range(3):
        output = same_as_plain(model, prompts(2), do_sample=sample, max_new_tokens=12, seed=seed)
        (reason,) = output.stats.plain
        assert "is in training mode, where no two passes are alike" in reason
    assert caplog.text.count("call model.eval()") == 1
    assert same_as_plain(model.eval(), prompts(2), max_new_tokens=12).stats.steps > 0


@pytest.mark.usefixtures("augmented")
def test_training_mode_by_itself_is_decoded() -> None:
    with torch.random.fork_rng():
        output = same_as_plain(fresh_model("llama").train(), prompts(2), do_sample=True, max_new_tokens=12)
    assert output.stats.steps > 0 and not output.stats.plain

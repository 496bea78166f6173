"""Fresh EAGLE heads, and what of their training is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model
from helpers.models import VOCAB, fresh_model
from helpers.training import texts

from jacobi import LookaheadError
from lookahead.eagle import EagleSettings, train
from lookahead.heads.eagle.training import fresh_head
from lookahead.training.data import Example

SETTINGS = EagleSettings(unroll=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0, learning_rate=1e-3)


def model_of(**changes: Any) -> Any:
    return fresh_model("llama", num_hidden_layers=4, **changes).float()


def test_a_small_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    model = model_of()
    frequent = [7, 3, 40, 11, 5]
    examples = [Example.of(frequent * 3 + [1, 2], [True] * 15 + [True, False])]
    head = fresh_head(model, dataclasses.replace(SETTINGS, draft_vocab=5), examples)
    ids = head.network.scored()
    assert ids.tolist() == sorted(frequent)
    assert head.network.lm_head is not None
    torch.testing.assert_close(head.network.lm_head.weight, model.lm_head.weight[ids].float())


def test_a_fresh_head_begins_as_the_models_last_layer() -> None:
    model = model_of(num_key_value_heads=2)
    head = fresh_head(model, dataclasses.replace(SETTINGS, feature_layers=(1, 2, 4), feed_forward=80))
    ours, theirs = head.network.layers[0], model.model.layers[-1]
    assert torch.equal(ours.self_attn.k_proj.weight[:, 32:], theirs.self_attn.k_proj.weight)
    assert torch.equal(ours.hidden_norm.weight, theirs.input_layernorm.weight)
    width = theirs.mlp.up_proj.weight.shape[0]
    assert width < 80
    assert torch.equal(ours.mlp.up_proj.weight[:width], theirs.mlp.up_proj.weight)
    assert not ours.mlp.down_proj.weight[:, width:].any(), "what is wider gives nothing yet"
    passed_on = head.network.fc.weight[:, 32:64].diagonal().mean().item()
    assert passed_on == pytest.approx(1.0, abs=0.05), "the feature of layer 2, the last that is not the output"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab": VOCAB + 1}, f"draft_vocab={VOCAB + 1}: Llama.* has {VOCAB} tokens"),
        ({"feature_layers": (1, 2, 9)}, r"reads \[1, 2, 9\], and Llama.* has 4 layers"),
        ({"block_size": 513}, "has positions for 512 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        train(model_of(), texts(), dataclasses.replace(SETTINGS, **settings), tmp_path)
    assert not any(tmp_path.iterdir())


def test_models_that_no_head_can_learn_from(tmp_path: Path) -> None:
    model = model_of()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(LookaheadError, match="passes no gradient on to the heads before it"):
        train(model, texts(), dataclasses.replace(SETTINGS, own_output=False), tmp_path)
    with pytest.raises(LookaheadError, match="is an encoder-decoder model: EAGLE heads need a causal one"):
        train(seq2seq_model("t5"), texts(), SETTINGS, tmp_path)
    assert not any(tmp_path.iterdir())

"""What EAGLE heads look like in files: configs and tensors that do not fit are named, whatever is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network, tensors_of, write_head
from helpers.models import VOCAB, fresh_model
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from jacobi import LookaheadError
from lookahead.eagle import EagleHead
from lookahead.heads.eagle.network import EagleNetwork, PairCache

LAYERS = (2, 3, 4)


def rewritten(folder: Path, network: EagleNetwork, *, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """A head's folder with other tensors (None = without it) and other values in config.json."""
    write_head(folder, network)
    wanted: dict[str, Tensor | None] = tensors_of(network) | (tensors or {})
    save_file({name: each for name, each in wanted.items() if each is not None}, folder / "model.safetensors")
    held = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(held))
    return folder


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads in config.json must be a whole number .* got '4'"),
        ({"num_attention_heads": 7}, "fit projections of 32 and 16 rows: got num_attention_heads=7, head_dim=8"),
        ({"num_attention_heads": 7, "head_dim": None}, "fit projections of 32 and 16 rows"),
        ({"num_attention_heads": None, "head_dim": None}, "must say num_attention_heads"),
        ({"num_attention_heads": 32, "head_dim": 1}, "an even number of channels, .* got num_attention_heads=32"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps in config.json must be a number above 0: got 'x'"),
        ({"rope_theta": "x"}, "rope_theta in config.json must be a number above 0"),
        ({"rope_scaling": "x"}, "rope_scaling in config.json must be an object"),
        ({"rope_scaling": {"type": "foo", "factor": 2}}, "RoPE cannot be as config.json says, .*'foo'"),
        ({"max_position_embeddings": 2.5}, "max_position_embeddings in config.json must be a whole number"),
        ({"eagle_config": 3}, "eagle_config in config.json must be an object: got 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "eagle_config.eagle_aux.* a list of layer numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}}, "a list of layer numbers: got .True"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "target_hidden_size": 32},
            "are not 2 features of",
        ),
        ({"target_hidden_size": "32"}, "target_hidden_size in config.json must be a whole number"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config in config.json must be an object"),
        ({"speculators_config": {"verifier": "x"}}, "speculators_config.verifier in config.json must be an object"),
        ({"tensors": {"fc.weight": torch.ones(2)}}, r"fc.weight is \[2\], expected a matrix"),
        ({"tensors": {"layers.x.mlp.up_proj.weight": torch.ones(2)}}, "has layers.x.mlp.up_proj.weight besides"),
        ({"tensors": {"layers.3.mlp.up_proj.weight": torch.ones(2)}}, "lacks layers.1"),
        ({"tensors": {"norm.weight": None}}, "no whole head of EAGLE-3: it lacks norm.weight"),
        ({"tensors": {"lm_head.weight": torch.ones(())}}, "lm_head.weight is .*, expected a matrix"),
        ({"tensors": {"midlayer.self_attn.q_norm.weight": torch.ones(8)}}, "lacks layers.0.self_attn.k_norm.weight"),
        (
            {
                "tensors": {
                    f"midlayer.self_attn.{part}_proj.weight": torch.ones(24, 64, dtype=torch.float64) for part in "kv"
                }
            },
            "4 heads of queries cannot share 3 of keys",
        ),
    ],
)
def test_configs_and_tensors_that_are_of_no_use(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, random_network(3, feature_layers=LAYERS), **config)
    with pytest.raises(LookaheadError, match=match):
        EagleHead.from_pretrained(folder)


def test_what_a_config_leaves_open(tmp_path: Path) -> None:
    """Null is nothing, and numbers that the tensors tell are not asked for."""
    nothing = dict.fromkeys(("rope_theta", "rms_norm_eps", "max_position_embeddings", "rope_scaling", "head_dim"))
    folder = rewritten(tmp_path, random_network(3, feature_layers=LAYERS), **nothing, vocab_size=5, hidden_size=999)
    sizes = EagleHead.from_pretrained(folder, model=fresh_model("llama", num_hidden_layers=7)).network.sizes
    assert (sizes.eps, sizes.max_positions, sizes.rope["rope_theta"], sizes.head_size) == (1e-6, 2048, 10000.0, 8)


def test_qwen3s_queries_and_keys_are_normed_before_they_are_turned() -> None:
    """By hand, over one pair, whose attention is its own value; and that the norms count where there are more."""
    attention = random_network(3, query_key_norm=True).layers[0].self_attn
    inputs, positions = torch.randn(5, 64, dtype=torch.float64), torch.arange(5)
    network = random_network(3)
    turns = tuple(each[0] for each in network.rotary(inputs[None], positions[None]))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    with torch.no_grad():
        said = attention(inputs, turns, PairCache(1), mask)
        queries, keys = (
            norm(projection(inputs).view(5, -1, 8)).transpose(0, 1)
            for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *turns, unsqueeze_dim=0)
        values = attention.v_proj(inputs).view(5, -1, 8).transpose(0, 1).repeat_interleave(2, 0)
        scores = queries @ keys.repeat_interleave(2, 0).transpose(1, 2) / 8**0.5
        seen = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
        torch.testing.assert_close(said, attention.o_proj(seen.transpose(0, 1).flatten(1)))


@pytest.mark.parametrize("count", [2, 4])
def test_there_may_be_more_or_fewer_than_three_features(count: int, tmp_path: Path) -> None:
    """As many as the user names, or as fit the model; without names they are asked for."""
    model, layers = fresh_model("llama", num_hidden_layers=7), tuple(range(count))
    folder = write_head(tmp_path, random_network(3, features=count))
    head = EagleHead.from_pretrained(folder, model=model, feature_layers=layers)
    assert (head.network.sizes.features, head.network.sizes.target_size) == (count, 32)
    assert EagleHead.from_pretrained(folder, feature_layers=layers).taps(model) == head.taps(model)
    with pytest.raises(LookaheadError, match=rf"takes {count} features, its config names none.* Give feature_layers="):
        EagleHead.from_pretrained(folder, model=model)
    with pytest.raises(LookaheadError, match=rf"takes {count} features, it reads \[1\]"):
        EagleHead.from_pretrained(folder, model=model, feature_layers=(1,))
    with pytest.raises(LookaheadError, match=r"feature_layers=|are not 3 features"):
        EagleHead.from_pretrained(folder).check(model)
    for wrong in ("abc", 3, (1, "2"), (-1, 2), (True,)):
        with pytest.raises(LookaheadError, match="feature_layers= must be a tuple of layer numbers"):
            EagleHead.from_pretrained(folder, feature_layers=wrong)  # type: ignore[arg-type]
    given = EagleHead(random_network(3), feature_layers=[2, 3, 4])  # type: ignore[arg-type]
    assert given.feature_layers == (2, 3, 4)


MARKED = torch.arange(VOCAB) % 2 == 0  # 24 of 48 tokens


def small(**changes: Any) -> tuple[EagleNetwork, dict[str, Any]]:
    network = random_network(3, feature_layers=LAYERS, draft_vocab_size=24)
    return network, {"d2t": torch.arange(24), "t2d": MARKED} | changes


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"t2d": None, "d2t": None}, "scores 24 tokens, and Llama.* has 48: .* or lacks the d2t or t2d"),
        ({"t2d": ~MARKED}, "d2t gives other tokens than t2d"),
        ({"d2t": 2 * torch.arange(24)}, "d2t holds the tokens themselves: expected offsets"),
        ({"d2t": 2 * torch.arange(24), "t2d": None}, "proposes tokens up to 69, .* d2t holds tokens in place of"),
        ({"t2d": MARKED[:40], "d2t": None}, "t2d marks 20 tokens, and lm_head.weight scores 24"),
        ({"t2d": torch.cat([MARKED, torch.zeros(9).bool()])}, "for a vocabulary of 57, and Llama.* has 48"),
        ({"t2d": MARKED.float()}, "t2d is torch.float32"),
        ({"t2d": MARKED[None]}, r"t2d is torch.bool \[1, 48\]"),
    ],
)
def test_small_vocabularies_that_do_not_fit(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    network, tensors = small(**changes)
    folder = rewritten(tmp_path, network, tensors=tensors)
    with pytest.raises(LookaheadError, match=match):
        EagleHead.from_pretrained(folder, model=fresh_model("llama", num_hidden_layers=7))


def test_vocabularies_may_be_padded_or_marked_by_numbers(tmp_path: Path) -> None:
    model = fresh_model("llama", num_hidden_layers=7, vocab_size=64)
    network, tensors = small(t2d=MARKED.to(torch.uint8), d2t=None)
    for changes in (tensors, tensors | {"t2d": MARKED, "d2t": torch.arange(24)}):
        head = EagleHead.from_pretrained(rewritten(tmp_path, network, tensors=changes), model=model)
        assert head.network.scored().tolist() == list(range(0, 48, 2))


def test_eagle_1_has_only_its_config_to_tell_the_vocabulary(tmp_path: Path) -> None:
    model, network = fresh_model("llama"), random_network(1)
    EagleHead.from_pretrained(rewritten(tmp_path, network, vocab_size=VOCAB), model=model)
    with pytest.raises(LookaheadError, match=r"for a vocabulary of 32000, and Llama.* has 48"):
        EagleHead.from_pretrained(rewritten(tmp_path, network, vocab_size=32000), model=model)


def test_a_vocabulary_is_the_files_until_it_was_checked(tmp_path: Path) -> None:
    """And then holds against other models."""
    network, tensors = small()
    head = EagleHead.from_pretrained(rewritten(tmp_path, network, tensors=tensors))
    assert head.network.sizes.vocab_size == VOCAB
    with pytest.raises(LookaheadError, match=r"for a vocabulary of 48, and Llama.* has 90"):
        head.check(fresh_model("llama", num_hidden_layers=7, vocab_size=90))

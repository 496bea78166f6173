"""Encoder-decoder models: every family writes what plain ``generate`` writes, through trees, or is refused by name."""

from typing import Any

import pytest
import torch
import transformers
from helpers.encoder_decoders import START, TREES, config_of, from_config, seq2seq_model, sources
from helpers.marks import few
from helpers.models import F32, VOCAB, run, same_as_plain
from helpers.refusals import refuses
from transformers import DynamicCache, EncoderDecoderCache

from jacobi import LookaheadError, TokenTree
from lookahead import Jacobi, Lookahead, Medusa
from lookahead.medusa import MedusaHeads
from lookahead.models.families.registry import overrides_for
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.session import bare_model, stepwise
from lookahead.support import route as support

STRATEGIES = {
    "automatic": Lookahead(seed=0),
    "w5n4g4": Lookahead(window_size=5, ngram_size=4, verification_set_size=4, seed=0),
    "w3n3g2": Lookahead(window_size=3, ngram_size=3, verification_set_size=2, seed=0),
    "jacobi": Jacobi(mode="jacobi", block_size=6, seed=0),
    "gauss-seidel": Jacobi(mode="gauss-seidel", block_size=6, seed=0),
    "hybrid": Jacobi(mode="hybrid", block_size=6, seed=0),
    "sliding": Jacobi(mode="sliding", block_size=6, seed=0),
}
pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("name", TREES)
def test_family_follows_trees(name: str) -> None:
    """The verdict of each family; one that silently turns to another fails here."""
    model = seq2seq_model(name)
    support.check_model(model)
    support.self_test(model)


# One family for each way in which encoders and decoders differ.
QUICK = ("bart", "bert2gpt2", "led", "longt5", "marian", "moonshine", "switch_transformers", "t5", "t5gemma", "whisper")


@pytest.mark.parametrize("batch", few([1, 3], 3))
@pytest.mark.parametrize("name", few(TREES, *QUICK))
def test_family_is_exact(name: str, batch: int) -> None:
    """Greedy and sampled, through a tree of each kind and a chain."""
    model, inputs = seq2seq_model(name), sources(name, batch)
    for kind in ("automatic", "w5n4g4", "hybrid"):
        same_as_plain(model, inputs, STRATEGIES[kind], max_new_tokens=24)
        same_as_plain(model, inputs, STRATEGIES[kind], max_new_tokens=20, do_sample=True, temperature=0.6)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_fewer_passes_than_tokens(name: str) -> None:
    """Random greedy texts soon repeat themselves, and drafts then come true."""
    output = same_as_plain(seq2seq_model(name), sources(name, 1), Lookahead(seed=0, nodes=16), max_new_tokens=50)
    assert output.stats.steps < 35


def test_no_text_in_the_family_is_refused_by_surprise() -> None:
    """Decoders that look at the last token only, or at one token at a time, are refused before anything is written."""
    small = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "hidden_size": 32, "ngram": 2}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "decoder_start_token_id": START}
    model = from_config(transformers.ProphetNetConfig(vocab_size=VOCAB, **sizes, **heads, **small))
    with pytest.raises(LookaheadError, match="ProphetNetForConditionalGeneration did not run a pass with a tree mask"):
        model.generate(**sources("bart", 1), use_lookahead=True, max_new_tokens=4)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    words = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"], "decoder_start_token_id": START}
    model = from_config(transformers.FSMTConfig(d_model=32, **words, **layers, **small))
    refuses("FSMTForConditionalGeneration", model.generate, **sources("bart", 1), use_lookahead=True, max_new_tokens=4)


def test_own_inputs_are_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """A model that makes more of a step's input than its last tokens is decoded plainly, and told by name."""

    class Delaying(transformers.BartForConditionalGeneration):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = Delaying(config_of("bart")).eval()
    settings = {**sources("bart", 2), "max_new_tokens": 4, "return_dict_in_generate": True}
    plain = model.generate(**settings)
    ours = model.generate(**settings, use_lookahead=True)
    assert torch.equal(plain.sequences, ours.sequences)
    (reason,) = ours.stats.plain
    assert "Delaying prepares the inputs of each step in its own way" in reason
    assert [record.levelname for record in caplog.records if reason in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("changes", [{"moe_eval_capacity_token_fraction": 0.5}, {"second_expert_policy": "sampling"}])
def test_experts_chosen_by_chance_are_handed_over(changes: dict[str, Any]) -> None:
    config = config_of("nllb-moe")
    for key, value in changes.items():
        setattr(config, key, value)
    route, reason = support.route(from_config(config))
    assert route == "plain"
    assert "chooses experts by chance or by what else is in a pass" in (reason or "")


SETTINGS: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [7, 11, 13]},
    "bad_words": {"bad_words_ids": [[8], [12, 5]]},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "suppress_at_begin": {"begin_suppress_tokens": [4, 5, 6]},
    "scores": {"output_scores": True, "output_logits": True},
    "several": {"num_return_sequences": 2, "do_sample": True},
    "no_cache": {"use_cache": False},
    "static_cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["mbart", "t5"])
def test_settings(name: str, setting: str) -> None:
    settings = SETTINGS[setting]
    for kind in ("automatic", "hybrid"):
        same_as_plain(seq2seq_model(name), sources(name, 2), STRATEGIES[kind], max_new_tokens=16, **settings)


def test_trajectories_and_stats() -> None:
    strategy = Jacobi(mode="jacobi", block_size=4, return_trajectory=True, seed=0)
    output = same_as_plain(seq2seq_model("bart"), sources("bart", 1), strategy, max_new_tokens=12)
    assert len(output.trajectories[0]) == output.stats.steps - 1
    assert "stats" not in output, "what is an item is taken apart by rows in Whisper's generate"


@pytest.mark.parametrize("name", ["bart", "t5", "m2m_100", "umt5", "whisper", "t5gemma"])
@pytest.mark.parametrize("padded", [False, True])
def test_decoder_prompts(name: str, padded: bool) -> None:
    """A text to go on from, with padding on the left where rows differ."""
    model, inputs = seq2seq_model(name), sources(name, 3)
    prompt = torch.tensor([[START, 9, 10, 11, 12], [START, 9, 7, 30, 31], [START, 20, 21, 22, 23]])
    if padded:
        if name == "t5gemma":
            pytest.skip("a row that is padded makes its prompt's pass NaN")
        mask = torch.ones_like(prompt)
        mask[1, :2] = mask[2, :1] = 0
        inputs |= {"decoder_attention_mask": mask}
    for kind in ("automatic", "w3n3g2", "hybrid"):
        same_as_plain(model, inputs | {"decoder_input_ids": prompt}, STRATEGIES[kind], max_new_tokens=16)


@pytest.mark.parametrize("name", ["led", "nllb-moe"])
def test_forgotten_padding_is_refused(name: str) -> None:
    model, inputs = seq2seq_model(name), sources(name, 2)
    inputs["decoder_input_ids"] = torch.tensor([[START, 9, 10], [1, START, 9]])
    same_as_plain(model, inputs, max_new_tokens=12)
    inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with pytest.raises(LookaheadError, match="forgets decoder_attention_mask after the prompt"):
        model.generate(**inputs, use_lookahead=True, max_new_tokens=4)


@pytest.mark.parametrize("name", ["bart", "m2m_100"])
def test_pad_tokens_in_the_text(name: str) -> None:
    """M2M100 gives a pad token that the text itself holds the position of padding."""
    model, inputs = seq2seq_model(name), sources(name, 2)
    bias = {(1,): 40.0}
    same_as_plain(model, inputs, STRATEGIES["w5n4g4"], max_new_tokens=16, sequence_bias=bias)
    prompt = torch.tensor([[START, 1, 9, 1], [START, 9, 1, 8]])
    for kind in ("automatic", "hybrid"):
        same_as_plain(model, inputs | {"decoder_input_ids": prompt}, STRATEGIES[kind], max_new_tokens=16)


@pytest.mark.parametrize("name", ["bart", "led", "whisper", "t5gemma"])
def test_up_to_the_last_position(name: str) -> None:
    """Drafts stop where the table of positions does."""
    model = seq2seq_model(name)
    assert ModelTraits.of(model).position_table == 64
    for batch in (1, 2):
        for kind in ("automatic", "w5n4g4", "sliding"):
            same_as_plain(model, sources(name, batch), STRATEGIES[kind], max_new_tokens=63)


def test_positions_that_change_with_the_length() -> None:
    """From there on every pass is transformers' own, over a cache of both kinds."""
    config = config_of("moonshine")
    config.max_position_embeddings = 16
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.9}
    config.rope_parameters = rope
    model = from_config(config, F32)
    for batch in (1, 2):
        for kind in ("automatic", "w3n3g2"):
            same_as_plain(model, sources("moonshine", batch), STRATEGIES[kind], max_new_tokens=28)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_eager_attention(name: str) -> None:
    """Masks are added to scores there, and T5's biases to masks."""
    model = from_config(config_of(name), F32)
    model.set_attn_implementation("eager")
    for batch in (1, 3):
        same_as_plain(model, sources(name, batch), STRATEGIES["w3n3g2"], max_new_tokens=16)


def test_what_is_refused() -> None:
    model, inputs = seq2seq_model("bart"), sources("bart", 1)
    heads = MedusaHeads(32, VOCAB, num_heads=2)
    for given, message in (
        ({"lookahead_strategy": Lookahead(static=True)}, "static=True cannot be used: an encoder-decoder model"),
        ({"lookahead_strategy": Medusa(heads=heads)}, "encoder-decoder"),
        ({"decoder_input_ids": torch.tensor([[START, VOCAB + 3]])}, f"Token id {VOCAB + 3} is outside the vocabulary"),
        ({"decoder_input_ids": torch.full((1, 65), START)}, "position table ends at 64"),
        ({CACHE: DynamicCache()}, "needs a cache for its cross-attention too: got a DynamicCache"),
    ):
        refuses(message, model.generate, **inputs, **given, use_lookahead=True, max_new_tokens=4)


@pytest.mark.parametrize("name", ["bart", "t5", "m2m_100"])
def test_cache_of_an_earlier_call(name: str) -> None:
    """A user's cache is filled, returned, and goes on being usable: by plain decoding and by ours."""
    model, inputs = seq2seq_model(name), sources(name, 2)
    settings = {"max_new_tokens": 8, "return_dict_in_generate": True}
    for first in (False, True):
        for then in (False, True):
            plain, ours = (EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2))
            expected = model.generate(**inputs, **{CACHE: plain}, **settings)
            got = model.generate(**inputs, **{CACHE: ours}, use_lookahead=first, **settings)
            assert got[CACHE] is ours and got.sequences.tolist() == expected.sequences.tolist()
            again = {"decoder_input_ids": expected.sequences} | settings
            expected = model.generate(**inputs, **{CACHE: plain}, **again)
            got = model.generate(**inputs, **{CACHE: ours}, use_lookahead=then, **again)
            assert got.sequences.tolist() == expected.sequences.tolist()
            assert ours.get_seq_length() == plain.get_seq_length()
            assert ours.is_updated == plain.is_updated


@pytest.fixture
def whisper() -> Any:
    """A Whisper whose vocabulary ends in two timestamps, as its own ``generate`` wants it."""
    model = from_config(config_of("whisper"), F32)
    ids = {"eos_token_id": 2, "no_timestamps_token_id": 40, "decoder_start_token_id": START, "pad_token_id": 2}
    model.generation_config = transformers.GenerationConfig(**ids, max_length=40, is_multilingual=False)
    return model


@pytest.mark.parametrize("frames", [20, 50])
@pytest.mark.parametrize("timestamps", [False, True])
def test_whispers_own_generate(whisper: Any, frames: int, timestamps: bool) -> None:
    """Short and long recordings; the long ones call ``generate`` for piece after piece."""
    features = torch.randn((2, 8, frames), generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": features, "attention_mask": torch.ones((2, frames), dtype=torch.long)}
    settings = {"return_timestamps": timestamps or frames > 20, "max_new_tokens": 12, "return_dict_in_generate": False}
    plain, _ = run(whisper, inputs, **settings)
    for kind in ("automatic", "hybrid"):
        config = whisper.generation_config.to_dict()
        ours, _ = run(whisper, inputs, use_lookahead=True, lookahead_strategy=STRATEGIES[kind], **settings)
        assert torch.equal(plain, ours)
        assert whisper.generation_config.to_dict() == config


@pytest.mark.parametrize(("name", "modules"), [("bart", 1), ("t5", 1), ("umt5", 2), ("t5gemma", 0), ("whisper", 1)])
def test_position_modules(name: str, modules: int) -> None:
    """What is told positions: the decoder's tables and biases. The encoder's see no pass of ours."""
    model = seq2seq_model(name)
    found = overrides_for(model.get_decoder())
    assert len(found) == modules
    same_as_plain(model, sources(name, 2), STRATEGIES["w3n3g2"], max_new_tokens=6)
    assert all(override.name not in vars(override.owner) for override in found), "a method was left replaced"


@torch.no_grad()
@pytest.mark.parametrize("name", ["bart", "t5", "m2m_100", "bert2roberta"])
def test_passes_know_plain_positions(name: str) -> None:
    """The self-test compares with one-token passes, so that positions which are all wrong by the same amount show."""
    model = seq2seq_model(name)
    prompt = torch.tensor([[START, 8, 9, 10]])
    with bare_model(model, prompt, 8) as fused:
        tree = TokenTree.from_paths(11, [[12, 13], [14, 15]])
        logits = fused.forward([tree]).logits[0].float()
    lines = [stepwise(model, prompt, tokens)[0] for tokens in ([11, 12, 13], [11, 14, 15])]
    torch.testing.assert_close(logits[:3], lines[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[[0, 3, 4]], lines[1], atol=1e-5, rtol=1e-5)

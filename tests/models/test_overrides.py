"""Models that count cache slots by themselves (ALiBi, GPT-Neo): they read positions in our passes only."""

from typing import Any

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model
from helpers.marks import BATCH_AND_SAMPLE
from helpers.models import F32, VOCAB, Tiny, fresh_model, made, prompts, run, same_as_plain, shared
from helpers.models import MODELS as TINY
from helpers.threads import together

from jacobi import LookaheadError
from lookahead import Jacobi, Lookahead
from lookahead.models.families.overrides import PassPositions, overriding
from lookahead.models.families.registry import FAMILIES, overrides_for
from lookahead.runtime.session import bare_model
from lookahead.support.route import route

pytestmark = pytest.mark.usefixtures("augmented")

_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
_WIDTHS = _SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.3}
_DECODER |= {"is_decoder": True, "is_encoder_decoder": False, "max_position_embeddings": 64}
_DECODER |= {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_FALCON = _WIDTHS | {"alibi": True, "multi_query": False}
_ROFORMER = _WIDTHS | {"intermediate_size": 48, "max_position_embeddings": 64, "is_decoder": True, "pad_token_id": 0}
_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
_NEO |= _SIZES | {"window_size": 6, "max_position_embeddings": 64}

# One model of each kind that counts slots; the last ones number their tokens by the cache's length.
SLOT_COUNTERS = {
    "bart": Tiny("BartConfig", _DECODER),
    "marian": Tiny("MarianConfig", _DECODER | {"decoder_start_token_id": 0}),
    "bloom": Tiny("BloomConfig", _SIZES | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, F32, None),
    "bloom 3 heads": Tiny("BloomConfig", _SIZES | {"hidden_size": 24, "n_layer": 2, "n_head": 3}, F32, None),
    "mpt": Tiny("MptConfig", _SIZES | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, F32, None),
    "falcon": Tiny("FalconConfig", _FALCON),
    "falcon eager": Tiny("FalconConfig", _FALCON, F32, "eager"),
    "roformer": Tiny("RoFormerConfig", _ROFORMER, F32, None),
    "llama4": Tiny("Llama4TextConfig", TINY["llama4"].fields | {"floor_scale": 5}, F32),
    "gpt_neo": Tiny("GPTNeoConfig", _NEO, F32, None),
}
MODELS = {name: shared(made(recipe)) for name, recipe in SLOT_COUNTERS.items()}


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", MODELS)
def test_exact(name: str, batch: int, sample: bool) -> None:
    """Text, draws, scores and cache, to the last place that MPT's and GPT-Neo's tables have."""
    fixed = Lookahead(nodes=8, seed=0)
    for strategy in (None, fixed, Lookahead(window_size=5, ngram_size=4, seed=0), Jacobi(block_size=6)):
        output = same_as_plain(
            MODELS[name], prompts(batch), strategy, max_new_tokens=52, do_sample=sample, output_scores=True
        )
        if strategy is fixed and not sample:
            assert output.stats.accepted > 0


@pytest.mark.parametrize("name", MODELS)
def test_holes_and_mask_types(name: str) -> None:
    """ALiBi counts tokens that are not masked, MPT and GPT-Neo slots; Falcon's slopes are as exact as its mask."""
    for batch, dtypes in ((1, [torch.long]), (3, [torch.float32, torch.bool])):
        for dtype in dtypes:
            inputs = prompts(batch)
            inputs["attention_mask"][0, :3] = 0
            inputs["attention_mask"][0, 7:9] = 0
            inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
            same_as_plain(MODELS[name], inputs, Lookahead(window_size=5, seed=0), max_new_tokens=24)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_behind(name: str) -> None:
    """Overrides are in place during a pass only, and other threads see their own."""
    model = MODELS[name]
    overrides = overrides_for(model)
    assert overrides
    assert route(model) == ("tree", None)
    before = [vars(override.owner).get(override.name) for override in overrides]
    plain = run(model, prompts(1), max_new_tokens=8)[0]
    count = torch.arange(40)[None]
    with overriding(overrides, lambda: PassPositions(count, count, count, 0, 40, count, torch.long)):
        (elsewhere,) = together(lambda: model.generate(**prompts(1), max_new_tokens=8))
        assert [override.name for override in overrides_for(model)] == [override.name for override in overrides]
    assert elsewhere.tolist() == plain.tolist()
    assert [vars(override.owner).get(override.name) for override in overrides] == before
    run(model, prompts(2), max_new_tokens=8, use_lookahead=True)
    assert [vars(override.owner).get(override.name) for override in overrides] == before


def test_every_row_of_the_tables_has_a_model() -> None:
    """A row that matches nothing here is not tested."""
    decoders = [seq2seq_model(name).get_decoder() for name in ("bart", "t5", "nllb-moe", "bert2roberta")]
    found = {override.stand_in for model in (*MODELS.values(), *decoders) for override in overrides_for(model)}
    assert {family.stand_in for family in FAMILIES} == found


def test_scales_past_what_the_self_test_sees() -> None:
    """Llama 4's queries grow with the text in layers without RoPE, far behind the few tokens that a test takes."""
    model = fresh_model("llama4", floor_scale=24)
    for batch in (1, 2):
        for sample in (False, True):
            same_as_plain(model, prompts(batch), Lookahead(nodes=24), max_new_tokens=80, do_sample=sample)


def test_the_self_test_needs_the_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, the self-test finds out: siblings would be counted one after the other."""
    monkeypatch.setattr("lookahead.models.families.registry.FAMILIES", ())
    for name in ("falcon", "gpt_neo"):
        model = made(SLOT_COUNTERS[name])
        monkeypatch.setattr("lookahead.support.route.overrides_for", lambda model: ["none that work"])
        with pytest.raises(LookaheadError, match=r"the branches of a tree apart|did not run a pass with a tree"):
            model.generate(**prompts(1), max_new_tokens=8, use_lookahead=True)


def test_static_passes_are_left_to_others() -> None:
    """Positions are made on the host."""
    with pytest.raises(LookaheadError, match="static=True cannot be used: this model counts cache slots"):
        run(MODELS["bloom"], prompts(1), max_new_tokens=8, lookahead_strategy=Lookahead(static=True))
    with bare_model(MODELS["bloom"], prompts(1)["input_ids"], 8, static=None) as fused:
        assert fused.route == "dynamic"

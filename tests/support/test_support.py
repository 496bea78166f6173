"""Routes and verdicts, positions of several axes, attention for one call, quantised weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.encoder_decoders import seq2seq_model
from helpers.knowing import known
from helpers.marks import few
from helpers.models import F32, VOCAB, fresh_model, initialised, prompts, run, same_as_plain, tiny_model
from helpers.refusals import refuses
from helpers.threads import together
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lookahead import Jacobi, Lookahead, LookaheadError
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import switched_attention
from lookahead.runtime.host_reads import Draws, _drops_out
from lookahead.support import route as support
from lookahead.support import self_test
from lookahead.support.self_test import tree_error

pytestmark = pytest.mark.usefixtures("augmented")

Passes = Callable[[Any], list[int]]


def test_routes() -> None:
    """A tree where one can pass; otherwise the reason."""
    assert support.route(tiny_model("llama")) == support.verdict(tiny_model("llama")) == ("tree", None)
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    route, reason = support.verdict(transformers.MambaForCausalLM(config))
    assert route == "plain" and "a recurrent state cannot follow a tree" in str(reason)
    model = fresh_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    assert support.route(model) == ("tree", None)
    assert support.verdict(model)[0] == "plain"


def test_passes_that_draw_random_numbers() -> None:
    """Fewer passes would leave other numbers for the text; finding that out takes none away."""
    model = fresh_model("llama")
    model.get_input_embeddings().register_forward_hook(lambda *_: torch.rand(()) and None)
    torch.manual_seed(7)  # as run does
    before = torch.get_rng_state()
    with pytest.raises(LookaheadError, match="LlamaForCausalLM draws random numbers in its passes"):
        run(model, prompts(1), max_new_tokens=4, use_lookahead=True)
    route, reason = support.verdict(model)
    assert route == "plain" and "draws random numbers" in str(reason)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_of_another_thread_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators are everybody's: somebody may sample while a model is tried."""
    model, judge = fresh_model("llama"), self_test.tree_verdict

    def judged_meanwhile(*given: Any) -> Any:
        together(lambda: torch.rand(3))
        return judge(*given)

    monkeypatch.setattr(self_test, "tree_verdict", judged_meanwhile)
    assert tree_error(model, ModelTraits.of(model)) is None


@pytest.mark.parametrize(("drops", "found"), [(0.0, False), (0.5, True)])
def test_attention_draws_where_it_drops_out(drops: float, found: bool) -> None:
    query = torch.zeros(1, 2, 3, 8)
    with Draws() as draws:
        nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=drops)
    assert draws.found == found
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _drops_out(kernel, (query, query, query), {}) is False
    assert _drops_out(kernel, (query, query, query, drops), {}) is found


class OwnLoop(LlamaForCausalLM):
    """Writes in its own way, as models do that write speech beside the text."""

    @torch.no_grad()
    def _sample(self, input_ids: Tensor, **_: Any) -> Tensor:
        return torch.cat([input_ids, input_ids[:, :1]], dim=1)


class AroundTheLoop(LlamaForCausalLM):
    """Leaves the writing to transformers."""

    calls = 0

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._sample(*args, **kwargs)


@pytest.mark.parametrize("settings", [{"use_lookahead": True}, {"custom_generate": Lookahead()}])
def test_a_decoding_loop_of_the_models_own(settings: dict[str, Any]) -> None:
    """It would not notice that it was asked for lookahead, so the call is refused."""
    model = OwnLoop(tiny_model("llama").config)
    assert run(model, prompts(1), max_new_tokens=4)[0].shape == (1, 13)
    with pytest.raises(LookaheadError, match=r"OwnLoop writes in a decoding loop of its own \(OwnLoop._sample\)"):
        run(model, prompts(1), max_new_tokens=4, **settings)
    route, reason = support.verdict(model)
    assert route == "plain" and "a decoding loop of its own" in str(reason)


def test_something_around_the_decoding_loop() -> None:
    """It stays around ours."""
    model = initialised(tiny_model("llama").config, kind=AroundTheLoop)
    output = same_as_plain(model, prompts(1), Lookahead(window_size=3, seed=0), max_new_tokens=8)
    assert output.stats is not None and not output.stats.plain
    assert model.calls == 2


class TablesInside(nn.Module):
    """Input embeddings that have no table of their own, as where codebooks are added up."""

    def __init__(self, tables: list[nn.Embedding]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids) for table in self.tables]).sum(0)


def test_embeddings_without_a_table_of_their_own() -> None:
    """The vocabulary is what every table inside has a row for."""
    model = fresh_model("llama")
    own = model.get_input_embeddings()
    model.set_input_embeddings(TablesInside([own, nn.Embedding(VOCAB + 4, own.embedding_dim, dtype=own.weight.dtype)]))
    same_as_plain(model, prompts(1), Lookahead(window_size=3, seed=0), max_new_tokens=8)
    with pytest.raises(LookaheadError, match="Token id 48 is outside the vocabulary: expected 0 to 47"):
        run(model, {"input_ids": torch.tensor([[5, 48]])}, max_new_tokens=4, use_lookahead=True)


def vision_model(kind: str) -> Any:
    """A tiny vision-language model whose text positions have three axes."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8}
    sizes |= {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    tokens = {"image_token_id": 45, "video_token_id": 46, "vision_start_token_id": 44, "vision_end_token_id": 47}
    vision: dict[str, Any] = {"depth": 1, "num_heads": 4, "patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
    vision |= {"temporal_patch_size": 1, "initializer_range": 0.3}
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    if kind == "Qwen2_5_VL":
        vision |= {"fullatt_block_indexes": [0], "window_size": 8}
    if kind == "Qwen3VL":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{kind}Config")(text_config=sizes, vision_config=vision, **tokens)
    return initialised(config, kind=getattr(transformers, f"{kind}ForConditionalGeneration"))


def picture(model: Any) -> dict[str, Tensor]:
    """A prompt with an image of 4 x 2 merged patches, whose positions end before its tokens do."""
    ids = prompts(1, 20)["input_ids"].clamp(max=43)
    ids[0, 2], ids[0, 3:11], ids[0, 11] = 44, 45, 47
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(32, 12, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 8, 4]]),
        "mm_token_type_ids": (ids == 45).long(),
    }


@pytest.mark.parametrize("kind", few(["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"], "Qwen3VL"))
def test_three_axes(kind: str) -> None:
    """Text goes on from the last position of every axis, with an image before it and without."""
    model = vision_model(kind)
    for inputs in (prompts(1), prompts(3), picture(model)):
        if "pixel_values" not in inputs:
            inputs["input_ids"].clamp_(max=43)
        for sample in (False, True):
            settings = {"max_new_tokens": 30, "do_sample": sample}
            output = same_as_plain(model, inputs, known(model, inputs, **settings), **settings)
            assert output.stats.steps < 25
            for strategy in (None, Lookahead(window_size=5, seed=0), Jacobi(block_size=6)):
                same_as_plain(model, inputs, strategy, **settings)


def same_second_turn(model: Any, inputs: dict[str, Tensor], more: Tensor, **kept: Tensor) -> None:
    """Assert that a text goes on behind its cache and further tokens as in plain decoding."""
    turns = []
    for use in (False, True):
        settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
        first = run(model, inputs, **settings)[0]
        text = torch.cat([first.sequences, more], dim=1)
        following = {"input_ids": text, "attention_mask": torch.ones_like(text)} | kept
        turns.append(
            run(model, following, **{CACHE: first[CACHE]}, **settings, use_lookahead=use)[0].sequences.tolist()
        )
    assert turns[0] == turns[1]


def test_a_second_turn_with_three_axes() -> None:
    """The distance between tokens and positions is the model's own memory."""
    model = vision_model("Qwen2VL")
    same_second_turn(model, picture(model), prompts(1, 5)["input_ids"].clamp(max=43))


def test_static_passes_have_one_axis() -> None:
    """Named, and not tried."""
    with pytest.raises(LookaheadError, match="static=True cannot be used: positions have several axes"):
        run(vision_model("Qwen2VL"), prompts(1), max_new_tokens=4, lookahead_strategy=Lookahead(static=True))


def crossing_model() -> Any:
    """A tiny Mllama: one of its layers attends to images, whose states lie in the text's cache."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    text = {"vocab_size": VOCAB, "hidden_size": 32, "cross_attention_layers": [1], "initializer_range": 0.3, **sizes}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "max_position_embeddings": 128}
    vision = {"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"intermediate_size": 16, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32}
    vision |= {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    model = initialised(config, kind=transformers.MllamaForConditionalGeneration)
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):  # 0 at first: the image would say nothing
            parameter.data.fill_(1.0)
    return model


def test_images_that_are_attended_to() -> None:
    """Trees without an image; with one, in the prompt or in a cache, plain decoding by name."""
    model = crossing_model()
    inputs = prompts(1)
    output = same_as_plain(model, inputs, known(model, inputs, max_new_tokens=30), max_new_tokens=30)
    assert not output.stats.plain
    assert output.stats.steps < 25
    seeing = {
        "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double(),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, inputs["input_ids"].shape[1], 1, 1, dtype=torch.long),
    }
    seen = same_as_plain(model, inputs | seeing, max_new_tokens=30)
    assert "cross-attention layers know of images" in next(iter(seen.stats.plain))
    assert seen.sequences.tolist() != output.sequences.tolist()
    kept = {"cross_attention_mask": seeing["cross_attention_mask"]}
    same_second_turn(model, inputs | seeing, inputs["input_ids"], **kept)


def test_attention_for_one_call(passes: Passes) -> None:
    """A model with flash attention is decoded with another one, and has its own again afterwards."""
    model = fresh_model("qwen2_mixed").float()  # eager attention makes NaN of padding in float64
    inputs = prompts(3)
    plain = run(model, inputs, max_new_tokens=20)[0]
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(LookaheadError, match=r"'flash_attention_2' takes no custom mask.*attention='sdpa'"):
        run(model, inputs, max_new_tokens=20, use_lookahead=True)
    for strategy in (Lookahead(attention="sdpa"), {"window_size": 3, "attention": "sdpa"}, Jacobi(attention="eager")):
        ours = run(model, inputs, max_new_tokens=20, lookahead_strategy=strategy)[0]
        assert ours.tolist() == plain.tolist()
        assert model.config._attn_implementation == "flash_attention_2"
    ours = run(model, inputs, max_new_tokens=20, custom_generate=Lookahead(attention="sdpa"))[0]
    assert ours.tolist() == plain.tolist()
    with pytest.raises(LookaheadError, match="outside the vocabulary"):
        run(
            model,
            {"input_ids": inputs["input_ids"] + VOCAB},
            max_new_tokens=4,
            lookahead_strategy=Lookahead(attention="sdpa"),
        )
    assert model.config._attn_implementation == "flash_attention_2"


def test_every_part_is_restored() -> None:
    """A model of several parts has a setting for each."""
    model = vision_model("Qwen2VL")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    with switched_attention(model, "sdpa"):
        assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("value", ["flash_attention_2", "", 3])
def test_attention_is_validated(value: Any) -> None:
    """Only what takes masks."""
    refuses(r"Lookahead\(attention=\) must be one of 'sdpa', 'eager', 'flex_att", Lookahead, attention=value)


def test_an_attention_that_a_model_does_not_have() -> None:
    """Named before any pass."""
    model = fresh_model("gpt_oss")
    with pytest.raises(LookaheadError, match="attention='sdpa' cannot be used with GptOssForCausalLM"):
        run(model, prompts(1), max_new_tokens=4, lookahead_strategy=Lookahead(attention="sdpa"))
    assert model.config._attn_implementation == "eager"


def test_layers_that_were_exchanged_are_tested_again() -> None:
    """A verdict is of the layers that there were."""
    model = fresh_model("llama").float()
    same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=8)
    for layer in model.model.layers:
        layer.mlp.down_proj = copy.deepcopy(layer.mlp.down_proj)
        layer.mlp.down_proj.__class__ = _CoupledLinear
    with pytest.raises(LookaheadError):
        model.generate(**prompts(1), max_new_tokens=8, use_lookahead=True, lookahead_strategy=Lookahead(nodes=4))


def test_quantised_weights() -> None:
    """Weights in int8 are modules like others: torchao's layers, as ``quantization_config`` makes them."""
    quantization = pytest.importorskip("torchao.quantization")
    for name in ("llama_eager", "gemma2", "gpt_oss"):
        model = fresh_model(name)
        before = type(model.get_input_embeddings().weight)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        assert any(type(weight.data) is not before and "Int8" in repr(weight) for weight in model.parameters())
        for batch in (1, 3):
            for sample in (False, True):
                same_as_plain(model, prompts(batch), max_new_tokens=30, do_sample=sample)


class _CoupledLinear(torch.nn.Linear):
    """Rounds its input to steps of the largest value in the whole pass, as per-tensor dynamic quantisation does."""

    def forward(self, inputs: Tensor) -> Tensor:
        step = inputs.abs().amax() / 7
        return super().forward((inputs / step).round() * step)


def test_tokens_that_are_quantised_together() -> None:
    """Where a token's numbers depend on its neighbours in the pass, no pass over several can be exact: found out."""
    model = fresh_model("llama")
    for part in model.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = _CoupledLinear
    with pytest.raises(LookaheadError, match="says something else in a pass over a tree than in plain passes"):
        run(model, prompts(1), max_new_tokens=8, use_lookahead=True)


def test_static_caches_whose_spare_slots_are_seen() -> None:
    """There transformers writes something else than with other caches, and the same text is what it writes."""
    neo = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, "vocab_size": VOCAB}
    led = seq2seq_model("led")
    for model in (initialised(transformers.GPTNeoConfig(window_size=6, **neo, **ends), dtype=F32), led):
        inputs = prompts(1) | ({} if model is led else {"attention_mask": torch.ones_like(prompts(1)["input_ids"])})
        texts = [
            run(model, inputs, max_new_tokens=16, cache_implementation=cache, use_lookahead=use)[0].tolist()
            for cache, use in (("static", False), ("static", True), (None, False))
        ]
        assert texts[0] == texts[1] != texts[2]

"""Tiny random models, prompts for them, and the comparison with plain ``generate`` that most tests are about."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.names import CACHE
from lookahead.support.route import verdict

# The models are so small that a second thread only waits, for milliseconds on a busy machine.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB = 48
F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Tiny:
    """How a tiny model is made: its config class and fields, its dtype and its attention implementation."""

    config: str
    fields: dict[str, Any]
    dtype: torch.dtype = F64
    attention: str | None = "sdpa"


# Weights are drawn widely, so that texts neither settle on one token at once nor never repeat anything.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MHA = SIZES | {"num_key_value_heads": 4}
_NO_KV = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_LEARNED = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOW = {"sliding_window": 6, "head_dim": 8}  # shorter than the prompts
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# float64 wherever the model has it: only there is equality more than very likely. Eager attention with left padding
# and expert kernels exist in float32 only.
MODELS = {
    "llama": Tiny("LlamaConfig", SIZES),
    "llama_mha": Tiny("LlamaConfig", _MHA),
    "llama_eager": Tiny("LlamaConfig", SIZES, F32, "eager"),
    "gpt2": Tiny("GPT2Config", _LEARNED),
    "mistral": Tiny("MistralConfig", SIZES | _WINDOW),
    "qwen2": Tiny("Qwen2Config", SIZES),
    "qwen2_mixed": Tiny("Qwen2Config", SIZES | _MIXED | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Tiny("Qwen3Config", SIZES | {"head_dim": 8}),
    "gemma2": Tiny("Gemma2Config", SIZES | _MIXED | {"query_pre_attn_scalar": 20}, F32, "eager"),
    "gemma3": Tiny("Gemma3TextConfig", SIZES | _MIXED | {"query_pre_attn_scalar": 20}),
    "cohere2": Tiny("Cohere2Config", SIZES | _MIXED | {"logit_scale": 1.0}),
    "olmo2": Tiny("Olmo2Config", SIZES),
    "phi3": Tiny("Phi3Config", SIZES | {"sliding_window": 6}),
    "gpt_neox": Tiny("GPTNeoXConfig", _NO_KV),
    "gpt_oss": Tiny("GptOssConfig", SIZES | _MIXED | _EXPERTS, F32, "eager"),
    "mixtral": Tiny("MixtralConfig", SIZES | _EXPERTS, F32),
    "llama4": Tiny(
        "Llama4TextConfig",
        SIZES
        | {"head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 0]}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": 12, "attn_scale": 0.5},
        F32,
    ),
}
_shared: WeakKeyDictionary[Any, dict[str, tuple[Any, Tensor]]] = WeakKeyDictionary()
MODELS["llama4_flat"] = Tiny("Llama4TextConfig", MODELS["llama4"].fields | {"attn_temperature_tuning": False}, F32)


def fresh_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model of the test's own, with changed config fields."""
    return made(MODELS[name], seed, **changes)


def made(recipe: Tiny, seed: int = 0, **changes: Any) -> Any:
    """A tiny model by its recipe, with changed config fields."""
    config = getattr(transformers, recipe.config)(**recipe.fields | changes)
    return initialised(config, seed, recipe.dtype, recipe.attention)


def initialised(
    config: Any, seed: int = 0, dtype: torch.dtype = F64, attention: str | None = None, kind: Any = None
) -> Any:
    """A model from its config, causal unless its class is given; nothing ends its texts unless a test says so."""
    make = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(config, attn_implementation=attention)
    model = model.to(dtype).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def judged(model: Any) -> Any:
    """A model whose verdict is known, as where its version is on record: no pass of a call goes into its test."""
    verdict(model)
    return model


def shared(model: Any) -> Any:
    """A model of several tests, which must leave it as it is: what it writes plainly is remembered."""
    _shared[model] = {}
    return model


@cache
def tiny_model(name: str) -> Any:
    """The tiny model ``name``, the same object each time it is asked for."""
    return shared(fresh_model(name))


def successor_model(successors: dict[int, int], sharpness: float = 8.0, free: int = 0) -> Any:
    """A Llama that has learnt nothing but which token follows which, so that a test knows its text in advance.

    Args:
        successors: the likely next token of a token; after one that is not named, all tokens are equally likely.
        sharpness: how much larger the likely token's logit is than the others', which are 0.
        free: tokens below this one are excluded where all are equally likely.
    """
    return taught(fresh_model("llama", hidden_size=VOCAB), successors, sharpness, free)


def taught(model: Any, successors: dict[int, int], sharpness: float = 8.0, free: int = 0) -> Any:
    """A model of hidden size VOCAB, whose texts become those of :func:`successor_model`."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        head = model.lm_head.weight.zero_()
        for token in range(VOCAB):
            if token in successors:
                head[successors[token], token] = sharpness / VOCAB**0.5
            else:
                head[:free, token] = -100.0
    return model


def counting_model(period: int = 7, sharpness: float = 8.0) -> Any:
    """Writes 1 2 ... period 1 2 ..., whatever came before the last token: drafts are soon right."""
    return successor_model({token: token % period + 1 for token in range(VOCAB)}, sharpness)


def prompts(batch: int, length: int = 12, seed: int = 0, *, ragged: bool = True) -> dict[str, Tensor]:
    """A batch of random prompts; with ``ragged``, the later rows are shorter and padded on the left with 0."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch if ragged else 0):
        missing = (3 * row) % length
        ids[row, :missing], mask[row, :missing] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, inputs: dict[str, Any], *, seed: int = 7, **settings: Any) -> tuple[Any, Tensor]:
    """``model.generate`` from a fixed seed: what it returns, and the state it leaves torch's generator in.

    Settings that are callable under a name ending in ``_new`` are made anew for the call, as stateful objects must be.
    """
    made = {k.removesuffix("_new"): v() if k.endswith("_new") else v for k, v in settings.items()}
    torch.manual_seed(seed)
    output = model.generate(**inputs, **made)
    return output, torch.get_rng_state()


def plain_text(model: Any, inputs: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, Tensor]:
    """``run`` without lookahead, once for inputs and settings that are plain data, if the model is shared."""
    known = _shared.get(model)
    changed = any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules())
    if known is None or changed or not _are_data(settings) or {CACHE, "cache_implementation"} & {*inputs, *settings}:
        return run(model, inputs, **settings)
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    given = [(name, each.dtype, each.tolist()) for name, each in inputs.items()]
    key = repr((modes, given, sorted(settings.items())))
    if key not in known:
        known[key] = run(model, inputs, **settings)
    return known[key]


def _are_data(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return all(map(_are_data, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str))


def same_as_plain(
    model: Any, inputs: dict[str, Any], strategy: Any = None, *, tolerance: float | None = None, **settings: Any
) -> Any:
    """Assert that lookahead writes what plain ``generate`` writes and draws as often; return its full output.

    Everything that the output carries is compared as well: scores, logits and the cache, to within ``tolerance``
    (None = what the model's dtype allows).
    """
    settings = {"return_dict_in_generate": True, "do_sample": False} | settings
    plain, plain_state = plain_text(model, inputs, settings)
    output, state = run(model, inputs, use_lookahead=True, lookahead_strategy=strategy, **settings)
    same_outputs((output, state), (plain, plain_state), model.dtype, tolerance)
    assert torch.is_inference_mode_enabled() or not any(tensor.is_inference() for tensor in model.buffers())
    return output


def same_tokens(model: Any, inputs: dict[str, Any], strategy: Any = None, **settings: Any) -> None:
    """Assert the same of a call that returns tokens alone."""
    settings = {"do_sample": False} | settings
    plain, plain_state = run(model, inputs, use_lookahead=False, **settings)
    ours, state = run(model, inputs, use_lookahead=True, lookahead_strategy=strategy, **settings)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(state, plain_state)


def same_outputs(
    ours: tuple[Any, Tensor], plain: tuple[Any, Tensor], dtype: torch.dtype, tolerance: float | None = None
) -> None:
    """Assert that two runs, as :func:`run` returns them, wrote and drew the same, and left the same."""
    (output, state), (expected, plain_state) = ours, plain
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.sequences.dtype == expected.sequences.dtype
    assert torch.equal(state, plain_state)
    if tolerance is None:
        tolerance = 1e-9 if dtype is F64 else 2e-2 if dtype.itemsize == 2 else 1e-4
    for kind in ("scores", "logits"):
        # Logits are float32 whatever the model is.
        same_tensors(getattr(output, kind), getattr(expected, kind), max(tolerance, 1e-5))
    same_caches(output.get(CACHE), expected.get(CACHE), tolerance)


def same_tensors(ours: tuple[Tensor, ...] | None, plain: tuple[Tensor, ...] | None, tolerance: float) -> None:
    """Assert equal numbers of tensors that are as good as equal, infinities included, and as free to be used."""
    assert (ours is None) == (plain is None)
    if ours is not None and plain is not None:
        assert len(ours) == len(plain)
        for got, expected in zip(ours, plain, strict=True):
            assert got.is_inference() == expected.is_inference()
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def same_caches(ours: Any, plain: Any, tolerance: float) -> None:
    """Assert that two caches have the same layers, lengths and content."""
    assert type(ours) is type(plain)
    if ours is None:
        return
    if isinstance(plain, list):  # RWKV's states
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)
        return
    if isinstance(ours, EncoderDecoderCache):
        assert ours.is_updated == plain.is_updated
        same_caches(ours.self_attention_cache, plain.self_attention_cache, tolerance)
        same_caches(ours.cross_attention_cache, plain.cross_attention_cache, tolerance)
        return
    assert [type(layer) for layer in ours.layers] == [type(layer) for layer in plain.layers]
    for got, expected in zip(ours.layers, plain.layers, strict=True):
        assert getattr(got, "record_past", False) == getattr(expected, "record_past", False)
        for name in ("conv_states", "recurrent_states"):
            for index, theirs in getattr(expected, name, {}).items():
                mine = getattr(got, name)[index]
                assert (mine is None) == (theirs is None)
                if theirs is not None:
                    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
        if not hasattr(expected, "keys"):  # a layer of states alone
            continue
        assert got.is_initialized == expected.is_initialized
        if not expected.is_initialized or expected.keys is None:  # a layer that keeps nothing
            continue
        length = int(expected.get_seq_length())
        assert int(got.get_seq_length()) == length
        if isinstance(expected, DynamicSlidingWindowLayer):
            assert got.cumulative_length == expected.cumulative_length
        for name in ("keys", "values"):
            mine, theirs = getattr(got, name), getattr(expected, name)
            if isinstance(expected, StaticLayer):
                mine, theirs = mine[:, :, :length], theirs[:, :, :length]
            assert mine.is_inference() == theirs.is_inference()
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def registries() -> list[dict[str, Any]]:
    """transformers' global tables of attention and mask functions."""
    return [dict(table._global_mapping) for table in (AttentionMaskInterface, ALL_ATTENTION_FUNCTIONS)]


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and some pairs of them: 0 pads, 1 is ``a`` and so on; ``counting_model`` writes ``abcdefgabc...``."""
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "\u0120"]  # a space, as byte-level BPE writes it
    pairs = list(pairwise(letters[7:]))
    words = ["<pad>", *letters, *map("".join, pairs), "<end>"]
    vocab = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left", clean_up_tokenization_spaces=False
    )

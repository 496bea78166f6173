"""Random tiny models under random settings: text, draws, scores and cache are plain decoding's, whatever is drawn."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from helpers.calls import Drawing, allowed_tokens
from helpers.devices import working_alone
from helpers.encoder_decoders import config_of, from_config, seq2seq_model, sources
from helpers.hybrids import counting_hybrid, fresh_hybrid
from helpers.medusa import COMBINED, random_heads
from helpers.models import F32, F64, VOCAB, initialised, letters_tokenizer, prompts, same_as_plain
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, StoppingCriteriaList

from lookahead import Jacobi, Lookahead, Medusa

TOKENIZER = letters_tokenizer()


@st.composite
def tiny_models(draw: st.DrawFn) -> Any:
    """A random model: a family, sizes, windows, the text length at which it changes, and weights."""
    heads = draw(st.sampled_from([2, 4]))
    layers = draw(st.integers(1, 3))
    window = draw(st.integers(2, 20))
    shared = {"vocab_size": VOCAB, "initializer_range": draw(st.sampled_from([0.15, 0.3, 0.5]))}
    shared |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = shared | {"hidden_size": 8 * heads, "intermediate_size": 24, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": draw(st.sampled_from([1, heads]))}
    sizes |= {"max_position_embeddings": 128, "tie_word_embeddings": draw(st.booleans()), "head_dim": 8}
    learned = {k: v for k, v in shared.items() if k != "hidden_size"}
    mixed = [draw(st.sampled_from(["sliding_attention", "full_attention"])) for _ in range(layers)]
    limit = draw(st.integers(8, 50))
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": limit}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    latent |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    latent |= {"moe_intermediate_size": 16, "num_key_value_heads": heads, "head_dim": 4}
    every = {
        "LlamaConfig": (sizes, F64),
        "LlamaConfig dynamic": (sizes | {"rope_parameters": dynamic, "max_position_embeddings": limit}, F64),
        "Phi3Config longrope": (
            sizes | {"rope_parameters": longrope, "original_max_position_embeddings": limit, "sliding_window": None},
            F64,
        ),
        "MistralConfig": (sizes | {"sliding_window": window}, F64),
        "Gemma3TextConfig": (sizes | {"sliding_window": window, "layer_types": mixed, "query_pre_attn_scalar": 8}, F64),
        "Gemma2Config": (sizes | {"sliding_window": window, "query_pre_attn_scalar": 8}, F32),
        "GPT2Config": (learned | {"n_embd": 8 * heads, "n_layer": layers, "n_head": heads, "n_positions": 96}, F64),
        "BloomConfig": (shared | {"hidden_size": 8 * heads, "n_layer": layers, "n_head": heads}, F32),
        "MptConfig": (learned | {"d_model": 8 * heads, "n_layers": layers, "n_heads": heads, "max_seq_len": 96}, F32),
        "FalconConfig": (
            shared
            | {"hidden_size": 8 * heads, "num_hidden_layers": layers, "num_attention_heads": heads}
            | {"alibi": draw(st.booleans()), "multi_query": draw(st.booleans())},
            F64,
        ),
        "GPTNeoConfig": (
            shared
            | {"hidden_size": 8 * heads, "num_layers": 2, "num_heads": heads, "window_size": window}
            | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 96},
            F32,
        ),
        "DeepseekV3Config": (sizes | latent, F32),
        "DeepseekV32Config": (sizes | latent | {"index_topk": limit, "index_n_heads": 2, "index_head_dim": 8}, F32),
        "GptOssConfig": (sizes | {"sliding_window": window, "num_local_experts": 4, "num_experts_per_tok": 2}, F32),
    }
    name = draw(st.sampled_from(sorted(every)))
    fields, dtype = every[name]
    config = getattr(transformers, name.split()[0])(**fields)
    return initialised(config, draw(st.integers(0, 5)), dtype)


_HYBRIDS = ("qwen3_next", "falcon_h1", "nemotron_h", "inkling", "lfm2", "zamba2")
_SEQ2SEQ = ("bart", "m2m_100", "marian", "t5", "t5gemma", "whisper")


@cache
def _hybrid(name: str, kind: int) -> Any:
    """A model that takes chains; one of each name repeats itself."""
    model = (counting_hybrid(name) if kind == 0 else fresh_hybrid(name, kind)).to(F64)
    if any("experts" in part for part, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # the kernel for groups knows no float64
    return model


@cache
def _seq2seq(name: str, kind: int) -> Any:
    """An encoder-decoder model."""
    return from_config(config_of(name), seq2seq_model(name).dtype, kind)


@st.composite
def any_models(draw: st.DrawFn) -> tuple[str, Any]:
    """What kind of model, or for an encoder-decoder which, and the model."""
    kind = draw(st.sampled_from(["causal"] * 4 + ["hybrid", "seq2seq"]))
    if kind == "causal":
        return kind, draw(tiny_models())
    name, number = draw(st.sampled_from(_HYBRIDS if kind == "hybrid" else _SEQ2SEQ)), draw(st.integers(0, 2))
    return (kind, _hybrid(name, number)) if kind == "hybrid" else (name, _seq2seq(name, number))


class _RowEnds:
    """Ends each row at a length of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        lengths = self._lengths[: input_ids.shape[0]]
        return torch.tensor([input_ids.shape[1] >= length for length in lengths])


@st.composite
def strategies(draw: st.DrawFn) -> Any:
    """A random strategy, the automatic mode as often as the others; Medusa by its settings, as heads are a model's."""
    kind = draw(st.sampled_from(["automatic", "lookahead", "jacobi", "medusa"]))
    start = draw(st.integers(0, 99))
    if kind == "medusa":
        return draw(st.sampled_from([{}, {"choices": [[0, 0], [0, 1], [1, 0], [2], [3]]}, {"sources": COMBINED}]))
    if kind == "automatic":
        nodes, remember = draw(st.sampled_from([None, 2, 12, 40])), draw(st.booleans())
        return Lookahead(nodes=nodes, seed=None if remember else start, remember=remember)
    if kind == "jacobi":
        mode: Any = draw(st.sampled_from(["jacobi", "gauss-seidel", "hybrid", "sliding"]))
        guess: Any = draw(st.sampled_from(["text", "tail", "pad", (1, 2, 3)]))
        return Jacobi(mode=mode, block_size=draw(st.integers(1, 20)), initial_guess=guess, seed=start)
    return Lookahead(
        window_size=draw(st.sampled_from([1, 2, 3, 7, 15])),
        ngram_size=draw(st.sampled_from([2, 3, 5, 8])),
        verification_set_size=draw(st.sampled_from([0, 1, 7, 20])),
        pool_from_prompt=draw(st.booleans()),
        pool_from_output=draw(st.booleans()),
        always_forward_one=draw(st.booleans()),
        seed=start,
    )


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Random settings of ``generate``: processors, ends, stop strings, lengths, sampling, what is returned."""
    chosen: dict[str, Any] = {"max_new_tokens": draw(st.integers(1, 40)), "seed": draw(st.integers(0, 999))}

    def maybe(**more: Any) -> None:
        if draw(st.integers(0, 3)) == 0:
            chosen.update(more)

    if draw(st.booleans()):
        chosen["do_sample"] = True
        maybe(temperature=draw(st.sampled_from([0.3, 0.7, 1.5])))
        maybe(top_k=5, top_p=0.9)
        maybe(min_p=0.05)
        maybe(typical_p=0.8)
        maybe(num_return_sequences=2)
        maybe(logits_processor_new=lambda: LogitsProcessorList([Drawing()]))
    if draw(st.booleans()):
        chosen["eos_token_id"] = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True))
        maybe(min_new_tokens=min(5, chosen["max_new_tokens"]))
        maybe(pad_token_id=draw(st.integers(0, VOCAB - 1)))
    maybe(repetition_penalty=1.3)
    maybe(no_repeat_ngram_size=3)
    maybe(prefix_allowed_tokens_fn=allowed_tokens)
    maybe(use_cache=False)
    maybe(output_scores=True)
    maybe(output_logits=True)
    maybe(stop_strings=[draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))], tokenizer=TOKENIZER)
    lengths = draw(st.lists(st.integers(14, 50), min_size=8, max_size=8))
    maybe(stopping_criteria_new=lambda: StoppingCriteriaList([_RowEnds(lengths)]))
    return chosen


def check(
    model: tuple[str, Any], call: dict[str, Any], strategy: Any, batch: int, length: int, ragged: bool, alone: bool
) -> None:
    """One random call; ``alone`` on a device that works by itself."""
    kind, network = model
    if kind in _SEQ2SEQ:
        inputs = sources(kind, batch, max(length, 5), call["seed"])
    else:
        inputs = prompts(batch, length, call["seed"], ragged=ragged)
    if isinstance(strategy, dict):
        strategy = Medusa(random_heads(network, 2), seed=0, **strategy) if kind == "causal" else None
    # Recurrent layers compute in float32, and in another order for several tokens.
    with working_alone() if alone and kind == "causal" else nullcontext():
        output = same_as_plain(network, inputs, strategy, tolerance=1e-3 if kind == "hybrid" else None, **call)
    if kind == "causal" and not {"stop_strings", "stopping_criteria_new"} & call.keys():
        ends = set(call.get("eos_token_id", ()))
        rows = output.sequences[:, length:].tolist()
        written = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
        assert output.stats.plain or output.stats.emitted == sum(written)


_DRAWN = {
    "model": any_models(),
    "call": calls(),
    "strategy": strategies(),
    "batch": st.sampled_from([1, 1, 2, 3, 5]),
    "length": st.integers(1, 30),
    "ragged": st.booleans(),
    "alone": st.sampled_from([False, False, True]),
}


@pytest.mark.usefixtures("augmented")
def test_random_models() -> None:
    """A few always."""
    quiet = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
    shown = settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)
    shown(given(**_DRAWN)(check))()


@pytest.mark.conformance
@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("block", range(20))
def test_two_thousand_random_models(block: int) -> None:
    """Many when there is time."""
    quiet = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
    many = settings(max_examples=100, deadline=None, database=None, suppress_health_check=quiet)
    seed(block)(many(given(**_DRAWN)(check)))()

"""Tiny random encoder-decoder models, one for each family."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from helpers.models import F32, F64, VOCAB, initialised, shared
from torch import Tensor

from lookahead.support import route as support

START = 3  # the decoder's first token; neither padding nor an end

_IDS = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": START}
_BART: dict[str, Any] = _IDS | {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "forced_eos_token_id": None,
    "scale_embedding": False,
}
_T5: dict[str, Any] = _IDS | {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 4.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_ROPE = _BERT | {"num_key_value_heads": 2, "head_dim": 8}
_WITHOUT_TABLE = {key: value for key, value in _BART.items() if key != "max_position_embeddings"}

# Fields of the config of every family whose decoder follows trees; those of which none stand here are made of parts.
TREES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "m2m_100", "mbart", "mvp", "pegasus", "plbart"), _BART),
    **dict.fromkeys(("mt5", "t5", "umt5"), _T5),
    **{name: {} for name in ("bert2bert", "bert2roberta", "bert2gpt2", "t5gemma", "vit2trocr")},
    "bigbird_pegasus": _BART | {"attention_type": "original_full"},
    "led": _WITHOUT_TABLE
    | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8},
    "longt5": _T5 | {"local_radius": 4},
    "marian": _BART | {"decoder_vocab_size": VOCAB},
    "nllb-moe": _BART | {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 2},
    "pegasus_x": _BART | {"block_size": 4, "num_global_tokens": 2},
    "switch_transformers": _T5
    | {"num_experts": 4, "expert_capacity": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    | {"num_decoder_layers": 2},
    "whisper": _WITHOUT_TABLE
    | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64, "begin_suppress_tokens": None},
    "speech_to_text": _WITHOUT_TABLE
    | {"max_source_positions": 64, "max_target_positions": 64, "input_feat_per_channel": 8}
    | {"num_conv_layers": 1, "conv_kernel_sizes": [3], "conv_channels": 16},
    "moonshine": _IDS
    | {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    | {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4}
    | {"decoder_num_attention_heads": 4, "max_position_embeddings": 64},
}
# These numbers exist in float32 only, or their kernels do.
_FLOAT32 = {"moonshine", "speech_to_text", "t5gemma", "whisper"}


def config_of(name: str) -> Any:
    """The family's tiny config."""
    if name == "t5gemma":
        half = _ROPE | {"sliding_window": 6, "query_pre_attn_scalar": 8}
        return transformers.T5GemmaConfig(
            encoder=half, decoder=half | {"cross_attention_hidden_size": 32}, vocab_size=VOCAB, initializer_range=0.3
        )
    if name.startswith("bert2"):
        gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
        decoder = {
            "bert2bert": transformers.BertConfig(**_BERT),
            "bert2roberta": transformers.RobertaConfig(**_BERT | {"max_position_embeddings": 66}),
            "bert2gpt2": transformers.GPT2Config(**gpt2, initializer_range=0.3),
        }[name]
        return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(transformers.BertConfig(**_BERT), decoder)
    if name == "vit2trocr":
        picture = {key: value for key, value in _BERT.items() if key not in ("vocab_size", "max_position_embeddings")}
        encoder = transformers.ViTConfig(**picture, image_size=8, patch_size=4)
        decoder = transformers.TrOCRConfig(
            **{key: value for key, value in _BART.items() if not key.startswith("encoder_")}
        )
        return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.AutoConfig.for_model(name, **TREES[name])


_MAPPINGS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText")


def from_config(config: Any, dtype: torch.dtype = F64, seed: int = 0) -> Any:
    """A model from its config; nothing ends its texts unless a test says so."""
    mappings = (getattr(transformers, name)._model_mapping for name in _MAPPINGS)
    kind = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    model = initialised(config, seed, dtype, kind=kind)
    model.generation_config = transformers.GenerationConfig(pad_token_id=1, decoder_start_token_id=START)
    return model


@cache
def seq2seq_model(name: str) -> Any:
    """The tiny model of a family, the same object each time."""
    model = from_config(config_of(name), F32 if name in _FLOAT32 else F64)
    reason = support.verdict(model)[1] or ""
    if "draws random numbers" in reason:
        pytest.skip(f"in this version of transformers {reason}")
    return shared(model)


def sources(name: str, batch: int, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """What the family's encoder reads; of texts the later rows are shorter, padded on the right."""
    generator = torch.Generator().manual_seed(2000 + seed)
    dtype = seq2seq_model(name).dtype
    if name == "whisper":
        return {"input_features": torch.randn((batch, 8, 20), generator=generator).to(dtype)}
    if name == "speech_to_text":
        features = torch.randn((batch, 12, 8), generator=generator).to(dtype)
        return {"input_features": features, "attention_mask": torch.ones((batch, 12), dtype=torch.long)}
    if name == "moonshine":
        return {"input_values": torch.randn((batch, 2000), generator=generator).to(dtype)}
    if name == "vit2trocr":
        return {"pixel_values": torch.randn((batch, 3, 8, 8), generator=generator).to(dtype)}
    ids = torch.randint(4, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - 2 * row :], ids[row, length - 2 * row :] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}

"""A tiny model with a chat template, on disk, and as a GGUF file."""

import json
from pathlib import Path

import pytest
from helpers.cli import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_chat_model(folder: Path, **generation: object) -> Path:
    """The tiny model whose tokenizer has :data:`TEMPLATE`, and whose generation_config says ``generation``."""
    save_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation | {"pad_token_id": 257}))
    return folder


def save_gguf(folder: Path, file: Path) -> Path:
    """The folder's tiny model as a GGUF file."""
    gguf = pytest.importorskip("gguf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges([])
    writer.add_eos_token_id(256)
    writer.add_pad_token_id(257)
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # as llama.cpp orders rotated channels
            count = heads if "q_proj" in name else key_heads
            values = values.reshape(count, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

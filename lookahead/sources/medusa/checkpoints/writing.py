"""Writes heads as tensors and config.json, in Medusa's format or in vLLM's."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from jacobi import LookaheadError
from lookahead.models.output_layer import copyable_weight, output_layer
from lookahead.sources.medusa.checkpoints import HeadsConfig, HeadTensors
from lookahead.sources.medusa.checkpoints.formats import MEDUSA, TOKEN_MAP, VLLM, Naming
from lookahead.sources.medusa.checkpoints.storage import HEADS_FILE, MODEL_FILE


def write_medusa(heads: HeadTensors, folder: Path) -> None:
    """Write heads as version 1, or as version 2 if they use the model's output layer; this holds no token map."""
    sizes = heads.config
    if heads.token_map is not None:
        raise LookaheadError(
            f"These heads score {len(heads.token_map)} of {sizes.vocab_size} tokens, and only vLLM's format can say "
            "which: write them as 'vllm' (--to vllm on the command line)."
        )
    config = {
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        "version": "1" if sizes.own_output else "2",
        "vocab_size": sizes.vocab_size,
    }
    _write(_named(heads, MEDUSA), folder / HEADS_FILE, sizes, config)


def write_vllm(heads: HeadTensors, folder: Path, shared: Tensor | None) -> None:
    """Write heads as vLLM loads a draft model; those without their own output layer with :func:`shared_output`."""
    sizes = heads.config
    vocab_size = sizes.vocab_size if shared is None else shared.shape[0]
    config = {
        "architectures": ["MedusaModel"],
        "medusa_fc_bias": True,
        "model_type": "medusa",
        "num_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "original_lm_head": shared is not None,
        "torch_dtype": str(next(iter(heads.state.values())).dtype).removeprefix("torch."),
        "truncated_vocab_size": vocab_size if heads.token_map is None else len(heads.token_map),
        "vocab_size": vocab_size,
    }
    tensors = _named(heads, VLLM)
    if shared is not None:
        tensors[VLLM.output.format(head=0)] = shared
    if heads.token_map is not None:
        tensors[TOKEN_MAP] = heads.token_map
    _write(tensors, folder / MODEL_FILE, sizes, config)


def shared_output(model: Any) -> Tensor:
    """The weight of the model's output layer ``[vocab, hidden]``, if it is no more than a plain weight."""
    if model is None:
        raise LookaheadError(
            "vLLM's format holds an output layer, and these heads use the model's: expected the model as well. Name it "
            "(--model on the command line)."
        )
    layer = output_layer(model)
    weight = copyable_weight(layer)
    if weight is None or getattr(layer, "bias", None) is not None:
        what = "is not a plain floating weight in memory" if weight is None else "has a bias"
        raise LookaheadError(
            f"The output layer of {type(model).__name__} {what}: vLLM's format holds a floating weight only. Use heads "
            "with output layers of their own."
        )
    return weight


def _named(heads: HeadTensors, naming: Naming) -> dict[str, Tensor]:
    sizes = heads.config
    outputs = range(sizes.num_heads if sizes.own_output else 0)
    names = naming.names(sizes.num_heads, sizes.num_layers, ("weight", "bias"), outputs)
    return {theirs: heads.state[ours] for ours, theirs in names.items()}


def _write(tensors: dict[str, Tensor], file: Path, sizes: HeadsConfig, config: dict[str, Any]) -> None:
    config |= {"base_model_name_or_path": sizes.base_model, "hidden_size": sizes.hidden_size}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    file.with_name("config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

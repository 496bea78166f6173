"""Heads from files: SafeAILab's format of EAGLE-1, -2 and -3, and that of speculators. The tensors decide what a head
is; config.json says only what they cannot: how many heads attention has, RoPE, which of the model's states are read."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError
from lookahead.sources.eagle.network import EagleNetwork, EagleSizes
from lookahead.sources.medusa.checkpoints.storage import locate, some

_LAYER = re.compile(r"^(?:midlayer|transformer)\.")
_NOT_READ = ("verifier_", "rotary_emb.", "mask_token", "lm_head.bias")
_FIRST = "layers.0."


def read(source: str | Path, hub: Mapping[str, Any] | None = None) -> EagleNetwork:
    """The head that ``source`` holds: a folder, a file in it, or a repository of the hub. A LookaheadError names what
    is missing or foreign; no code from a file is run."""
    location = locate(source, hub or {})
    stored, config = location.tensors(), location.config()
    tensors = {_canonical(name): stored.get(name) for name in stored.files if not _is_left(_canonical(name))}
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    if offsets is None and mask is not None and not bool(mask.all()):
        offsets = mask.nonzero()[:, 0] - torch.arange(int(mask.sum()))
    sizes = sizes_of(tensors, config, str(source))
    if offsets is not None and sizes.draft_vocab_size is None:  # it takes these rows of the model's output layer
        sizes = replace(sizes, draft_vocab_size=len(offsets))
    if mask is not None:
        sizes = replace(sizes, vocab_size=len(mask))
    with torch.device("meta"):
        network = EagleNetwork(sizes)
    _fill(network, tensors, str(source))
    if offsets is not None:
        network.d2t = _checked_offsets(offsets, sizes, str(source))
    return network.eval()


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    name = name.replace("fusion_fc.", "fc.", 1) if name.startswith("fusion_fc.") else name
    return name if name.startswith("layers.") else _LAYER.sub(_FIRST, name)


def _is_left(name: str) -> bool:
    return any(name.startswith(left) or f".{left}" in name for left in _NOT_READ)


def sizes_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> EagleSizes:
    """What the tensors are of, by their canonical names; ``source`` is named in errors."""
    layer = dict(config.get("transformer_layer_config") or config)  # speculators keep the draft layer's apart

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise LookaheadError(f"{source} is no EAGLE head: it has no {name}, but {some(sorted(tensors))}.")
        return tuple(tensors[name].shape)

    hidden, joined = shape("fc.weight")
    three = f"{_FIRST}hidden_norm.weight" in tensors
    queries, keys = shape(f"{_FIRST}self_attn.q_proj.weight"), shape(f"{_FIRST}self_attn.k_proj.weight")
    heads = layer.get("num_attention_heads")
    size = layer.get("head_dim") or (queries[0] // heads if heads else None)
    if not isinstance(size, int) or size < 1 or queries[0] % size or keys[0] % size:
        raise LookaheadError(
            f"{source}: config.json must say num_attention_heads (or head_dim) that fit projections of {queries[0]} "
            f"and {keys[0]} rows: got num_attention_heads={heads!r}, head_dim={layer.get('head_dim')!r}."
        )
    if queries[1] != (2 * hidden if three else hidden) or (not three and joined != 2 * hidden):
        raise LookaheadError(
            f"{source}: q_proj reads {queries[1]} channels and fc {joined}, and the head has {hidden}: expected an "
            "EAGLE head, whose first layer reads twice its size (EAGLE-3) or once (EAGLE-1 and -2, fc then twice)."
        )
    target, ids = _features(config, joined, hidden if not three else None, source)
    norms = sorted(name for name in tensors if name.startswith("fc_norm."))
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    table, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return EagleSizes(
        version=3 if three else 1,
        hidden_size=hidden,
        target_size=target,
        features=joined // target if three else 1,
        heads=queries[0] // size,
        key_heads=keys[0] // size,
        head_size=size,
        feed_forward=shape(f"{_FIRST}mlp.gate_proj.weight")[0],
        layers=layers,
        draft_vocab_size=None if output is None else int(output.shape[0]),
        own_output=output is not None,
        vocab_size=layer.get("vocab_size") or (None if table is None else int(table.shape[0])),
        own_embeddings=None if table is None else int(table.shape[0]),
        final_norm="norm.weight" in tensors,
        fusion_bias="fc.bias" in tensors,
        attention_bias=f"{_FIRST}self_attn.q_proj.bias" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        feature_norms="each" if norms else "all" if "input_norm.weight" in tensors else None,
        norm_output=bool(config.get("norm_output", False)),
        eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope=_rope(layer),
        max_positions=int(layer.get("max_position_embeddings", 2048)),
        feature_layers=ids,
        base_model=verifier.get("name_or_path") or config.get("base_model_name_or_path"),
    )


def _features(config: Mapping[str, Any], joined: int, one: int | None, source: str) -> tuple[int, tuple[int, ...]]:
    """The size of one feature, and which states they are, if the config says so."""
    if one is not None:
        return one, ()
    own = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids") or ()
    if not all(isinstance(index, int) and index >= 0 for index in ids):
        raise LookaheadError(f"{source}: eagle_aux_hidden_state_layer_ids must be layer numbers: got {list(ids)!r}.")
    count = len(ids) or 3
    target = config.get("target_hidden_size") or (joined // count if joined % count == 0 else None)
    if not isinstance(target, int) or joined % target or (ids and joined // target != len(ids)):
        raise LookaheadError(
            f"{source}: fc reads {joined} channels, which are not {count} features of {target or 'one size'}: expected "
            "target_hidden_size and eagle_aux_hidden_state_layer_ids in config.json that fit."
        )
    return target, tuple(ids)


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as the head's own config says; where it says nothing its base is 10000, whatever the model's is."""
    told = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    told.setdefault("rope_type", told.pop("type", "default"))
    told.setdefault("rope_theta", float(layer.get("rope_theta", 10000.0)))
    return told


def _fill(network: EagleNetwork, tensors: dict[str, Tensor], source: str) -> None:
    if "input_norm.weight" in tensors:
        tensors["fc_norm.0.weight"] = tensors.pop("input_norm.weight")
    expected = {name: value.shape for name, value in network.state_dict().items() if name != "d2t"}
    missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or foreign:
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"has {some(foreign)} besides"] * bool(foreign)
        version = network.sizes.version
        raise LookaheadError(f"{source} is no whole head of EAGLE-{version}: it {' and '.join(parts)}.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise LookaheadError(f"{source}: {name} is {list(tensor.shape)}, expected {list(expected[name])}.")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise LookaheadError(f"{source}: {name} holds {tensor.dtype} or infinite numbers, expected finite floats.")
    network.load_state_dict(tensors, assign=True, strict=False)
    network.rotary = type(network.rotary)(network.rotary.config)  # its table is in no file


def _checked_offsets(offsets: Tensor, sizes: EagleSizes, source: str) -> Tensor:
    count = sizes.draft_vocab_size
    if offsets.is_floating_point() or count is None or offsets.shape != (count,):
        raise LookaheadError(
            f"{source}: d2t is {offsets.dtype} {list(offsets.shape)}, expected [{count}] whole numbers."
        )
    ids = offsets.long() + torch.arange(count)
    if bool((ids < 0).any()) or len(ids.unique()) < count:
        raise LookaheadError(
            f"{source}: d2t gives negative tokens, or one twice: expected offsets to different tokens."
        )
    return offsets.long()

"""What a head in a file looks like. The tensors decide; config.json says only what they cannot: how many heads
attention has, RoPE, which of the model's states are read."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jacobi import LookaheadError
from lookahead.heads.eagle.network import EagleSizes
from lookahead.heads.storage import Told, rope_of, some

FIRST = "layers.0."
_NUMBERED = re.compile(r"layers\.(\d+)\.")
_IDS = "eagle_aux_hidden_state_layer_ids"


def sizes_of(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str, channels: int | None, features: int | None
) -> EagleSizes:
    """What the tensors are of, by their canonical names; ``source`` is named in errors. ``channels`` are those of the
    model's hidden states, and ``features`` how many of them the user says that the head reads; None = unknown."""
    told = Told(config, source)
    layer = told.part("transformer_layer_config") if config.get("transformer_layer_config") else told  # speculators'

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise LookaheadError(f"{source} is no EAGLE head: it has no {name}, but {some(sorted(tensors))}.")
        if tensors[name].ndim != 2:
            raise LookaheadError(f"{source}: {name} is {list(tensors[name].shape)}, expected a matrix.")
        return tuple(tensors[name].shape)

    def rows(name: str) -> int | None:
        return shape(name)[0] if name in tensors else None

    hidden, joined = shape("fc.weight")
    three = f"{FIRST}hidden_norm.weight" in tensors
    queries, keys = shape(f"{FIRST}self_attn.q_proj.weight"), shape(f"{FIRST}self_attn.k_proj.weight")
    size = _head_size(layer, queries[0], keys[0])
    if queries[1] != (2 * hidden if three else hidden) or (not three and joined != 2 * hidden):
        raise LookaheadError(
            f"{source}: q_proj reads {queries[1]} channels and fc {joined}, and the head has {hidden}: expected an "
            "EAGLE head, whose first layer reads twice its size (EAGLE-3) or once (EAGLE-1 and -2, fc then twice)."
        )
    target, ids = _features(told, joined, channels, features) if three else (hidden, ())
    norms = any(name.startswith("fc_norm.") for name in tensors)
    table, output = rows("embed_tokens.weight"), rows("lm_head.weight")
    return EagleSizes(
        version=3 if three else 1,
        hidden_size=hidden,
        target_size=target,
        features=joined // target if three else 1,
        heads=queries[0] // size,
        key_heads=keys[0] // size,
        head_size=size,
        feed_forward=shape(f"{FIRST}mlp.gate_proj.weight")[0],
        layers=len({match[1] for match in map(_NUMBERED.match, tensors) if match}),
        draft_vocab_size=output,
        own_output=output is not None,
        vocab_size=layer.whole("vocab_size") or table,
        own_embeddings=table,
        final_norm=three or "norm.weight" in tensors,
        fusion_bias="fc.bias" in tensors,
        attention_bias=f"{FIRST}self_attn.q_proj.bias" in tensors,
        query_key_norm=any(f"{FIRST}self_attn.{part}_norm.weight" in tensors for part in "qk"),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        feature_norms="each" if norms else "all" if "input_norm.weight" in tensors else None,
        norm_output=bool(config.get("norm_output", False)),
        eps=layer.number("rms_norm_eps", 1e-6),
        rope=rope_of(layer),
        max_positions=layer.whole("max_position_embeddings") or 2048,
        feature_layers=ids,
        base_model=told.part("speculators_config").part("verifier").text("name_or_path")
        or told.text("base_model_name_or_path"),
    )


def _head_size(layer: Told, queries: int, keys: int) -> int:
    """Channels of a head of attention, whose projections have so many rows."""
    heads, size = layer.whole("num_attention_heads"), layer.whole("head_dim")
    got = f"got num_attention_heads={heads!r}, head_dim={size!r}"
    if size is None:
        size = queries // heads if heads and queries % heads == 0 else 0
    if size < 1 or queries % size or keys % size or heads not in (None, queries // size):
        raise layer.refuse(
            f"config.json must say num_attention_heads (or head_dim) that fit projections of {queries} and {keys} "
            f"rows: {got}."
        )
    if size % 2:
        raise layer.refuse(
            f"a head of attention must have an even number of channels, which RoPE turns in pairs: {got}."
        )
    if (queries // size) % (keys // size):
        raise layer.refuse(
            f"{queries // size} heads of queries cannot share {keys // size} of keys: expected a number that divides "
            f"them; {got}."
        )
    return size


def _features(told: Told, joined: int, channels: int | None, features: int | None) -> tuple[int, tuple[int, ...]]:
    """The size of one of the features that fc reads side by side, ``joined`` channels; and which states they are, if
    the config says so. How many there are is said by the config, the model, or the user; else they are three."""
    ids, target = told.layers(_IDS) or told.part("eagle_config").layers(_IDS), told.whole("target_hidden_size")
    count = len(ids) or (joined // channels if channels and joined % channels == 0 else features or 3)
    target = target or (joined // count if joined % count == 0 else None)
    if target is None or joined % target or (ids and joined // target != len(ids)):
        raise told.refuse(
            f"fc reads {joined} channels, which are not {count} features of {target or 'one size'}: expected "
            f"target_hidden_size and {_IDS} in config.json that fit, or feature_layers= as many as there are."
        )
    return target, ids

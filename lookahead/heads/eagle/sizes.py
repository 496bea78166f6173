"""What a head in a file looks like. The tensors decide; config.json says only what they cannot: how many heads
attention has, RoPE, which of the model's states are read."""

import re
from collections.abc import Mapping
from math import inf
from typing import Any

from torch import Tensor

from jacobi import LookaheadError
from lookahead.heads.eagle.network import EagleSizes
from lookahead.heads.storage import some

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
        rope=_rope(layer),
        max_positions=layer.whole("max_position_embeddings") or 2048,
        feature_layers=ids,
        base_model=told.part("speculators_config").part("verifier").text("name_or_path")
        or told.text("base_model_name_or_path"),
    )


class Told:
    """What a config says, where None is nothing; a LookaheadError where it is of another kind than expected."""

    def __init__(self, config: Mapping[str, Any], source: str, within: str = "") -> None:
        self.config, self._source, self._within = config, source, within

    def of(self, name: str, expected: str, fits: Any) -> Any:
        value = self.config.get(name)
        if value is not None and not fits(value):
            where = f"{self._within}{name}"
            raise LookaheadError(f"{self._source}: {where} in config.json must be {expected}: got {value!r}. Mend it.")
        return value

    def part(self, name: str) -> "Told":
        found = self.of(name, "an object", lambda value: isinstance(value, dict)) or {}
        return Told(found, self._source, f"{self._within}{name}.")

    def whole(self, name: str) -> int | None:
        return self.of(name, "a whole number from 1 on", lambda value: type(value) is int and value > 0)

    def number(self, name: str, default: float) -> float:
        found = self.of(name, "a number above 0", lambda value: type(value) in (int, float) and 0 < value < inf)
        return default if found is None else float(found)

    def text(self, name: str) -> str | None:
        return self.of(name, "a text", lambda value: isinstance(value, str)) or None

    def layers(self, name: str) -> tuple[int, ...]:
        return tuple(self.of(name, "a list of layer numbers", are_layers) or ())

    def refuse(self, why: str) -> LookaheadError:
        return LookaheadError(f"{self._source}: {why}")


def are_layers(value: Any) -> bool:
    """Whether a value is a list of numbers of layers."""
    return isinstance(value, list | tuple) and all(type(index) is int and index >= 0 for index in value)


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


def _rope(layer: Told) -> dict[str, Any]:
    """RoPE as the head's own config says; where it says nothing its base is 10000, whatever the model's is."""
    found = [dict(layer.part(name).config) for name in ("rope_parameters", "rope_scaling")]
    told = found[0] or found[1]
    told.setdefault("rope_type", told.pop("type", None) or "default")
    if told.get("rope_theta") is None:
        told["rope_theta"] = layer.number("rope_theta", 10000.0)
    return told

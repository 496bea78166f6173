"""Block drafters from files, in the layouts of z-lab, JetSpec, DeepSpec and speculators, and to DeepSpec's."""

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError
from lookahead.heads.block.network import BlockNetwork, BlockSizes, Sight
from lookahead.heads.storage import Told, fill, offsets_of, read_head, rope_of, some, write_head
from lookahead.models.compat import MODEL_ERRORS

_NOT_READ = re.compile(r"(?:^|\.)(?:verifier_|rotary_emb\.)")
_PREFIX = re.compile(r"^(?:model\.|logit_head\.)+")
# What looks like a block drafter and is another network: by names of tensors, keys and values in config.json.
_OTHERS = {
    "a Laguna drafter": r"qkv_proj|\bg_proj|aux_hidden_norms",
    "a MiMo drafter": r"attention_sink_bias|use_swa|mask_embedding",
    "a DFlare drafter": r"layer_fusion_weights|k_proj_target",
    "a drafter with a noise embedding": r"log_snr_embed",
    "a drafter with latent or sparse attention": r"kv_a_proj|q_a_proj|compress_ratios",
    "an MTP layer": r"^mtp\.",
    "a PARD model": r"\bpard_token|target_proj",
    "a P-EAGLE head": r"^mask_hidden|peagle",
    "a DFlash 2 drafter": r"(?:attention|mlp)_conv|candidate_selector|conv_kernel_size|dflash2",
    "a Domino drafter": r"prefix_gru|\bembed_proj|\bdomino",
    "a DSpine drafter": r"^injection\.|transfer_codes|dspine",
    "a Gemma 4 drafter": r"pre_feedforward_layernorm|layer_scalar|gemma4",
    "an assistant of transformers": r"^encoder\.fc|muse_glimmer|pre_projection",
    "a drafter with a random adapter": r"hidden_dim_adapter",
    "quantised": r"weight_packed|weight_scale|\bqweight",
}
_TWICE = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")  # which stand in either of two places


def read(source: str | PathLike[str], hub: Mapping[str, Any]) -> BlockNetwork:
    """The drafter that ``source`` holds, as :func:`sizes_of` tells it: a folder, a file in it, or a repository of the
    hub. A LookaheadError names what is missing or foreign; no code from a file is run."""
    stored, config = read_head(source, hub, "block drafter", _NOT_READ)
    tensors, name = {_PREFIX.sub("", each): tensor for each, tensor in stored.items()}, str(source)
    told = Told(config, name)
    _refuse_others(tensors, told)
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    sizes = sizes_of(tensors, told)
    offsets = offsets_of(offsets, mask, sizes.draft_vocab_size, name)
    tokens = tensors["markov_head.markov_w1.weight"].shape[0] if sizes.markov else 0
    try:
        with torch.device("meta"):
            network = BlockNetwork(sizes, tokens)
    except MODEL_ERRORS as error:
        raise told.refuse(f"RoPE cannot be as config.json says, {sizes.rope}: {error!r}. Mend it.") from error
    fill(network, tensors, name, "block drafter")
    network.rotary = type(network.rotary)(network.rotary.config)  # its table is in no file
    network.d2t = offsets
    return network


def _refuse_others(tensors: Iterable[str], told: Told) -> None:
    dflash, heads = told.part("dflash_config").config, told.config.get("architectures") or ()
    kinds = (told.config.get("speculators_model_type"), told.config.get("model_type"), dflash.get("projector_type"))
    names = [*tensors, *told.config, *dflash, *map(str.lower, map(str, (*kinds, *heads)))]
    for what, pattern in _OTHERS.items():
        if found := [name for name in names if re.search(pattern, name)]:
            raise told.refuse(f"this is {what} ({some(found)}), which is not read: expected DFlash, DSpark or JetSpec.")
    if (dflash.get("is_neox_style", True), told.config.get("is_neox_style", True)) != (True, True):
        raise told.refuse("is_neox_style is False, and only halves of channels are turned here. It is not read.")


def sizes_of(tensors: Mapping[str, Tensor], told: Told) -> BlockSizes:
    """What the tensors are of. They decide; config.json says only what they cannot."""

    def shape(name: str, least: int = 1) -> tuple[int, ...]:
        if name not in tensors:
            raise told.refuse(f"it is no block drafter: it has no {name}, but {some(sorted(tensors))}.")
        if tensors[name].ndim != least:
            raise told.refuse(f"{name} is {list(tensors[name].shape)}, expected {least} dimensions.")
        return tuple(tensors[name].shape)

    theirs = told.text("speculators_model_type")
    if theirs not in (None, "dflash", "dspark"):
        raise told.refuse(f"speculators_model_type is {theirs!r}: expected dflash or dspark.")
    layer = told.part("transformer_layer_config") if theirs else told
    own = Told(_merged(told), told.source)
    hidden, joined = shape("fc.weight", 2)
    (size,) = shape("layers.0.self_attn.q_norm.weight")
    queries, keys = (shape(f"layers.0.self_attn.{part}_proj.weight", 2)[0] for part in "qk")
    if size % 2 or queries % size or keys % size or (queries // size) % (keys // size or 1):
        raise told.refuse(f"projections of {queries} and {keys} rows do not fit heads of {size} channels.")
    ids, block, mask = _layers(own, theirs), own.whole("block_size"), _mask_token(own)
    target = own.whole("target_hidden_size") or hidden
    if block is None or target * len(ids) != joined:
        got = f"block_size={block}, {len(ids)} layers of {target} channels, and fc reads {joined}"
        raise told.refuse(f"config.json must say block_size and the layers that fc reads: got {got}. Complete it.")
    output, table = (
        f"{name}.weight" in tensors and shape(f"{name}.weight", 2)[0] for name in ("lm_head", "embed_tokens")
    )
    markov, rank = _markov(tensors, own), 0
    if markov:
        rank = shape("markov_head.markov_w1.weight", 2)[1]
    confidence = shape("confidence_head.proj.weight", 2)[1] if "confidence_head.proj.weight" in tensors else 0
    if confidence not in (0, hidden, hidden + rank):
        raise told.refuse(f"confidence_head reads {confidence} channels: expected {hidden} or {hidden + rank}.")
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    first = _anchor_first(own, theirs, block)
    if block - (not first) < 1:
        raise told.refuse(f"block_size={block} leaves no place to be filled: expected 2 or more.")
    return BlockSizes(
        hidden_size=hidden,
        target_size=target,
        feature_layers=ids,
        block_size=block,
        anchor_first=first,
        mask_token=mask,
        heads=queries // size,
        key_heads=keys // size,
        head_size=size,
        feed_forward=shape("layers.0.mlp.gate_proj.weight", 2)[0],
        sights=_sights(own, layer, theirs, count),
        own_embeddings=table or None,
        draft_vocab_size=output or None,
        vocab_size=layer.whole("vocab_size"),
        markov=markov,
        rank=rank,
        confidence=confidence,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        input_scale=own.number("input_embedding_scale", 0.0) or None,
        output_multiplier=own.number("output_multiplier", 1.0),
        softcap=own.number("final_logit_softcapping", 0.0) or None,
        eps=layer.number("rms_norm_eps", 1e-6),
        rope=rope_of(_one_rope(layer)),
        max_positions=layer.whole("max_position_embeddings") or 2048,
        base_model=told.part("speculators_config").part("verifier").text("name_or_path")
        or told.text("base_model_name_or_path"),
    )


def _merged(told: Told) -> dict[str, Any]:
    """What stands at the top of config.json or in ``dflash_config``."""
    inner = dict(told.part("dflash_config").config)
    for name in _TWICE:
        if None not in (one := inner.get(name), other := told.config.get(name)) and one != other:
            raise told.refuse(f"{name} is {one!r} in dflash_config and {other!r} beside it. Drop the wrong one.")
    if inner.get("causal") is None:
        inner["causal"] = inner.get("causal_head")
    return inner | {name: value for name, value in told.config.items() if value is not None}


def _layers(own: Told, theirs: str | None) -> tuple[int, ...]:
    """The states that are read, as ``hidden_states`` count: speculators' numbers do, those of others are one less."""
    name = "aux_hidden_state_layer_ids" if theirs else "target_layer_ids"
    ids = own.of(
        name,
        "a list of different numbers of layers",
        lambda value: (
            isinstance(value, list)
            and all(type(index) is int and index >= -1 for index in value)
            and len(set(value)) == len(value)
        ),
    )
    if not ids:
        raise own.refuse(f"config.json has no {name}: which of the model's states it reads cannot be guessed. Add it.")
    return tuple(ids) if theirs else tuple(index + 1 for index in ids)


def _mask_token(own: Told) -> int:
    mask = own.of("mask_token_id", "a token", lambda value: type(value) is int and value >= 0)
    if mask is None:
        raise own.refuse("config.json has no mask_token_id, the token that stands where one is to be filled. Add it.")
    return int(mask)


def _markov(tensors: Mapping[str, Tensor], own: Told) -> str | None:
    """The kind of the Markov head, which its tensors tell."""
    held = {name.split(".")[1] for name in tensors if name.startswith("markov_head.")}
    found = "gated" if "gate_proj" in held else "rnn" if "joint_proj" in held else "vanilla" if held else None
    said = own.text("markov_head_type")
    if found and said not in (None, found):
        raise own.refuse(f"markov_head_type is {said!r}, and the tensors are those of {found!r}. Mend config.json.")
    return found


def _anchor_first(own: Told, theirs: str | None, block: int) -> bool:
    """Whether the first place drafts. DeepSpec's files do, those of others where they say so."""
    said = own.of("sample_from_anchor", "true or false", lambda value: isinstance(value, bool))
    if said is not None:
        return bool(said)
    if theirs:  # how many tokens are drafted tells
        methods = own.part("speculators_config").config.get("proposal_methods") or [{}]
        return bool(isinstance(methods[0], dict) and methods[0].get("speculative_tokens") == block)
    kind = own.text("projector_type")
    if kind not in (None, "dflash", "dspark"):
        raise own.refuse(f"projector_type is {kind!r}: expected dflash or dspark.")
    return kind == "dspark" or "markov_rank" in own.config


def _sights(own: Told, layer: Told, theirs: str | None, count: int) -> tuple[Sight, ...]:
    """What each layer sees. Where nothing is said, only layers with a window are blind to later slots."""
    kinds = layer.of("layer_types", f"{count} kinds of layers", lambda value: len(value) == count)
    said = [own.of(name, "true or false", lambda value: isinstance(value, bool)) for name in ("is_causal", "causal")]
    causal = next((each for each in said if each is not None), None)
    slides = not own.config.get("sliding_window_non_causal") if causal is None else causal
    sights: list[Sight] = []
    for kind in kinds or ["full_attention"] * count:
        window = layer.whole("sliding_window") if kind == "sliding_attention" else None
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention") != (window is not None):
            raise own.refuse(f"a layer is {kind!r} with a window of {window}: expected full or sliding, with one.")
        sights.append((window, bool(slides if window else causal)))
    return tuple(sights)


def _one_rope(layer: Told) -> Told:
    """The layer's config with the RoPE that all of its kinds of layers share."""
    nested = [each for each in layer.part("rope_parameters").config.values() if isinstance(each, dict)]
    if any(each != nested[0] for each in nested):
        raise layer.refuse(f"its layers turn in different ways, {nested}: expected one RoPE. It is not read.")
    return Told({**layer.config, "rope_parameters": nested[0]}, layer.source) if nested else layer


def write(network: BlockNetwork, folder: str | PathLike[str]) -> None:
    """Write a drafter as DeepSpec does, beside what else is in a folder."""
    sizes, tensors = network.sizes, dict(network.state_dict())
    if network.d2t is not None:
        if sizes.vocab_size is None:
            raise LookaheadError("The drafter scores some of an unknown number of tokens. Read it with model=.")
        tensors["t2d"] = torch.zeros(sizes.vocab_size, dtype=torch.bool).scatter(0, network.scored().cpu(), True)
    causal = {causal for _, causal in sizes.sights}
    if len(causal) > 1 and any(blind != (window is not None) for window, blind in sizes.sights):
        raise LookaheadError(f"No layout says which layers see later slots by themselves: got {sizes.sights}.")
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden_size,
        "target_hidden_size": sizes.target_size,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "num_hidden_layers": len(sizes.sights),
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "attention_bias": sizes.attention_bias,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope.get("rope_theta"),
        "rope_parameters": sizes.rope,
        "max_position_embeddings": sizes.max_positions,
        "vocab_size": sizes.vocab_size,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window, _ in sizes.sights],
        "sliding_window": next((window for window, _ in sizes.sights if window is not None), None),
        "block_size": sizes.block_size,
        "mask_token_id": sizes.mask_token,
        "target_layer_ids": [index - 1 for index in sizes.feature_layers],
        "sample_from_anchor": sizes.anchor_first,
        "is_causal": causal.pop() if len(causal) == 1 else None,
        "markov_rank": sizes.rank,
        "markov_head_type": sizes.markov,
        "enable_confidence_head": bool(sizes.confidence),
        "confidence_head_with_markov": sizes.confidence > sizes.hidden_size,
        "input_embedding_scale": sizes.input_scale,
        "output_multiplier": sizes.output_multiplier,
        "final_logit_softcapping": sizes.softcap,
        "base_model_name_or_path": sizes.base_model,
        "tie_word_embeddings": False,
        "torch_dtype": str(network.fc.weight.dtype).removeprefix("torch."),
    }
    write_head(folder, tensors, config)

"""Block drafters from files, in the layouts of z-lab, JetSpec, DeepSpec and speculators, and to DeepSpec's."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from lookahead.heads.block.network import BlockNetwork, BlockSizes, Sight
from lookahead.heads.storage import Told, fill, offsets_of, read_head, rope_of, some, write_head
from lookahead.models.compat import MODEL_ERRORS

_NOT_READ = re.compile(r"(?:^|\.)(?:verifier_|rotary_emb\.)")
_PREFIX = re.compile(r"^(?:model\.|logit_head\.|encoder\.)+")
# What looks like a block drafter and is another network: by names of tensors, or lines "key=value" of config.json.
_OTHERS = {
    "a Laguna drafter": r"qkv_proj|\bg_proj|aux_hidden_norms",
    "a MiMo drafter": r"attention_sink_bias|use_swa|mask_embedding",
    "a DFlare drafter": r"layer_fusion_weights|k_proj_target",
    "a drafter with a noise embedding": r"log_snr_embed",
    "a drafter with latent or sparse attention": r"kv_a_proj|q_a_proj|compress_ratios",
    "an MTP layer": r"^mtp\.",
    "a PARD model": r"^pard_token|target_proj",
    "a P-EAGLE head": r"^mask_hidden",
    "a DFlash 2 drafter": r"_conv\.|candidate_selector|^conv_kernel_size",
    "a Domino drafter": r"prefix_gru|\bembed_proj",
    "a DSpine drafter": r"^injection\.|^transfer_codes|^dspine",
    "a Gemma 4 drafter": r"pre_feedforward_layernorm|layer_scalar|^model_type=gemma4",
    "an assistant of transformers": r"pre_projection",
    "a drafter with a random adapter": r"hidden_dim_adapter",
    "a drafter that turns neighbouring channels": r"^is_neox_style=false",
    "a drafter whose layers turn in different ways": r"rope_parameters\W+(?:full|sliding)_attention",
    "another kind of drafter": r"^(?:speculators_model|projector)_type=(?!(?:dflash|dspark|none)$)",
    "quantised": r"weight_packed|weight_scale|\bqweight",
}
_TWICE = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")  # which stand in either of two places


def read(source: str | PathLike[str], hub: Mapping[str, Any]) -> BlockNetwork:
    """The drafter that ``source`` holds, as :func:`sizes_of` tells it: a folder, a file in it, or a repository of the
    hub. A LookaheadError names what is missing or foreign; no code from a file is run."""
    return made(*read_head(source, hub, "block drafter", _NOT_READ), str(source))


def made(stored: Mapping[str, Tensor], config: dict[str, Any], name: str) -> BlockNetwork:
    """The drafter of ``stored`` tensors and of what config.json says, from a place of this ``name``."""
    if config.get("model_type") == "muse_glimmer_assistant":  # which leaves the rest to code
        config = config | {"is_causal": False, "sample_from_anchor": False, "input_embedding_scale": 1.0}
        config["sliding_window"] = (config.get("sliding_window") or 2048) + 1  # both ends count
    tensors, told = {_PREFIX.sub("", each): tensor for each, tensor in stored.items()}, Told(config, name)
    tensors = {each.replace("output_norm_enc", "hidden_norm"): tensor for each, tensor in tensors.items()}
    said = [*config.items(), *told.part("dflash_config").config.items()]
    names = [*tensors, *(f"{key}={value}".lower() for key, value in said)]
    for what, pattern in _OTHERS.items():
        if found := [each for each in names if re.search(pattern, each)]:
            raise told.refuse(f"this is {what} ({some(found)}), which is not read: expected DFlash, DSpark or JetSpec.")
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    sizes = sizes_of(tensors, told)
    offsets = offsets_of(offsets, mask, sizes.draft_vocab_size, name)
    if offsets is not None:
        sizes = replace(sizes, draft_vocab_size=len(offsets))
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


def sizes_of(tensors: Mapping[str, Tensor], told: Told) -> BlockSizes:
    """What the tensors are of. They decide; config.json says only what they cannot."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise told.refuse(f"it is no block drafter: it has no {name}, but {some(sorted(tensors))}.")
        return (*tensors[name].shape, 0, 0)[:2]

    theirs = told.text("speculators_model_type")
    layer = told.part("transformer_layer_config") if theirs else told
    own = Told(_merged(told), told.source)
    hidden, joined = shape("fc.weight")
    size = shape("layers.0.self_attn.q_norm.weight")[0] or 1  # which is none
    queries, keys = (shape(f"layers.0.self_attn.{part}_proj.weight")[0] for part in "qk")
    layers = "aux_hidden_state_layer_ids" if theirs else "target_layer_ids"
    ids = _needed(own, layers, "a list of different numbers of layers", _are_different_layers)
    ids = tuple(ids) if theirs else tuple(index + 1 for index in ids)  # speculators count as hidden_states do
    mask = _needed(own, "mask_token_id", "a token", lambda value: type(value) is int and value >= 0)
    block = _needed(own, "block_size", "a number of places", lambda value: type(value) is int and value > 0)
    target = own.whole("target_hidden_size") or hidden
    if target * len(ids) != joined:
        raise told.refuse(
            f"fc reads {joined} channels: expected {target} of each of {layers}, {ids}. Mend config.json."
        )
    output, table = (f"{name}.weight" in tensors and shape(f"{name}.weight")[0] for name in ("lm_head", "embed_tokens"))
    markov = _markov(tensors, own)
    rank = shape("markov_head.markov_w1.weight")[1] if markov else 0
    confidence = shape("confidence_head.proj.weight")[1] if "confidence_head.proj.weight" in tensors else 0
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    first = _anchor_first(own, theirs, block)
    shared = size % 2 == queries % size == keys % size == 0 < keys and queries % keys == 0
    if not shared or confidence not in (0, hidden, hidden + rank) or block < 2 - first:
        got = f"{queries} and {keys} channels of heads of {size}, block_size={block}, confidence_head of {confidence}"
        raise told.refuse(f"these sizes do not fit each other: {got}, hidden size {hidden}, rank {rank}.")
    made: dict[str, Any] = {"hidden_size": hidden, "target_size": target, "feature_layers": ids, "block_size": block}
    made |= {"anchor_first": first, "mask_token": mask, "sights": _sights(own, layer, theirs, count)}
    made |= {"heads": queries // size, "key_heads": keys // size, "head_size": size}
    made |= {"feed_forward": shape("layers.0.mlp.gate_proj.weight")[0], "markov": markov, "rank": rank}
    made |= {"own_embeddings": table or None, "own_output": output > 0, "draft_vocab_size": output or None}
    made |= {"attention_bias": "layers.0.self_attn.q_proj.bias" in tensors, "vocab_size": layer.whole("vocab_size")}
    made |= {"confidence": confidence, "input_scale": own.number("input_embedding_scale", 0.0) or None}
    made |= {"output_multiplier": own.number("output_multiplier", 1.0), "eps": layer.number("rms_norm_eps", 1e-6)}
    made |= {"softcap": own.number("final_logit_softcapping", 0.0) or None, "rope": rope_of(layer)}
    theirs = told.part("speculators_config").part("verifier").text("name_or_path")
    return BlockSizes(**made, base_model=theirs or told.text("base_model_name_or_path"))


def _merged(told: Told) -> dict[str, Any]:
    """What stands at the top of config.json or in ``dflash_config``."""
    inner = dict(told.part("dflash_config").config)
    for name in _TWICE:
        if None not in (one := inner.get(name), other := told.config.get(name)) and one != other:
            raise told.refuse(f"{name} is {one!r} in dflash_config and {other!r} beside it. Drop the wrong one.")
    if inner.get("causal") is None:
        inner["causal"] = inner.get("causal_head")
    return inner | {name: value for name, value in told.config.items() if value is not None}


def _needed(own: Told, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
    if (found := own.of(name, expected, fits)) is None:
        raise own.refuse(f"config.json has no {name}: expected {expected}, which cannot be guessed. Add it.")
    return found


def _are_different_layers(value: Any) -> bool:
    numbers = isinstance(value, list) and all(type(index) is int and index >= -1 for index in value)
    return numbers and 0 < len(set(value)) == len(value)


def _markov(tensors: Mapping[str, Tensor], own: Told) -> str | None:
    """The kind of the Markov head, which its tensors tell."""
    held = {name.split(".")[1] for name in tensors if name.startswith("markov_head.")}
    found = "gated" if "gate_proj" in held else "rnn" if "joint_proj" in held else "vanilla" if held else None
    if found and (said := own.text("markov_head_type")) not in (None, found):
        raise own.refuse(f"markov_head_type is {said!r}, and the tensors are those of {found!r}. Mend config.json.")
    return found


def _anchor_first(own: Told, theirs: str | None, block: int) -> bool:
    """Whether the first place drafts. DeepSpec's files do, those of others where they say so."""
    if (said := _flag(own, "sample_from_anchor")) is not None:
        return said
    if theirs:  # how many tokens are drafted tells
        methods = own.part("speculators_config").config.get("proposal_methods") or [{}]
        return bool(isinstance(methods[0], dict) and methods[0].get("speculative_tokens") == block)
    return own.text("projector_type") == "dspark" or "markov_rank" in own.config


def _flag(own: Told, name: str) -> bool | None:
    return own.of(name, "true or false", lambda value: isinstance(value, bool))


def _sights(own: Told, layer: Told, theirs: str | None, count: int) -> tuple[Sight, ...]:
    """What each layer sees. Where nothing is said, only layers with a window are blind to later slots."""
    kinds = layer.of("layer_types", f"{count} kinds of layers", lambda value: len(value) == count)
    causal = _flag(own, "causal") if (said := _flag(own, "is_causal")) is None else said
    slides = not own.config.get("sliding_window_non_causal") if causal is None else causal
    sights: list[Sight] = []
    for kind in kinds or ["full_attention"] * count:
        window = layer.whole("sliding_window") if kind == "sliding_attention" else None
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention") != (window is not None):
            raise own.refuse(f"a layer is {kind!r} with a window of {window}: expected full or sliding, with one.")
        sights.append((window, bool(slides if window else causal)))
    return tuple(sights)


def write(network: BlockNetwork, folder: str | PathLike[str], bits: int = 16) -> None:
    """Write a drafter as DeepSpec does, beside what else is in a folder."""
    sizes, tensors = network.sizes, dict(network.state_dict())
    if network.d2t is not None:
        ids = network.scored().cpu()
        tensors["t2d"] = torch.zeros(sizes.vocab_size or int(ids.max()) + 1, dtype=torch.bool).scatter(0, ids, True)
    causal = {causal for _, causal in sizes.sights}  # both only as config.json says where it says nothing
    windows = [window for window, _ in sizes.sights]
    config: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_act": "silu"}
    config |= {"hidden_size": (hidden := sizes.hidden_size), "target_hidden_size": sizes.target_size}
    config |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.key_heads, "head_dim": sizes.head_size}
    config |= {"intermediate_size": sizes.feed_forward, "num_hidden_layers": len(windows), "rms_norm_eps": sizes.eps}
    config |= {"attention_bias": sizes.attention_bias, "tie_word_embeddings": False, "rope_parameters": sizes.rope}
    config |= {"layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}
    config |= {"sliding_window": max(windows, key=lambda window: window or 0)}
    config |= {"is_causal": causal.pop() if len(causal) == 1 else None, "sample_from_anchor": sizes.anchor_first}
    config |= {"block_size": sizes.block_size, "base_model_name_or_path": sizes.base_model}
    config |= {"target_layer_ids": [index - 1 for index in sizes.feature_layers]}
    config |= {"mask_token_id": sizes.mask_token, "markov_rank": sizes.rank, "markov_head_type": sizes.markov}
    config |= {"enable_confidence_head": sizes.confidence > 0, "confidence_head_with_markov": sizes.confidence > hidden}
    config |= {"input_embedding_scale": sizes.input_scale, "output_multiplier": sizes.output_multiplier}
    config |= {"final_logit_softcapping": sizes.softcap, "vocab_size": sizes.vocab_size}
    config |= {"torch_dtype": str(network.fc.weight.dtype).removeprefix("torch.")}
    write_head(folder, tensors, config, bits)

"""``lookahead support``: how a model would be decoded, and why."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from typer import Exit

from jacobi import LookaheadError
from lookahead import _native
from lookahead.cli import common
from lookahead.cli.arguments import Support
from lookahead.loading import load_weights
from lookahead.model_folder import find_model, has_weights
from lookahead.models.conformance import recorded, recorded_version
from lookahead.models.traits import ModelTraits
from lookahead.runtime.quantised_layers import quantize
from lookahead.support import route as checks
from lookahead.support.bits import bits_of


def support(options: Support) -> None:
    model, weights = _load(options)
    known = _facts(model, weights)
    common.report(known, options.as_json, lambda console: console.print(common.facts(known)))
    if known["route"] == "plain":
        raise Exit(1)


def _load(options: Support) -> tuple[PreTrainedModel, bool]:
    source, dtype, path = options.model, common.weights_dtype(options.dtype), Path(options.model).expanduser()
    device, given = common.usable_device(options.device), dict[str, Any]()
    if options.quantize is not None:
        dtype, device = torch.bfloat16, "cpu"
    folder: str | Path = path.parent if path.name == "config.json" else path if path.exists() else source
    weights = (path.is_dir() and has_weights(path)) or path.suffix == ".gguf"
    if weights or options.gguf_file:
        folder, gguf_file = find_model(folder, options.gguf_file)
        given = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(folder, **given)
        kind = _class_of(config)
        if not weights:
            if options.quantize is not None:
                raise LookaheadError(f"--quantize needs weights: {source} has a config alone.")
            with torch.device("meta"):
                return (kind(config) if issubclass(kind, PreTrainedModel) else kind.from_config(config)), False
        with common.loading("Loading the model"):
            if config.is_encoder_decoder:
                model = kind.from_pretrained(path, dtype=dtype).to(device).eval()
            else:
                model = load_weights(path, dtype, device, options.gguf_file)
            return (model if options.quantize is None else quantize(model, options.quantize)), True
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LookaheadError(f"--model {source} cannot be read as a model that writes text: {error}") from error


def _class_of(config: PreTrainedConfig) -> Any:
    """The class that a config names, else the first of transformers' mappings that knows the config."""
    named: Any = getattr(transformers, (config.architectures or [""])[0] or "AutoModel", None)
    if isinstance(named, type) and issubclass(named, PreTrainedModel) and hasattr(named, "generate"):
        return named
    makers: list[tuple[Any, Any]] = [
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (transformers.AutoModelForMultimodalLM, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING),
        (transformers.AutoModelForSpeechSeq2Seq, transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
        (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    ]
    if config.is_encoder_decoder:
        makers = [makers[-1], *makers[1:]]
    found = next((auto for auto, known in makers if type(config) in known), None)
    if found is None:
        raise ValueError(f"transformers knows no model of type {config.model_type!r} that does")
    return found


def _facts(model: PreTrainedModel, weights: bool) -> dict[str, Any]:
    traits = ModelTraits.of(model)
    how = (*checks.verdict(model), "class, config and self-test") if weights else _recorded_verdict(model, traits)
    limits = []
    if traits.rope_limit is not None:
        limits.append(f"plain passes from position {traits.rope_limit[1]} on ({traits.rope_limit[0]} RoPE)")
    if traits.index_limit is not None:
        limits.append(f"plain passes past {traits.index_limit} tokens (attention leaves out some)")
    if traits.depth_limit is not None:
        whose = " of the decoder" if traits.is_encoder_decoder else ""
        limits.append(f"{traits.depth_limit} positions{whose} (a learned table)")
    layers = sorted({type(layer).__name__ for layer in DynamicCache(config=traits.config).layers})
    return {
        "model": traits.name,
        "kind": "encoder-decoder" if traits.is_encoder_decoder else "causal",
        "route": how[0],
        "reason": how[1],
        "attention": traits.attention,
        "text": _kept(model, traits, how[0]) if weights else None,
        "cache_layers": ", ".join(layers) or "DynamicLayer",
        "limits": "; ".join(limits) or None,
        "checked": how[2],
        "built_in_c": "yes" if _native.speedups else f"no: {_native.missing}, so drafting takes longer; {_native.CURE}",
    }


@torch.no_grad()
def _kept(model: PreTrainedModel, traits: ModelTraits, route: str) -> str:
    """What a seed's text keeps whatever else changes, and why no more."""
    bits = bits_of(model, traits, route)
    names = {"plain": "plain generate's", "repeatable": "the same each time", None: "may change with a rounding"}
    name = names[bits.keeps]
    return name if bits.reason is None else f"{name} ({bits.reason})"


def _recorded_verdict(model: PreTrainedModel, traits: ModelTraits) -> tuple[str, str | None, str]:
    """Route, reason and what they rest on, for a model without weights."""
    reason = checks.no_tree(model, traits)
    try:
        checks.check_model(model, traits)
    except LookaheadError as error:
        return "plain", str(error), "class and config"
    found = recorded(model)
    version = f"the conformance record of transformers {recorded_version()}"
    if not found:
        route = "tree" if reason is None else "plain" if traits.is_encoder_decoder else "unknown"
        missing = "does not have this class, and there are no weights for the self-test"
        return route, reason, f"class and config; {version} {missing}"
    record = f"class and config (no weights for the self-test), and {version} for {found[0]['architecture']}"
    routes = {entry["route"]: entry.get("reason") for entry in found}
    for route in ("plain", "chain", "tree"):
        if route in routes and (reason is None or route != "tree"):
            return route, reason if route == "chain" and reason else routes[route], record
    # This config has layers that the recorded one does not.
    return "unknown", reason, f"{record}, whose config could follow trees"

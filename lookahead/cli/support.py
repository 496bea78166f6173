"""``lookahead support``: how a model would be decoded, and why."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from jacobi import LookaheadError
from lookahead._files import on_hub
from lookahead.cli import common
from lookahead.loading import has_weights, load_weights
from lookahead.models.conformance import recorded, recorded_version
from lookahead.models.limits import index_limit, position_limit
from lookahead.models.traits import decoder_config, is_seq2seq
from lookahead.support import route as checks


def support(
    model: Annotated[
        str,
        typer.Option("--model", metavar="DIR_OR_CONFIG", help="Folder of a model, or of a config.json, or that file."),
    ],
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Say whether lookahead can decode a model, by which route, and why; exit status 1 if it cannot.

    With weights, the self-test is run. From a config alone, the model is made without weights: what its class and
    config tell is checked, and the rest is what the conformance run found for its class.
    """
    loaded, weights = _load(model, dtype, device)
    facts = _facts(loaded, weights)
    if as_json:
        typer.echo(json.dumps(facts | {"versions": common.versions()}, indent=2))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column()
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), "-" if value is None else str(value))
        Console(highlight=False).print(table)
    if facts["route"] == "plain":
        raise typer.Exit(1)


def _load(source: str, dtype: common.DtypeName, device: str) -> tuple[PreTrainedModel, bool]:
    """The model, and whether it has weights."""
    path = Path(source).expanduser()
    folder = path.parent if path.name == "config.json" else path
    weights = path.is_dir() and has_weights(path)
    if not path.exists() and not on_hub(source):
        raise LookaheadError(f"--model {source} does not exist: expected a model's folder, or a config.json.")
    try:
        config = AutoConfig.from_pretrained(folder if path.exists() else source)
        named: Any = getattr(transformers, (config.architectures or [""])[0] or "AutoModel", None)
        own = isinstance(named, type) and issubclass(named, PreTrainedModel) and hasattr(named, "generate")
        maker = named if own else _auto_class(config)
        if weights and not config.is_encoder_decoder:
            with common.no_bars(), Console(stderr=True).status("Loading the model"):
                return load_weights(path, dtype=getattr(torch, dtype), device=device), True
        if weights:
            return maker.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval(), True
        with torch.device("meta"):
            return named(config) if own else maker.from_config(config), False
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LookaheadError(f"--model {source} cannot be read as a model that writes text: {error}") from error


def _auto_class(config: PreTrainedConfig) -> Any:
    """The first of transformers' mappings that knows a config, which need not name a class.

    Raises:
        ValueError: none of them does.
    """
    makers: list[tuple[Any, Any]] = [
        (AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (AutoModelForMultimodalLM, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING),
        (AutoModelForSpeechSeq2Seq, transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
        (AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    ]
    if config.is_encoder_decoder:
        makers = [makers[-1], *makers[1:]]
    found = next((auto for auto, known in makers if type(config) in known), None)
    if found is None:
        raise ValueError(f"transformers knows no model of type {config.model_type!r} that does")
    return found


def _facts(model: PreTrainedModel, weights: bool) -> dict[str, Any]:
    config = decoder_config(model)
    verdict = (*checks.verdict(model), "class, config and self-test") if weights else _recorded_verdict(model)
    route, reason, checked = verdict
    limits = []
    rope = position_limit(model)
    if rope is not None:
        limits.append(f"plain passes from position {rope[1]} on ({rope[0]} RoPE)")
    if index_limit(model) is not None:
        limits.append(f"plain passes past {index_limit(model)} tokens (attention leaves out some)")
    if checks.depth_limit(model) is not None:
        whose = "positions of the decoder" if is_seq2seq(model) else "positions"
        limits.append(f"{checks.depth_limit(model)} {whose} (a learned table)")
    layers = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers})
    return {
        "model": type(model).__name__,
        "kind": "encoder-decoder" if is_seq2seq(model) else "causal",
        "route": route,
        "reason": reason,
        "attention": config._attn_implementation,
        "cache_layers": ", ".join(layers) or "DynamicLayer",
        "limits": "; ".join(limits) or None,
        "checked": checked,
    }


def _recorded_verdict(model: PreTrainedModel) -> tuple[str, str | None, str]:
    """Route, reason and what they rest on, for a model without weights: class and config, and the class's record."""
    reason = checks.no_tree(model)
    try:
        checks.check_model(model)
    except LookaheadError as error:
        return "plain", str(error), "class and config"
    found = recorded(model)
    version = f"the conformance record of transformers {recorded_version()}"
    if not found:
        route = "tree" if reason is None else "plain" if is_seq2seq(model) else "unknown"
        missing = f"class and config; {version} does not have this class"
        return route, reason, f"{missing}, and there are no weights for the self-test"
    record = f"class and config (no weights for the self-test), and {version} for {found[0]['architecture']}"
    routes = {entry["route"]: entry.get("reason") for entry in found}
    for route in ("plain", "chain", "tree"):
        if route in routes and (reason is None or route != "tree"):
            return route, reason if route == "chain" and reason else routes[route], record
    # This config has layers that the recorded one does not.
    return "unknown", reason, f"{record}, whose config could follow trees"

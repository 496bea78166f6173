"""``lookahead support``: how a model would be decoded, and why."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from jacobi import LookaheadError
from lookahead import support as checks
from lookahead.bundled import load_weights
from lookahead.cli import common
from lookahead.handover import index_limit, position_limit


def support(
    model: Annotated[
        str,
        typer.Option("--model", metavar="DIR_OR_CONFIG", help="Folder of a model, or of a config.json, or that file."),
    ],
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Print whether lookahead can decode a model, by which route, and why: exit status 1 if it cannot.

    With weights, the self-test is run. From a config alone, the model is made without weights, and only what its class
    and config tell is checked.
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
    patterns = ("*.safetensors", "*.bin", "*.gguf")
    if path.is_dir() and any(next(path.glob(pattern), None) is not None for pattern in patterns):
        with common.no_bars(), Console(stderr=True).status("Loading the model"):
            return load_weights(path, dtype=getattr(torch, dtype), device=device), True
    if not path.exists() and source.count("/") != 1:
        raise LookaheadError(f"--model {source} does not exist: expected a model's folder, or a config.json.")
    try:
        config = AutoConfig.from_pretrained(folder if path.exists() else source)
        named: Any = getattr(transformers, (config.architectures or [""])[0] or "AutoModelForCausalLM", None)
        with torch.device("meta"):
            if hasattr(named, "_from_config") and hasattr(named, "generate"):
                return named._from_config(config), False
            return AutoModelForCausalLM.from_config(config), False
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LookaheadError(f"--model {source} cannot be read as a causal model: {error}") from error


def _facts(model: PreTrainedModel, weights: bool) -> dict[str, Any]:
    config = model.config.get_text_config()
    route, reason = checks.verdict(model) if weights else checks.route(model)
    attention = config._attn_implementation
    if route == "tree" and not weights:
        try:
            checks.check_model(model)
        except LookaheadError as error:
            route, reason = "plain", str(error)
    limits = []
    rope = position_limit(model)
    if rope is not None:
        limits.append(f"plain passes from position {rope[1]} on ({rope[0]} RoPE)")
    if index_limit(model) is not None:
        limits.append(f"plain passes past {index_limit(model)} tokens (attention leaves out some)")
    if checks.depth_limit(model) is not None:
        limits.append(f"{checks.depth_limit(model)} positions (a learned table)")
    layers = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers})
    return {
        "model": type(model).__name__,
        "route": route,
        "reason": reason,
        "attention": attention,
        "cache_layers": ", ".join(layers) or "DynamicLayer",
        "limits": "; ".join(limits) or None,
        "checked": "class, config and self-test" if weights else "class and config (no weights for the self-test)",
    }

"""``lookahead convert-medusa``: read Medusa heads in any published format, and write them in another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from jacobi import LookaheadError
from lookahead._files import check_free
from lookahead.cli import common
from lookahead.cli.options import JsonOption
from lookahead.loading import load_weights
from lookahead.sources.medusa.checkpoints.reading import Checkpoint, read_checkpoint
from lookahead.sources.medusa.heads import Format, MedusaHeads, write_heads

_MODEL_HELP = "The heads' model: they are checked against it; vLLM's format takes its output layer if they have none."


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Annotated[str, Argument(metavar="SOURCE", help="Heads: a folder, a file, or a name on the hub.")]
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write.")]
    to: Annotated[Format, Option(help="As published with Medusa, or as vLLM loads a draft model.")] = "medusa"
    model: Annotated[str | None, Option(metavar="DIR", help=_MODEL_HELP)] = None
    force: Annotated[bool, Option("--force", help="Replace TARGET and all files in it.")] = False
    as_json: JsonOption = False


def convert_medusa(options: Options) -> None:
    """Convert Medusa heads between the published formats.

    TARGET is written completely, or not at all.
    """
    source, target = options.source, options.target
    place = check_free(target, options.force)
    if place.exists() and Path(source).expanduser().resolve().is_relative_to(place):
        raise LookaheadError(f"{source} lies in {target}, which would be replaced. Name another target.")
    with common.loading("Reading the heads"):
        model = None if options.model is None else load_weights(options.model)
        checkpoint = read_checkpoint(source, model)
        heads = MedusaHeads.from_tensors(checkpoint.tensors, model)
    write_heads(heads, target, options.to, model=model, replace=options.force)
    read = _facts(checkpoint, heads)
    if options.as_json:
        common.echo_json({"source": source, "read": read, "target": str(target), "written": options.to})
        return
    console = Console(highlight=False)
    console.print(common.facts(read, f"Read from {source}", unknown="not stored"))
    console.print(f"Wrote {target} in the format of {'vLLM' if options.to == 'vllm' else 'Medusa'}.", style="bold")


def _facts(checkpoint: Checkpoint, heads: MedusaHeads) -> dict[str, Any]:
    facts = {
        "format": checkpoint.format,
        "files": list(checkpoint.files),
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "output_layers": "own" if heads.own_output else "the model's",
        "hidden_size": heads.hidden_size,
        "vocabulary": heads.vocab_size,
        "dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "base_model": heads.base_model,
    }
    return facts | ({"remarks": list(checkpoint.remarks)} if checkpoint.remarks else {})

"""``lookahead convert-medusa``: read Medusa heads in any published format, and write them in another."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jacobi import LookaheadError
from lookahead._files import check_free
from lookahead.cli import common
from lookahead.loading import load_weights
from lookahead.sources.medusa.checkpoints.reading import Checkpoint, read_checkpoint
from lookahead.sources.medusa.files import Format, write_heads
from lookahead.sources.medusa.heads import MedusaHeads


def convert_medusa(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Heads: a folder, a file, or a name on the hub.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write.")],
    to: Annotated[
        Format, typer.Option(help="Of the files: as published with Medusa, or as vLLM loads a draft model.")
    ] = "medusa",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The model of the heads: they are checked against it, and vLLM's format takes its output layer where "
            "the heads have none.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET and all files in it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Convert Medusa heads between the published formats.

    TARGET is written completely, or not at all.
    """
    place = check_free(target, force)
    if place.exists() and Path(source).expanduser().resolve().is_relative_to(place):
        raise LookaheadError(f"{source} lies in {target}, which would be replaced. Name another target.")
    with common.no_bars(), Console(stderr=True).status("Reading the heads"):
        loaded = None if model is None else load_weights(model)
        checkpoint = read_checkpoint(source, loaded)
        heads = MedusaHeads.from_tensors(checkpoint.tensors, loaded)
    write_heads(heads, target, to, model=loaded, replace=force)
    read = _facts(checkpoint, heads)
    if as_json:
        document = {"source": source, "read": read, "target": str(target), "written": to}
        typer.echo(json.dumps(document | {"versions": common.versions()}, indent=2))
        return
    console = Console(highlight=False)
    table = Table(title=f"Read from {source}", box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in read.items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), "not stored" if value is None else text)
    console.print(table)
    console.print(f"Wrote {target} in the format of {'vLLM' if to == 'vllm' else 'Medusa'}.", style="bold")


def _facts(checkpoint: Checkpoint, heads: MedusaHeads) -> dict[str, Any]:
    """What a checkpoint was found to be, for people and as JSON."""
    numbers = sum(parameter.numel() for parameter in heads.parameters())
    facts = {
        "format": checkpoint.format,
        "files": list(checkpoint.files),
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "output_layers": "own" if heads.own_output else "the model's",
        "hidden_size": heads.hidden_size,
        "vocabulary": heads.vocab_size,
        "dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "parameters": numbers,
        "base_model": heads.base_model,
    }
    return facts | ({"remarks": list(checkpoint.remarks)} if checkpoint.remarks else {})

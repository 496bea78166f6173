"""``lookahead convert-eagle``: read an EAGLE head in either published format, and write it in one of them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from jacobi import LookaheadError
from lookahead._files import whole_folder
from lookahead.cli import common
from lookahead.cli.options import JsonOption
from lookahead.loading import load_weights
from lookahead.sources.eagle.head import EagleHead
from lookahead.sources.eagle.writing import Format

_MODEL_HELP = "The head's model: it is checked against it, and told the size of its vocabulary."


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Annotated[str, Argument(metavar="SOURCE", help="A head: a folder, a file, or a name on the hub.")]
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write.")]
    to: Annotated[Format, Option(help="As SafeAILab publishes heads, or as speculators does.")] = "safeailab"
    model: Annotated[str | None, Option(metavar="DIR", help=_MODEL_HELP)] = None
    force: Annotated[bool, Option("--force", help="Replace TARGET and all files in it.")] = False
    as_json: JsonOption = False


def convert_eagle(options: Options) -> None:
    """Convert an EAGLE head between the published formats.

    TARGET is written completely, or not at all.
    """
    source, target = options.source, options.target
    if target.exists() and Path(source).expanduser().resolve().is_relative_to(target.expanduser().resolve()):
        raise LookaheadError(f"{source} lies in {target}, which would be replaced. Name another target.")
    with common.loading("Reading the head"):
        model = None if options.model is None else load_weights(options.model)
        head = EagleHead.from_pretrained(source, model=model)
    with whole_folder(target, options.force) as part:
        head.save_pretrained(part, format=options.to)
    read = asdict(head.network.sizes)
    if options.as_json:
        common.echo_json({"source": source, "read": read, "target": str(target), "written": options.to})
        return
    console = Console(highlight=False)
    console.print(common.facts(read, f"Read from {source}", unknown="not stored"))
    console.print(f"Wrote {target} in the format of {options.to}.", style="bold")

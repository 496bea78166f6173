"""``lookahead convert``: read heads in any published format, and write them in one."""

from typing import Any

from rich.console import Console

from jacobi import LookaheadError
from lookahead._files import whole_folder
from lookahead.cli import common
from lookahead.cli.training_arguments import Convert
from lookahead.loading import load_weights
from lookahead.registry import KINDS


def convert(options: Convert) -> None:
    kind = KINDS[options.kind].part("head")
    form = options.to or kind.formats[0]
    if form not in kind.formats:
        raise LookaheadError(f"--to {form}: expected one of {', '.join(kind.formats)} for --kind {options.kind}.")
    with common.loading("Reading the heads"):
        model = None if options.model is None else load_weights(options.model, gguf_file=options.gguf_file)
        head = getattr(kind, "as_stored", kind.from_pretrained)(options.source, model=model)
    with whole_folder(options.target, options.force) as part:
        head.save_pretrained(part, **{"format": form} if len(kind.formats) > 1 else {})
    read: dict[str, Any] = head.facts()

    def show(console: Console) -> None:
        console.print(common.facts(read, f"Read from {options.source}", unknown="not stored"))
        console.print(f"Wrote {options.target} in the format of {form}.", style="bold")

    document = {"source": options.source, "read": read, "target": str(options.target), "written": form}
    common.report(document, options.as_json, show)

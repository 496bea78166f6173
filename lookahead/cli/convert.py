"""``lookahead convert-eagle`` and ``convert-medusa``: read heads in any published format, and write them in another."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from lookahead._files import whole_folder
from lookahead.cli import common
from lookahead.cli.training_arguments import ConvertEagle, ConvertMedusa, ConvertOptions
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.medusa.heads import MedusaHeads, write_heads
from lookahead.heads.medusa.reading import Checkpoint, read_checkpoint
from lookahead.loading import load_weights


def convert_eagle(options: ConvertEagle) -> None:
    with common.loading("Reading the head"):
        head = EagleHead.from_pretrained(options.source, model=_model(options))
    with whole_folder(options.target, options.force) as part:
        head.save_pretrained(part, format=options.to)
    _report(options, asdict(head.network.sizes), options.to, options.to)


def convert_medusa(options: ConvertMedusa) -> None:
    with common.loading("Reading the heads"):
        model = _model(options)
        checkpoint = read_checkpoint(options.source, model)
        heads = MedusaHeads.from_checkpoint(checkpoint, model)
    write_heads(heads, options.target, replace=options.force)
    _report(options, _facts(checkpoint, heads), "medusa", "Medusa")


def _model(options: ConvertOptions) -> Any:
    """The model that heads are checked against, if one is named."""
    return None if options.model is None else load_weights(options.model, gguf_file=options.gguf_file)


def _report(options: ConvertOptions, read: dict[str, Any], to: str, name: str) -> None:
    def show(console: Console) -> None:
        console.print(common.facts(read, f"Read from {options.source}", unknown="not stored"))
        console.print(f"Wrote {options.target} in the format of {name}.", style="bold")

    document = {"source": options.source, "read": read, "target": str(options.target), "written": to}
    common.report(document, options.as_json, show)


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

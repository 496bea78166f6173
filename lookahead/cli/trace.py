"""``lookahead trace``: a page that shows a decode pass by pass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.cli import common
from lookahead.cli.options import ModelOptions, NewTokensOption, SizeOptions
from lookahead.cli.prompts import PROMPTS
from lookahead.generation.watch import Pass, watching
from lookahead.pictures.figure import check_matplotlib, draw
from lookahead.pictures.page import page_of
from lookahead.pictures.records import document_of


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SizeOptions):
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The page.")] = Path("trace.html")
    prompt: Annotated[str, Option(help="Text to continue.")] = PROMPTS[0]
    max_new_tokens: NewTokensOption = 96
    temperature: Annotated[float | None, Option(min=0.01, help="Draw tokens; default: the likeliest.")] = None
    seed: Annotated[int, Option(help="Of drafts and of drawn tokens.")] = 0
    nodes: Annotated[int | None, Option(min=1, help="Draft so many tokens a pass. Default: as many as pay.")] = None
    png: Annotated[Path | None, Option(metavar="FILE", help="Save one pass as a picture, too; needs matplotlib.")] = (
        None
    )
    number: Annotated[int | None, Option("--pass", min=0, help="Which. Default: the one that wrote most.")] = None


def trace(options: Options) -> None:
    """Write a page that shows every pass of a decode: its tree, what was accepted, and the time it took."""
    if options.png is not None:
        check_matplotlib()
    strategy: Any = options.lookahead(seed=options.seed)
    if options.nodes is not None:
        strategy = type(strategy)(**options.sizes(), nodes=options.nodes, seed=options.seed)
    common.check_file("--output", options.output)
    common.check_file("--png", options.png, common.PICTURES)
    if options.number is not None and options.number >= options.max_new_tokens:  # every pass writes a token
        told = f"--pass {options.number} cannot exist: {options.max_new_tokens} tokens take as many passes at most."
        raise LookaheadError(f"{told} Name an earlier one, or raise --max-new-tokens.")
    model, tokenizer = options.load()
    inputs = common.encode(tokenizer, options.prompt, model)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature is not None}
    if options.temperature is not None:
        settings["temperature"] = options.temperature
    passes: list[Pass] = []
    torch.manual_seed(options.seed)
    with watching(passes.append):
        decoded = common.decode(model, inputs, strategy, **settings)
    if not passes:
        reason = decoded.stats.explain() if decoded.stats else ""
        raise LookaheadError(f"There is nothing to show. {reason}")
    if options.number is not None and options.number >= len(passes):
        raise LookaheadError(f"--pass {options.number} does not exist: expected 0 to {len(passes) - 1}.")
    document = document_of(tokenizer, options.prompt, passes, f"{options.model_name}: {len(decoded.tokens)} tokens")
    write_text(options.output, page_of(document))
    typer.echo(f"{options.output}: {len(passes)} passes, {len(decoded.tokens)} tokens.")
    if options.png is not None:
        most = max(range(len(passes)), key=lambda index: len(passes[index].rows[0].written))
        number = most if options.number is None else options.number
        draw(document["passes"][number], number, options.png)
        typer.echo(f"{options.png}: pass {number}.")

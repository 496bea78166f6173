"""``lookahead trace``: a page that shows a decode pass by pass."""

import torch
import typer

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.cli import common
from lookahead.cli.arguments import TraceOptions
from lookahead.generation.watch import Pass, watching
from lookahead.pictures.figure import document_of, draw, page_of
from lookahead.stats import counted
from lookahead.strategies.lookahead import Lookahead


def trace(options: TraceOptions) -> None:
    strategy = common.forgetful(options, options.seed)
    if options.nodes is not None:
        strategy = Lookahead(**options.sizes(), nodes=options.nodes, seed=options.seed)
    model, tokenizer = common.load_for(options)
    prompt = options.prompt or common.built_in(tokenizer, options.raw)[0]
    inputs = common.encode(tokenizer, prompt, model, options.raw)
    settings = {"max_new_tokens": options.max_new_tokens} | common.sampling(options.temperature)
    passes: list[Pass] = []
    torch.manual_seed(options.seed)
    with watching(passes.append):
        decoded = common.decode(model, inputs, strategy, **settings)
    told = decoded.stats.explain() if decoded.stats else ""
    if not passes:
        raise LookaheadError(f"There is nothing to show. {told}")
    if options.number is not None and options.number >= len(passes):
        raise LookaheadError(f"--pass {options.number} does not exist: expected 0 to {len(passes) - 1}.")
    written = counted(len(decoded.tokens), "token")
    document = document_of(tokenizer, prompt, passes, f"{common.name_of(options)}: {written}", told)
    write_text(options.output, page_of(document))
    typer.echo(f"{options.output}: {counted(len(passes), 'pass', 'passes')}, {written}.\n{told}")
    if options.png is not None:
        most = max(range(len(passes)), key=lambda index: len(passes[index].rows[0].written))
        number = most if options.number is None else options.number
        each = document["passes"][number]
        what = f"{len(each['tokens']) - 1} drafted, {len(each['accepted']) - 1} accepted"
        draw(each, f"Pass {number}: {what}, {counted(len(each['written']), 'token')} written", options.png)
        typer.echo(f"{options.png}: pass {number}.")

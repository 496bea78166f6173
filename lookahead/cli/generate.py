"""``lookahead generate``: continue one prompt, shown as it is written."""

import torch
import typer
from transformers import TextStreamer

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.arguments import Generate
from lookahead.cli.prompts import read_stdin
from lookahead.pieces import text_of
from lookahead.stats import counted, duration
from lookahead.strategies.base import Strategy
from lookahead.strategies.jacobi import Jacobi
from lookahead.strategies.lookahead import Lookahead


class _Echo(TextStreamer):
    lookahead_draws_nothing = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write ``text``; the last one ends the line."""
        typer.echo(text, nl=stream_end)


def generate(options: Generate) -> None:
    strategy: Strategy | None = None
    if options.strategy == "lookahead":
        strategy = Lookahead(**options.sizes(), seed=options.seed)
    elif options.strategy == "jacobi":
        strategy = Jacobi(seed=options.seed)
    text = read_stdin() if options.prompt in (None, "-") else str(options.prompt)
    if not text:
        raise LookaheadError("The prompt is empty: give --prompt TEXT, or text on stdin.")
    model, tokenizer = common.load_for(options)
    inputs = common.encode(tokenizer, text, model, options.raw)
    streamer = None if options.as_json else _Echo(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": options.sample} | options.sampling()
    decoded = common.decode(model, inputs, strategy, streamer, **settings)
    document = {
        "prompt": text,
        "text": text_of(tokenizer, decoded.tokens),
        "tokens": decoded.tokens,
        "seconds": decoded.seconds,
        "stats": None if decoded.stats is None else decoded.stats.to_dict(),
        "settings": common.described(options, model, strategy, settings | {"seed": options.seed}),
    }
    if options.as_json or options.stats:
        common.report(document, options.as_json, lambda console: typer.echo(_summary(decoded), err=True))


def _summary(decoded: common.Decoded) -> str:
    count, stats = len(decoded.tokens), decoded.stats
    rate = f"{duration(1e3 * decoded.seconds)}, {count / decoded.seconds:.1f} tokens/s"
    passes, each = (count, 1.0) if stats is None else (stats.steps, stats.mean_acceptance_length)
    what = f"{counted(count, 'token')} in {counted(passes, 'pass', 'passes')} ({each:.2f} a pass), {rate}"
    if stats is None:
        return what
    times = {"prompt": "prefill", "drafts": "draft", "passes": "forward", "verification": "verify", "keeping": "keep"}
    told = ", ".join(f"{name} {duration(getattr(stats, f'{field}_ms'))}" for name, field in times.items())
    drafted = f"drafted {counted(stats.drafted, 'token')}, accepted {stats.accepted} ({stats.acceptance_rate:.1%})"
    return f"{what}\n{drafted}\n{told}\n{stats.explain()}"

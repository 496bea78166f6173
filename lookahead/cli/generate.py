"""``lookahead generate``: continue one prompt, shown as it is written."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import TextStreamer
from typer import Option

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.options import JsonOption, ModelOptions, NewTokensOption, SizeOptions
from lookahead.cli.prompts import read_stdin
from lookahead.strategies.base import Strategy
from lookahead.strategies.jacobi import Jacobi

Way = Literal["lookahead", "jacobi", "plain"]


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SizeOptions):
    prompt: Annotated[str | None, Option(help="Text to continue. '-' or none: stdin, less its last line break.")] = None
    strategy: Annotated[Way, Option(help="How drafts are grown; plain is transformers' own decoding.")] = "lookahead"
    max_new_tokens: NewTokensOption = 128
    sample: Annotated[bool, Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False
    temperature: Annotated[float | None, Option(help="Above 0; needs --sample.")] = None
    top_p: Annotated[float | None, Option(help="Above 0, at most 1; needs --sample.")] = None
    top_k: Annotated[int | None, Option(help="At least 1; needs --sample.")] = None
    seed: Annotated[
        int | None, Option(help="Makes a sampled text repeatable in float32, and the number of passes.")
    ] = None
    stats: Annotated[bool, Option("--stats", help="Counts and times, on stderr.")] = False
    as_json: JsonOption = False


class _Echo(TextStreamer):
    lookahead_draws_nothing = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write ``text``; the last one ends the line."""
        typer.echo(text, nl=stream_end)


def generate(options: Options) -> None:
    """Continue a prompt; the text appears as it is written."""
    strategy, sampling = _strategy(options), _sampling(options)
    text = read_stdin() if options.prompt in (None, "-") else str(options.prompt)
    if not text:
        raise LookaheadError("The prompt is empty: give --prompt TEXT, or text on stdin.")
    model, tokenizer = options.load()
    inputs = common.encode(tokenizer, text, model)
    streamer = None if options.as_json else _Echo(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    settings = {"max_new_tokens": options.max_new_tokens} | sampling
    decoded = common.decode(model, inputs, strategy, streamer, **settings)
    if options.as_json:
        document = {
            "prompt": text,
            "text": common.text_of(tokenizer, decoded.tokens),
            "tokens": decoded.tokens,
            "seconds": decoded.seconds,
            "stats": None if decoded.stats is None else decoded.stats.to_dict(),
            "settings": options.described(model, strategy, settings | {"seed": options.seed}),
        }
        common.echo_json(document)
    elif options.stats:
        typer.echo(_summary(decoded), err=True)


def _strategy(options: Options) -> Strategy | None:
    if options.strategy == "lookahead":
        return options.lookahead(options.seed)
    wrong = ["--" + name.replace("_", "-") for name, size in options.sizes().items() if size is not None]
    if wrong:
        got = f"got --strategy {options.strategy}. Drop one of the two."
        raise LookaheadError(f"{wrong[0]} belongs to --strategy lookahead: {got}")
    return Jacobi(seed=options.seed) if options.strategy == "jacobi" else None


def _sampling(options: Options) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if not options.sample:
            raise LookaheadError(f"{option} needs --sample: without it the likeliest token is taken. Add --sample.")
        if value <= 0:
            raise LookaheadError(f"{option} must be above 0: got {value}.")
        if name == "top_p" and value > 1:
            raise LookaheadError(f"{option} must be at most 1: got {value}.")
    return {"do_sample": options.sample} | given


def _summary(decoded: common.Decoded) -> str:
    count, stats = len(decoded.tokens), decoded.stats
    rate = f"{decoded.seconds:.2f} s, {count / decoded.seconds:.1f} tokens/s"
    if stats is None:
        return f"{count} tokens in {count} passes (1.00 a pass), {rate}"
    return (
        f"{count} tokens in {stats.steps} passes ({stats.mean_acceptance_length:.2f} a pass), {rate}\n"
        f"drafted {stats.drafted} tokens, accepted {stats.accepted} ({stats.acceptance_rate:.1%})\n"
        f"milliseconds: prompt {stats.prefill_ms:.1f}, drafts {stats.draft_ms:.1f}, passes {stats.forward_ms:.1f}, "
        f"verification {stats.verify_ms:.1f}, keeping {stats.keep_ms:.1f}\n{stats.explain()}"
    )

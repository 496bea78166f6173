"""``lookahead generate``: continue one prompt, shown as it is written."""

import json
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import TextStreamer

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.prompts import read_stdin
from lookahead.strategies.base import Strategy
from lookahead.strategies.jacobi import Jacobi

StrategyName = Literal["lookahead", "jacobi", "plain"]


class _Echo(TextStreamer):
    """Writes text to stdout as soon as whole words are there."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write ``text``; the last one ends the line."""
        typer.echo(text, nl=stream_end)


def generate(
    model: common.ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. '-' or nothing: stdin, less its last line break.")
    ] = None,
    strategy: Annotated[StrategyName, typer.Option(help="How drafts are grown; plain is transformers' own.")] = (
        "lookahead"
    ),
    window_size: common.WindowOption = None,
    ngram_size: common.NgramOption = None,
    verification_set_size: common.GuessesOption = None,
    max_new_tokens: common.NewTokensOption = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Above 0; needs --sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Above 0, at most 1; needs --sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="At least 1; needs --sample.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes a sampled text, and the number of passes, repeatable.")
    ] = None,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Counts and times, on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the text.")] = False,
) -> None:
    """Continue a prompt; the text appears as it is written."""
    chosen = _strategy(strategy, window_size, ngram_size, verification_set_size, seed)
    sampling = _sampling(sample, {"temperature": temperature, "top_p": top_p, "top_k": top_k})
    text = read_stdin() if prompt is None or prompt == "-" else prompt
    if not text:
        raise LookaheadError("The prompt is empty: give --prompt TEXT, or text on stdin.")
    loaded, tokenizer = common.load(model, dtype, device)
    inputs = common.encode(tokenizer, text, loaded)
    streamer = None if as_json else _Echo(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if seed is not None:
        torch.manual_seed(seed)
    decoded = common.decode(loaded, inputs, chosen, streamer, max_new_tokens=max_new_tokens, **sampling)
    if as_json:
        settings = {
            "model": "bundled" if model is None else model,
            "strategy": {"strategy": "plain"} if chosen is None else chosen.to_dict(),
            "max_new_tokens": max_new_tokens,
            **sampling,
            "seed": seed,
            "dtype": dtype,
            "device": str(loaded.device),
        }
        document = {
            "prompt": text,
            "text": common.text_of(tokenizer, decoded.tokens),
            "tokens": decoded.tokens,
            "seconds": decoded.seconds,
            "stats": None if decoded.stats is None else decoded.stats.to_dict(),
            "settings": settings,
            "versions": common.versions(),
        }
        typer.echo(json.dumps(document, indent=2))
    elif stats:
        typer.echo(_summary(decoded), err=True)


def _strategy(
    name: StrategyName, window: int | None, ngram: int | None, guesses: int | None, seed: int | None
) -> Strategy | None:
    if name == "lookahead":
        return common.lookahead_from(window, ngram, guesses, seed)
    given = {"--window-size": window, "--ngram-size": ngram, "--verification-set-size": guesses}
    wrong = [option for option, value in given.items() if value is not None]
    if wrong:
        raise LookaheadError(f"{wrong[0]} belongs to --strategy lookahead: got --strategy {name}. Drop one of the two.")
    return Jacobi(seed=seed) if name == "jacobi" else None


def _sampling(sample: bool, given: dict[str, Any]) -> dict[str, Any]:
    """The sampling arguments of ``generate``; what is not given is left to the model's own defaults."""
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if not sample:
            raise LookaheadError(f"{option} needs --sample: without it the likeliest token is taken. Add --sample.")
        if value <= 0:
            raise LookaheadError(f"{option} must be above 0: got {value}.")
        if name == "top_p" and value > 1:
            raise LookaheadError(f"{option} must be at most 1: got {value}.")
    return {"do_sample": sample} | given


def _summary(decoded: common.Decoded) -> str:
    count, stats = len(decoded.tokens), decoded.stats
    rate = f"{decoded.seconds:.2f} s, {count / decoded.seconds:.1f} tokens/s"
    if stats is None:
        return f"{count} tokens in {count} passes (1.00 a pass), {rate}"
    times = {
        "prompt": stats.prefill_ms,
        "drafts": stats.draft_ms,
        "passes": stats.forward_ms,
        "verification": stats.verify_ms,
        "keeping": stats.keep_ms,
    }
    return "\n".join(
        [
            f"{count} tokens in {stats.steps} passes ({stats.mean_acceptance_length:.2f} a pass), {rate}",
            f"drafted {stats.drafted} tokens, accepted {stats.accepted} ({stats.acceptance_rate:.1%})",
            "milliseconds: " + ", ".join(f"{name} {ms:.1f}" for name, ms in times.items()),
            stats.explain(),
        ]
    )

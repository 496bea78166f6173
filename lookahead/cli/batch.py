"""``lookahead batch``: many requests from a file, in OpenAI's batch format, answered into another one."""

from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import BinaryIO

import typer
from typer import Exit

from lookahead.cli import common
from lookahead.cli.arguments import Batch
from lookahead.cli.batch_files import Aside, Bad, answers, read_requests, write
from lookahead.ray.cluster import connected
from lookahead.ray.replicas import answered
from lookahead.serve.batches import Answerer, Line, Outcome
from lookahead.stats import counted

_INTERRUPTED = 130  # exit status, as of a program that SIGINT ended


def batch(options: Batch) -> None:
    lines, bad = read_requests(options.source)
    aside = Aside(options.aside)
    with answers(options.target) as (out, done):
        aside.clear()
        aside.add(*bad)
        asked = [line for line in lines if line.custom_id not in done]
        try:
            written = len(lines) - len(asked) + _answer(asked, out, aside, options)
        except KeyboardInterrupt:
            typer.echo("Interrupted: the same command goes on from here.", err=True)
            raise Exit(_INTERRUPTED) from None
    told = f"; {aside.path}: {counted(aside.count, 'bad line')}." if aside.count else "."
    typer.echo(f"{options.target}: {counted(written, 'answer')}{told}", err=True)
    if aside.count:
        raise Exit(1)


def _answer(lines: list[Line], out: BinaryIO, aside: Aside, options: Batch) -> int:
    """Write each answer, or refusal, as soon as it is there; how many answers there were."""
    names, written = {line.number: line.custom_id for line in lines}, 0
    with closing(_outcomes(lines, options)) as outcomes, common.progress() as progress:
        for outcome in progress.track(outcomes, total=len(lines), description="Answering"):
            if outcome.record is None:
                aside.add(Bad(outcome.number, names[outcome.number], outcome.error))
            else:
                write(out, outcome.record)
                written += 1
    return written


def _outcomes(lines: list[Line], options: Batch) -> Generator[Outcome, None, None]:
    """Outcomes of the requests, as they end."""
    if lines and options.replicas:
        with connected() as ray:
            yield from answered(ray, partial(_answerer, options), lines, options.replicas, options.rows)
    elif lines:
        answerer = _answerer(options)
        try:
            yield from answerer.answer(lines)
        except BaseException:
            answerer.cut()
            raise
        finally:
            answerer.close()


def _answerer(options: Batch) -> Answerer:
    model, tokenizer = common.load_for(options)
    settings = {"rows": options.rows, "conversations": options.conversations, "new_tokens": options.max_new_tokens}
    return Answerer(model, tokenizer, common.name_of(options), **settings)

"""``lookahead batch``: many requests from a file, in OpenAI's batch format, answered into another one."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from typer import Argument, Exit, Option

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.batch_files import Aside, Bad, answers, read_requests, write
from lookahead.cli.options import ServedOptions
from lookahead.ray.batches import answered
from lookahead.ray.cluster import connected
from lookahead.serve.batches import Answerer, Line, Outcome

_INTERRUPTED = 130  # exit status, as of a program that SIGINT ended


@dataclass(frozen=True, kw_only=True)
class Options(ServedOptions):
    source: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one JSON object a line.")]
    target: Annotated[Path, Argument(metavar="OUT.jsonl", help="Answers; what is there already is not asked again.")]
    max_new_tokens: Annotated[int, Option(min=1, help="Of a chat answer, where a request does not say.")] = 1024
    conversations: Annotated[int, Option(min=0, help="KV caches kept for common prefixes of requests.")] = 4
    rows: Annotated[int, Option(min=1, help="Answers that are written at a time, which share passes.")] = 8
    replicas: Annotated[int, Option(min=0, help="Processes with the model, on Ray; 0 = this process alone.")] = 0


def batch(options: Options) -> None:
    """Answer a file of requests in OpenAI's batch format; a run that was killed goes on where it ended."""
    lines, bad = read_requests(options.source)
    aside = Aside(options.target.with_name(f"{options.target.stem}.errors.jsonl"))
    if not options.target.parent.is_dir():
        raise LookaheadError(f"{options.target} cannot be written: there is no folder {options.target.parent}.")
    for what, file in (("answers", options.target), ("bad lines", aside.path)):
        if file.exists() and file.samefile(options.source):
            raise LookaheadError(f"{file} holds the requests, and {what} would go there. Give OUT another name.")
    with answers(options.target) as (out, done):
        aside.clear()
        aside.add(*bad)
        asked = [line for line in lines if line.custom_id not in done]
        try:
            written = len(lines) - len(asked) + _answer(asked, out, aside, options)
        except KeyboardInterrupt:
            typer.echo("Interrupted: the same command goes on from here.", err=True)
            raise Exit(_INTERRUPTED) from None
    told = f"; {aside.path}: {aside.count} bad lines." if aside.count else "."
    typer.echo(f"{options.target}: {written} answers{told}", err=True)
    if aside.count:
        raise Exit(1)


def _answer(lines: list[Line], out: BinaryIO, aside: Aside, options: Options) -> int:
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


def _outcomes(lines: list[Line], options: Options) -> Generator[Outcome, None, None]:
    """What becomes of the requests, as they end."""
    if lines and options.replicas:
        common.check_folder(options.model)
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


def _answerer(options: Options) -> Answerer:
    model, tokenizer = options.load()
    settings = {"rows": options.rows, "conversations": options.conversations}
    return Answerer(model, tokenizer, options.name, new_tokens=options.max_new_tokens, **settings)

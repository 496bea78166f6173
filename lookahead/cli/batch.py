"""``lookahead batch``: many requests from a file, in OpenAI's batch format, answered into another one."""

import fcntl
import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from typer import Argument, Exit, Option

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.options import ModelOptions
from lookahead.ray.batches import answered
from lookahead.ray.cluster import connected
from lookahead.serve.batches import Answerer, Line, Outcome

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_INTERRUPTED = 130  # exit status, as of a program that SIGINT ended


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    source: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one JSON object a line.")]
    target: Annotated[Path, Argument(metavar="OUT.jsonl", help="Answers; what is there already is not asked again.")]
    max_new_tokens: Annotated[int, Option(min=1, help="Of a chat answer, where a request does not say.")] = 1024
    conversations: Annotated[int, Option(min=0, help="KV caches kept for common prefixes of requests.")] = 4
    rows: Annotated[int, Option(min=1, help="Answers that are written at a time, which share passes.")] = 8
    replicas: Annotated[int, Option(min=0, help="Processes with the model, on Ray; 0 = this process alone.")] = 0


def batch(options: Options) -> None:
    """Answer a file of requests in OpenAI's batch format; a run that was killed goes on where it ended."""
    lines, bad = _read(options.source)
    side = options.target.with_name(f"{options.target.stem}.errors.jsonl")
    if not options.target.parent.is_dir():
        raise LookaheadError(f"{options.target} cannot be written: there is no folder {options.target.parent}.")
    with _locked(options.target) as out:
        done = _done(out, options.target)
        try:
            bad += _answer([line for line in lines if line.custom_id not in done], out, options)
        except KeyboardInterrupt:
            typer.echo("Interrupted: the same command goes on from here.", err=True)
            raise Exit(_INTERRUPTED) from None
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in sorted(bad, key=lambda each: each["line"]))
    if bad or side.exists():
        side.write_text(text, encoding="utf-8")
    answered = len(lines) - len({each["custom_id"] for each in bad if each["custom_id"]})
    typer.echo(f"{options.target}: {answered} answers" + (f"; {side}: {len(bad)} bad lines." if bad else "."), err=True)
    if bad:
        raise Exit(1)


def _answer(lines: list[Line], out: BinaryIO, options: Options) -> list[dict[str, Any]]:
    """Write each answer as soon as it is there; gives the requests that are refused."""
    names, bad = {line.number: line.custom_id for line in lines}, []
    with closing(_outcomes(lines, options)) as outcomes, common.progress() as progress:
        for outcome in progress.track(outcomes, total=len(lines), description="Answering"):
            if outcome.record is None:
                bad.append({"line": outcome.number, "custom_id": names[outcome.number], "error": outcome.error})
            else:
                _write(out, outcome.record)
    return bad


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
    return Answerer(model, tokenizer, options.model_name, new_tokens=options.max_new_tokens, **settings)


def _read(file: Path) -> tuple[list[Line], list[dict[str, Any]]]:
    """The requests of a file, and what is wrong with the lines that are none."""
    try:
        texts = file.read_bytes().split(b"\n")
    except OSError as error:
        raise LookaheadError(f"{file} cannot be read: {error.strerror}.") from error
    lines, bad, seen = list[Line](), list[dict[str, Any]](), set[str]()
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = _line(number, text)
            if line.custom_id in seen:
                raise ValueError(f"the custom_id {line.custom_id!r} stands in an earlier line, too")
        except ValueError as error:
            bad.append({"line": number, "custom_id": None, "error": str(error)})
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not bad:
        raise LookaheadError(f"{file} holds no request: expected at least one line.")
    return lines, bad


def _line(number: int, text: bytes) -> Line:
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(item, dict):
        raise ValueError(f"expected a JSON object: got {type(item).__name__}")
    if "body" not in item and "prompt" in item:  # the short form: a completion
        return Line(number, str(item.get("custom_id", f"line-{number}")), False, item)
    name, url, body = item.get("custom_id"), item.get("url", _CHAT), item.get("body")
    if not isinstance(name, str) or not name:
        raise ValueError("custom_id must be a text")
    if url not in (_CHAT, _TEXT) or item.get("method", "POST") != "POST":
        raise ValueError(f"expected POST to {_CHAT} or {_TEXT}: got {item.get('method', 'POST')} {url}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    return Line(number, name, url == _CHAT, body)


@contextmanager
def _locked(file: Path) -> Iterator[BinaryIO]:
    """The file of answers, for this process alone."""
    try:
        out = file.open("a+b")
    except OSError as error:
        raise LookaheadError(f"{file} cannot be written: {error.strerror}.") from error
    with out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LookaheadError(f"{file} is written by another process. Wait for it, or name another file.") from error
        yield out


def _done(out: BinaryIO, file: Path) -> set[str]:
    """Which requests are answered already. A last line that a killed run has left torn is cut off."""
    out.seek(0)
    content = out.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        out.truncate(whole)
    found = set()
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            found.add(str(json.loads(line)["custom_id"]))
        except (ValueError, KeyError, TypeError) as error:
            told = f"{file}, line {number}, is no answer of a batch. Name another file, or move this one away."
            raise LookaheadError(told) from error
    out.seek(0, os.SEEK_END)
    return found


def _write(out: BinaryIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    out.flush()
    os.fsync(out.fileno())

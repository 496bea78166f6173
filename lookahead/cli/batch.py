"""``lookahead batch``: many requests from a file, in OpenAI's batch format, answered into another one; and the files:
requests, answers, and the lines that stand aside."""

import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import typer
from typer import Exit

from jacobi import LookaheadError
from lookahead._files import lock
from lookahead.cli import common
from lookahead.cli.arguments import Batch
from lookahead.ray.cluster import connected
from lookahead.ray.replicas import answered
from lookahead.serve.batches import BEGIN, Answerer, Line, Outcome
from lookahead.stats import counted

_INTERRUPTED = 130  # exit status, as of a program that SIGINT ended
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


def batch(options: Batch) -> None:
    lines, bad = read_requests(options.source)
    with answers(options.target) as (out, done):
        _clear(options.aside)
        _set_aside(options.aside, *bad)
        try:
            refused = _answer([line for line in lines if line.custom_id not in done], out, options)
        except KeyboardInterrupt:
            typer.echo("Interrupted: the same command goes on from here.", err=True)
            raise Exit(_INTERRUPTED) from None
    wrong = len(bad) + refused
    told = f"; {options.aside}: {counted(wrong, 'bad line')}." if wrong else "."
    typer.echo(f"{options.target}: {counted(len(lines) - refused, 'answer')}{told}", err=True)
    if wrong:
        raise Exit(1)


def _clear(aside: Path) -> None:
    """Remove the lines that an earlier run has set aside, as this one finds them again; other files are refused."""
    if aside.exists():
        list(_records(_read(aside), aside, ("line", "custom_id", "error")))
        aside.unlink()


def _set_aside(aside: Path, *lines: Outcome) -> None:
    """Append lines that are no request, or that are refused: number, custom_id if there is one, and the reason."""
    if lines:
        with aside.open("ab") as file:
            write(file, *({"line": bad.number, "custom_id": bad.custom_id, "error": bad.error} for bad in lines))


def _answer(lines: list[Line], out: BinaryIO, options: Batch) -> int:
    """Write each answer, or refusal, as soon as it is there; how many refusals there were."""
    refused = 0
    with closing(_outcomes(lines, options)) as outcomes, common.progress() as progress:
        for outcome in progress.track(outcomes, total=len(lines), description="Answering"):
            if outcome.record is None:
                _set_aside(options.aside, outcome)
                refused += 1
            else:
                write(out, outcome.record)
    return refused


def _outcomes(lines: list[Line], options: Batch) -> Generator[Outcome, None, None]:
    """Outcomes of the requests, as they end."""
    if lines and options.replicas:
        with connected() as ray:
            yield from answered(ray, partial(_answerer, options), lines, options.replicas, options.rows)
    elif lines:
        with closing(_answerer(options)) as answerer:
            yield from answerer.answer(lines)


def _answerer(options: Batch) -> Answerer:
    model, tokenizer = common.load_for(options)
    settings = {"rows": options.rows, "prefix_mib": options.prefix_mib, "new_tokens": options.max_new_tokens}
    return Answerer(model, tokenizer, common.name_of(options), **settings)


def read_requests(file: Path) -> tuple[list[Line], list[Outcome]]:
    """The requests of a file, and the lines that are none."""
    lines, bad, seen = list[Line](), list[Outcome](), set[str]()
    for number, text in enumerate(_read(file).split(b"\n"), start=1):
        if not text.strip():
            continue
        item: Any = None
        try:
            item = _item(text)
            line = _line(number, item)
            if line.custom_id in seen:
                raise ValueError(f"the custom_id {line.custom_id!r} stands in an earlier line, too")
        except ValueError as error:
            name = item.get("custom_id") if item else None
            bad.append(Outcome(number, name if isinstance(name, str) else None, error=str(error)))
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not bad:
        raise LookaheadError(f"{file} holds no request: expected at least one line.")
    return lines, bad


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise LookaheadError(f"{file} cannot be read: {error.strerror}.") from error


def _item(text: bytes) -> dict[str, Any]:
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(item, dict):
        raise ValueError(f"expected a JSON object: got {type(item).__name__}")
    return item


def _line(number: int, item: dict[str, Any]) -> Line:
    name, short = item.get("custom_id"), "body" not in item and "prompt" in item
    if short and name is None:
        name = f"line-{number}"
    if not isinstance(name, str) or not name:
        raise ValueError(f"custom_id must be a text: got {json.dumps(name)[:80]}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError("custom_id holds half of a surrogate pair: expected whole characters") from error
    if short:  # a completion
        return Line(number, name, False, item)
    url, body = item.get("url", _CHAT), item.get("body")
    if url not in (_CHAT, _TEXT) or item.get("method", "POST") != "POST":
        raise ValueError(f"expected POST to {_CHAT} or {_TEXT}: got {item.get('method', 'POST')} {url}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    return Line(number, name, url == _CHAT, body)


@contextmanager
def answers(file: Path) -> Iterator[tuple[BinaryIO, set[str]]]:
    """The file of answers, for this process alone, and which requests it answers already. Nothing is changed in a file
    that holds anything else; a last line that a killed run has left torn is cut off."""
    try:
        out = file.open("a+b")
    except OSError as error:
        raise LookaheadError(f"{file} cannot be written: {error.strerror}.") from error
    with out:
        try:
            lock(out)
        except OSError as error:
            raise LookaheadError(f"{file} is written by another process. Wait for it, or name another file.") from error
        out.seek(0)
        content = out.read()
        whole = content.rfind(b"\n") + 1
        done = {record["custom_id"] for record in _records(content, file, ("custom_id", "response"))}
        if torn := content[whole:]:
            begin = BEGIN.encode()
            if torn[: len(begin)] != begin[: len(torn)]:
                raise _foreign(file, content[:whole].count(b"\n") + 1)
            out.truncate(whole)
        out.seek(0, os.SEEK_END)
        yield out, done


def _records(content: bytes, file: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The JSON objects of whole lines, without a torn one at the end; each must have ``keys``."""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _foreign(file, number) from error
        if not isinstance(record, dict) or not record.keys() >= set(keys):
            raise _foreign(file, number)
        yield record


def _foreign(file: Path, number: int) -> LookaheadError:
    told = f"{file}, line {number}, was not written by lookahead batch"
    return LookaheadError(f"{told}: expected a file of its own, or a new one. Name another, or move this one away.")


def write(out: BinaryIO, *records: dict[str, Any]) -> None:
    """Append records, a line each, and wait until they are on the disk."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    out.write(text.encode(errors="backslashreplace"))  # of half a surrogate pair that is JSON's own escape
    out.flush()
    os.fsync(out.fileno())

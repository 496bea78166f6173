"""Where prompts come from: the built-in ones, a file, or stdin. Nothing here needs torch."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi import LookaheadError
from lookahead.chat_format import CHAT_PROMPTS as CHAT_PROMPTS
from lookahead.chat_format import PROMPTS as PROMPTS

_HELP = 'Prompts, one a line. A line with {" first, and every line of a .jsonl file, is a JSON object with a "prompt".'
_OBJECT = re.compile(r'\s*{\s*"')
PromptsOption = Annotated[Path | None, typer.Option(metavar="FILE", help=_HELP)]


def read_text(file: Path, option: str) -> str:
    """The text of a file that an option names."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise LookaheadError(f"{option} {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise LookaheadError(f"{option} {file} is not text ({error}): expected UTF-8.") from error


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file, one a line, as the option's help says; empty lines are skipped."""
    objects, texts = file.suffix == ".jsonl", list[str]()
    for where, line in _lines(file, "--prompts", "prompt"):
        text = _object(line, where, 'a "prompt"').get("prompt") if objects or _OBJECT.match(line) else line
        if not isinstance(text, str) or not text:
            raise LookaheadError(f'{where}: expected an object with a "prompt" that is text; got {line[:60]}')
        texts.append(text)
    return texts


def _lines(file: Path, option: str, what: str) -> list[tuple[str, str]]:
    """The lines of an option's file that are not empty, and how errors name them."""
    lines = [(f"{option} {file}, line {at}", line) for at, line in enumerate(read_text(file, option).splitlines(), 1)]
    if not any(line.strip() for _, line in lines):
        raise LookaheadError(f"{option} {file} holds no {what}: expected at least one line.")
    return [(where, line) for where, line in lines if line.strip()]


def _object(line: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise LookaheadError(f"{where}, is not JSON ({error.msg}): expected an object with {wanted}.") from error
    return item if isinstance(item, dict) else {}


def read_stdin() -> str:
    """All of stdin, without the line break that ends it."""
    if sys.stdin is None:
        raise LookaheadError("There is no prompt: stdin is closed. Give --prompt TEXT, or text on stdin.")
    if sys.stdin.isatty():
        typer.echo("Type the prompt, and end it with Ctrl-D.", err=True)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LookaheadError(f"The prompt on stdin is not text ({error}): expected UTF-8.") from error


def read_questions(file: Path) -> list[tuple[str, str]]:
    """Category and first turn of each question in a file of Spec-Bench's format (Xia et al., arXiv 2401.07851)."""
    questions = list[tuple[str, str]]()
    for where, line in _lines(file, "--questions", "question"):
        item = _object(line, where, '"turns"')
        turns = item.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise LookaheadError(f'{where}: expected an object with "turns", a list of texts; got {line[:60]}')
        questions.append((str(item.get("category", "questions")), turns[0]))
    return questions

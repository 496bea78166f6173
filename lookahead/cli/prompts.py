"""Where prompts come from: the built-in ones, a file, or stdin. Nothing here needs torch."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

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
    lines = read_text(file, "--prompts").splitlines()
    objects = file.suffix == ".jsonl"
    texts = [
        _prompt(line, f"--prompts {file}, line {number}") if objects or _OBJECT.match(line) else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not texts:
        raise LookaheadError(f"--prompts {file} holds no prompt: expected at least one line.")
    return texts


def _prompt(line: str, where: str) -> str:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise LookaheadError(f'{where}, is not JSON ({error.msg}): expected an object with a "prompt".') from error
    text = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text:
        raise LookaheadError(f'{where}: expected an object with a "prompt" that is text; got {line[:60]}')
    return text


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
    lines, questions = read_text(file, "--questions").splitlines(), []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise LookaheadError(f"--questions {file}, line {number}, is not JSON ({error.msg}).") from error
        turns = item.get("turns") if isinstance(item, dict) else None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            expected = 'expected an object with "turns", a list of texts'
            raise LookaheadError(f"--questions {file}, line {number}: {expected}; got {line[:60]}")
        questions.append((str(item.get("category", "questions")), turns[0]))
    if not questions:
        raise LookaheadError(f"--questions {file} holds no question: expected at least one line.")
    return questions

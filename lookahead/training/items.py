"""Training data in files: texts, prompts with completions, and conversations."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from jacobi import LookaheadError

_log = logging.getLogger("lookahead")
_TEXTS = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".go", ".rs")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_ROLES |= {"system": "system"}
_FORMS = '"text", "prompt" with "completion" or "response", "messages", or "conversations"'

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """One text, one prompt with its completion, or one conversation."""

    source: str  # where it was read, for messages
    text: str = ""  # the plain text, or the completion; empty where a prompt has none yet
    prompt: str | None = None
    messages: tuple[Message, ...] = ()  # the conversation as chat templates take it, {"role", "content"} each

    @property
    def number(self) -> int:
        """The first 4 bytes of the content's SHA-256, as a number."""
        plain = self.prompt is None and not self.messages
        content = self.text if plain else json.dumps([self.prompt, self.text, self.messages])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")


def read_items(path: str | Path) -> list[Item]:
    """Read the items of a file, or of all ``.jsonl`` and text files in a folder; a LookaheadError says what is wrong. A
    ``.jsonl`` file holds one item a line, a ``.json`` file a list of items, any other file one plain text."""
    path = Path(path).expanduser()
    if path.is_dir():
        items = list(_folder(path))
    elif not path.exists():
        raise LookaheadError(f"The data {path} does not exist: expected a file or a folder.")
    else:
        items = _file(path)
    if not items:
        kinds = " ".join([".jsonl", *_TEXTS])
        raise LookaheadError(f"The data {path} is empty: expected at least one item; in a folder, files {kinds}.")
    return items


def split(items: Sequence[Item], one_in: int = 20) -> tuple[list[Item], list[Item]]:
    """Divide items into those to train on and those held out; a LookaheadError if nothing is left to train on. Held out
    is every item whose number, a hash of its content, is divisible by ``one_in``, so the same item is always on the
    same side; if there is none, the item with the lowest number; of a single plain text, its end."""
    if one_in < 2:
        raise LookaheadError(f"One in {one_in} items cannot be held out: expected 2 or more.")
    numbers = [item.number for item in items]
    chosen = {number for number in numbers if number % one_in == 0} or {min(numbers)}
    train = [item for item, number in zip(items, numbers, strict=True) if number not in chosen]
    held_out = [item for item, number in zip(items, numbers, strict=True) if number in chosen]
    if train:
        return train, held_out
    if len(held_out) == 1 and held_out[0].text and held_out[0].prompt is None:
        item = held_out[0]
        cut = len(item.text) - len(item.text) // one_in
        return [Item(item.source, item.text[:cut])], [Item(item.source, item.text[cut:])]
    raise LookaheadError(
        f"All of the data ({len(held_out)} items) would be held out: expected at least two different items. Give more, "
        "or other data for the evaluation."
    )


def _folder(folder: Path) -> Iterator[Item]:
    """The items of all data files below a folder, by path; texts that are not UTF-8 are left out."""
    skipped = 0
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix not in (".jsonl", *_TEXTS) or hidden or not path.is_file():
            continue
        try:
            yield from _file(path)
        except LookaheadError:
            if path.suffix == ".jsonl":
                raise
            skipped += 1
    if skipped:
        _log.warning("%d files under %s are no UTF-8 text and were left out", skipped, folder)


def _file(path: Path) -> list[Item]:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise LookaheadError(f"The data {path} cannot be read: {error}.") from error
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)
        return [_item(_parsed(line, f"{path}, line {at}"), f"{path}, line {at}") for at, line in lines if line.strip()]
    if path.suffix == ".json":
        document = _parsed(text, str(path))
        if not isinstance(document, list):
            raise LookaheadError(f"{path} holds no list: expected a list of items, each with {_FORMS}.")
        return [_item(item, f"{path}, item {at}") for at, item in enumerate(document, start=1)]
    return [Item(str(path), text)] if text.strip() else []


def _parsed(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LookaheadError(f"{source} is not JSON ({error}): expected an object with {_FORMS}.") from error


def _item(value: Any, source: str) -> Item:
    keys = sorted(value) if isinstance(value, dict) else []
    forms = [name for name in ("text", "prompt", "messages", "conversations") if name in keys]
    if len(forms) != 1:
        got = f"the keys {', '.join(map(repr, keys))}" if isinstance(value, dict) else type(value).__name__
        raise LookaheadError(f"{source}: expected an object with one of {_FORMS}; got {got}.")
    if forms == ["text"]:
        return Item(source, _string(value, "text", source))
    if forms == ["prompt"]:
        answer = next((name for name in ("completion", "response") if name in keys), None)
        completion = _string(value, answer, source) if answer else ""
        return Item(source, completion, prompt=_string(value, "prompt", source))
    turns = value[forms[0]]
    if not isinstance(turns, list) or not turns:
        raise LookaheadError(f"{source}: {forms[0]!r} must be a list of messages, got {str(turns)[:60]!r}.")
    messages = [_message(turn, source) for turn in turns]
    begun = tuple(dropwhile(lambda message: message["role"] == "assistant", messages))  # templates refuse to begin so
    if not begun:
        raise LookaheadError(f"{source}: every message is the assistant's; expected a user's before it.")
    return Item(source, messages=begun)


def _string(value: Mapping[str, Any], key: str, source: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise LookaheadError(f"{source}: {key!r} must be a text, got {str(text)[:60]!r}.")
    return text


def _message(turn: Any, source: str) -> Message:
    """A message in either dialect: role and content, or from and value."""
    given = turn if isinstance(turn, dict) else {}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role not in _ROLES or not isinstance(content, str):
        raise LookaheadError(
            f'{source}: expected messages like {{"role": "user", "content": "..."}} or {{"from": "human", "value": '
            f'"..."}}, roles {", ".join(_ROLES)}; got {str(turn)[:80]}.'
        )
    return {"role": _ROLES[role], "content": content}

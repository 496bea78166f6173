"""Training data for Medusa's heads: files to items, items to tokens with the places that carry loss.

An item is a text, a prompt with its completion, or a conversation. All tokens of a text carry loss, of a prompt with
its completion the completion's, of a conversation the assistant's. Texts are packed into blocks; the others stay apart.
Which items are held out is decided by a hash of their content, so the same item always lands on the same side.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from jacobi import LookaheadError

IGNORE = -100  # the label of a token without loss, as everywhere in transformers

_LOG = logging.getLogger("lookahead")
_TEXTS = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".go", ".rs")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_ROLES |= {"system": "system"}
_FORMS = '"text", "prompt" with "completion" or "response", "messages", or "conversations"'
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_AT_ONCE = 256  # texts given to the tokenizer in one call

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """One text, one prompt with its completion, or one conversation.

    Attributes:
        source: where it was read, for messages.
        text: all of a plain text, or the completion; empty for a conversation, and for a prompt that has none yet.
        prompt: what the completion follows; None for plain text and conversations.
        messages: the conversation, as chat templates take it: ``{"role", "content"}`` each.
    """

    source: str
    text: str = ""
    prompt: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def number(self) -> int:
        """A number from the content alone: the first 4 bytes of its SHA-256; of a plain text, of the text's bytes."""
        plain = self.prompt is None and not self.messages
        content = self.text if plain else json.dumps([self.prompt, self.text, self.messages])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big")


@dataclass(frozen=True, eq=False)
class Example:
    """Tokens to learn from.

    Attributes:
        ids: int32 ``[token]``.
        loss: which tokens are to be predicted, bool ``[token]``.
    """

    ids: Tensor
    loss: Tensor

    @classmethod
    def of(cls, ids: Sequence[int], loss: Sequence[bool] | None = None) -> "Example":
        """From lists; without ``loss``, all tokens carry it."""
        tokens = torch.tensor(ids, dtype=torch.int32)
        flags = torch.ones(len(ids), dtype=torch.bool) if loss is None else torch.tensor(loss, dtype=torch.bool)
        return cls(tokens, flags)


def read_items(path: str | Path) -> list[Item]:
    """Read a file, or all files of a folder whose names end as texts' and data's do.

    A ``.jsonl`` file has one item a line, a ``.json`` file a list of items (folders are not searched for these); any
    other file is one plain text.

    Raises:
        LookaheadError: it cannot be read, holds nothing, or an item has no known form.
    """
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
    """Divide items into those to train on and those held out.

    An item is held out if its number is divisible by ``one_in``; if none is, the one with the lowest number, and of a
    single plain text its end.

    Raises:
        LookaheadError: nothing would be left to train on.
    """
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


def encode(
    items: Sequence[Item],
    tokenizer: Any,
    *,
    block_size: int,
    least: int,
    report: Callable[[float], None] | None = None,
) -> list[Example]:
    """Turn items into tokens.

    Args:
        items: what to encode. Plain texts are packed into blocks, each text with the end token behind it.
        tokenizer: the model's.
        block_size: most tokens of an example; what is longer is cut, texts into further blocks.
        least: examples with fewer tokens are left out, and conversations cut to nothing to predict.
        report: told the share that is done, from 0 to 1.

    Raises:
        LookaheadError: a completion is missing, the chat template cannot tell the assistant's tokens, or nothing long
            enough is there.
    """
    stream: list[int] = []
    examples: list[Example] = []
    texts = [item for item in items if item.prompt is None and not item.messages]
    others = [item for item in items if item.prompt is not None or item.messages]
    done = 0
    for start in range(0, len(texts), _AT_ONCE):
        batch = texts[start : start + _AT_ONCE]
        for ids in _tokens(tokenizer, [item.text for item in batch]):
            stream += ids
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                stream.append(tokenizer.eos_token_id)
        whole = len(stream) // block_size * block_size
        examples += [Example.of(stream[at : at + block_size]) for at in range(0, whole, block_size)]
        del stream[:whole]
        done += len(batch)
        if report is not None:
            report(done / len(items))
    examples.append(Example.of(stream))
    for item in others:
        ids, loss = _chat(tokenizer, item) if item.messages else _completion(tokenizer, item)
        examples.append(Example.of(ids[:block_size], loss[:block_size]))
        done += 1
        if report is not None:
            report(done / len(items))
    kept = [example for example in examples if len(example.ids) >= least and bool(example.loss[1:].any())]
    if not kept:
        raise LookaheadError(
            f"The data is too short ({items[0].source}{', ...' if len(items) > 1 else ''}): expected at least one item "
            f"of {least} tokens, some of them to be predicted; the longest has {max(len(e.ids) for e in examples)}."
        )
    return kept


def prompts(items: Sequence[Item], tokenizer: Any, *, block_size: int) -> list[list[int]]:
    """What the model is to answer itself, in tokens.

    Of a conversation it is what comes before the first answer; of a prompt with a completion the prompt; of plain text
    the first quarter of every block.

    Raises:
        LookaheadError: the tokenizer has no chat template, or it refuses a conversation.
    """
    found: list[list[int]] = []
    for item in items:
        if item.messages:
            first = next((i for i, m in enumerate(item.messages) if m["role"] == "assistant"), len(item.messages))
            found.append(_render(tokenizer, item, first, prompt=True))
        elif item.prompt is not None:
            found += _tokens(tokenizer, [item.prompt])
        else:
            (ids,) = _tokens(tokenizer, [item.text])
            found += [ids[start : start + block_size // 4] for start in range(0, len(ids), block_size)]
    return [ids[-(block_size // 2) :] for ids in found if ids]


def collate(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """One batch: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[batch, token]``, padded on the right.

    A label is its own token, or :data:`IGNORE` where there is no loss; the losses shift them.
    """
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = example.ids
        mask[row, :length] = 1
        labels[row, :length] = torch.where(example.loss, example.ids, IGNORE)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _folder(folder: Path) -> Iterator[Item]:
    """The items of all files whose names say what they hold, by path; what is not UTF-8 is left out."""
    skipped = 0
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in inner)
        if path.suffix not in (".jsonl", *_TEXTS) or hidden or not path.is_file():
            continue
        if path.suffix == ".jsonl":
            yield from _file(path)
            continue
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        if text.strip():
            yield Item(str(path), text)
    if skipped:
        _LOG.warning("%d files under %s are no UTF-8 text and were left out", skipped, folder)


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
    """One object of a data file."""
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
    while messages and messages[0]["role"] == "assistant":  # templates refuse to begin with an answer
        del messages[0]
    if not messages:
        raise LookaheadError(f"{source}: every message is the assistant's; expected a user's before it.")
    return Item(source, messages=tuple(messages))


def _string(value: Mapping[str, Any], key: str, source: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise LookaheadError(f"{source}: {key!r} must be a text, got {str(text)[:60]!r}.")
    return text


def _message(turn: Any, source: str) -> Message:
    """A message in either of its two dialects."""
    known = isinstance(turn, dict)
    role, content = (turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) if known else (0, 0)
    if role not in _ROLES or not isinstance(content, str):
        raise LookaheadError(
            f'{source}: expected messages like {{"role": "user", "content": "..."}} or {{"from": "human", "value": '
            f'"..."}}, roles {", ".join(_ROLES)}; got {str(turn)[:80]}.'
        )
    return {"role": _ROLES[role], "content": content}


def _tokens(tokenizer: Any, texts: list[str], **settings: Any) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, verbose=False, **settings)["input_ids"]
    return ids


def _completion(tokenizer: Any, item: Item) -> tuple[list[int], list[bool]]:
    """Prompt and completion with the end token behind them, encoded apart so that the border between them is sharp."""
    if not item.text:
        raise LookaheadError(
            f'{item.source}: the prompt has no "completion" or "response". Add it, or let the model answer itself '
            "(self-distillation)."
        )
    (prompt,) = _tokens(tokenizer, [item.prompt or ""])
    (answer,) = _tokens(tokenizer, [item.text], add_special_tokens=False)
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _chat(tokenizer: Any, item: Item) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and which are the assistant's.

    Templates with generation tags tell. For others the conversation is rendered up to each answer, with the header of
    an answer to come, and up to its end: what lies between is the answer.
    """
    messages = list(item.messages)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if _GENERATION.search(_template(tokenizer, item)):
        try:
            rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        except (TemplateError, ValueError) as error:
            raise _refused(item, error) from error
        loss = [bool(flag) for flag in rendered["assistant_masks"]]
        if answers and not any(loss):
            raise LookaheadError(
                f"{item.source}: the chat template has generation tags, and marks no token as the assistant's. Put the "
                "tags around the assistant's content, or take them out."
            )
        return list(rendered["input_ids"]), loss
    ids = _render(tokenizer, item, len(messages))
    loss = [False] * len(ids)
    for index in answers:
        before, after = _render(tokenizer, item, index, prompt=True), _render(tokenizer, item, index + 1)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise LookaheadError(
                f"{item.source}: the chat template cannot tell which tokens are the assistant's: it has no generation "
                f"tags, and what it renders up to message {index + 1} is no beginning of the whole conversation. Put "
                "{% generation %} and {% endgeneration %} around the assistant's content in it."
            )
        loss[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, loss


def _template(tokenizer: Any, item: Item) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise LookaheadError(
            f"{item.source} is a conversation, and the tokenizer has no chat template: expected one beside the model "
            "(chat_template.jinja). Add it, or give plain texts or prompts with completions."
        ) from error
    return template


def _render(tokenizer: Any, item: Item, count: int, *, prompt: bool = False) -> list[int]:
    """The first ``count`` messages in tokens; with ``prompt``, and the header of the answer to come."""
    _template(tokenizer, item)
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            list(item.messages[:count]), add_generation_prompt=prompt, return_dict=False
        )
    except (TemplateError, ValueError) as error:
        raise _refused(item, error) from error
    return ids


def _refused(item: Item, error: Exception) -> LookaheadError:
    return LookaheadError(f"{item.source}: the chat template refuses the conversation: {error}.")

"""Tools in chats: what a model's template writes of them, and the calls in its answers, read as they come.

The template is asked: it writes a call, and the form that reads it back is the model's. A tokenizer that has a
``response_template`` says itself how answers are read. ``tools.json`` has the forms, what templates are asked, the most
lists and objects in each other, and the characters of a call's id: some templates take no others.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]

from jacobi import LookaheadError
from lookahead.chat_format import written
from lookahead.serve.errors import ApiError

_DATA = json.loads(Path(__file__).with_name("tools.json").read_text(encoding="utf-8"))
_NAME = _DATA["tool"]["function"]["name"]
FORMS: tuple[dict[str, str], ...] = tuple(_DATA["forms"])
# What stands for itself in forms. A space is any white space, of which so much is held back as may come before a call.
_SPACE = r"\s{0,8}+"
_ARGUMENTS = r'(?P<at>)(?P<arguments>(?P<object>\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+"|(?&object))*+\}))'


@dataclass
class ToolCall:
    """A call in an answer, whose content before it has ``place`` characters; ``before`` and ``behind`` are what was
    written around the arguments."""

    name: str
    place: int
    before: str
    arguments: str = ""
    behind: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(_DATA["id"])[: _DATA["id"]])

    @property
    def right(self) -> bool:
        """Whether the arguments are an object of JSON."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def told(self) -> dict[str, Any]:
        """The call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reader:
    """Splits an answer into content and calls as it comes.

    Attributes:
        content, calls: what is known by now.
    """

    def __init__(self, several: bool = True) -> None:
        self.content, self.calls = "", list[ToolCall]()
        self._several = several  # calls may be in an answer: else what is behind the first one is left out
        self._held = ""  # may begin a call, or end one

    def feed(self, text: str, last: bool = False) -> dict[str, Any]:
        """What a piece of text adds, as OpenAI's delta; ``last``: nothing follows it."""
        length, calls = len(self.content), len(self.calls)
        argued = [len(call.arguments) for call in self.calls[-1:]]
        self._held += text
        self._read(last)
        told = [{"index": index} | call.told() for index, call in enumerate(self.calls) if index >= calls]
        if argued and (more := self.calls[calls - 1].arguments[argued[0] :]):
            told.insert(0, {"index": calls - 1, "function": {"arguments": more}})
        delta = {"content": self.content[length:], "tool_calls": told}
        return {name: said for name, said in delta.items() if said}

    def message(self) -> dict[str, Any]:
        """The fields of a whole message. A call whose arguments are no JSON, or not complete, is text."""
        for call in [call for call in reversed(self.calls) if not call.right]:
            self.calls.remove(call)
            text = call.before + call.arguments + call.behind
            self.content = self.content[: call.place] + text + self.content[call.place :]
        told = {"tool_calls": [call.told() for call in self.calls]} if self.calls else {}
        return {"content": self.content or (None if told else "")} | told

    def _read(self, last: bool) -> None:
        """Take what is known from the text that is held."""
        raise NotImplementedError


class FormReader(Reader):
    """Reads calls in a form. A call begins once all before its arguments is there, and has these as they come::

    Wait.<tool_   call>{"name": "f", "arguments": {"x"   : 1}}</tool_call>
    content Wait.                 call f, arguments {"x"   : 1}
    """

    def __init__(self, form: dict[str, str], names: Sequence[str], several: bool = True) -> None:
        super().__init__(several)
        parts = {" ": _SPACE, "NAME": f"(?P<name>{'|'.join(map(regex.escape, names))})", "ARGUMENTS": _ARGUMENTS}
        call = "".join(parts.get(part, part) for part in regex.split("( |NAME|ARGUMENTS)", form["call"]))
        self._call, self._ends = regex.compile(call, regex.DOTALL), regex.compile(form["ends"].replace(" ", _SPACE))
        self._open = self._behind = False  # in the last call's arguments; behind these

    def _read(self, last: bool) -> None:
        while self._passed(last):
            if self.calls and not (self._several or self._open):
                self._held = ""
            match = self._call.search(self._held, partial=True)
            whole = match["at"] is not None  # all before the arguments
            if not self._open:
                text = self._take(len(self._held) if last and not whole else match.start())
                self.content += text.rstrip() if last and self.calls else text
            if not whole:
                return
            if not self._open:
                self._open = True
                self.calls.append(
                    ToolCall(match["name"], len(self.content), self._held[: match.end("at") - match.start()])
                )
            before = len(self.calls[-1].before)
            self.calls[-1].arguments = self._held[before : before + len(match["arguments"] or self._held)]
            if match.partial:
                return
            self._take(match.end() - match.start())
            self._open, self._behind = False, True

    def _passed(self, last: bool) -> bool:
        """Whether what ends a call is there, or cannot come any more."""
        if self._behind:
            ends = self._ends.match(self._held, partial=True)
            if ends is not None and ends.partial and not last:
                return False
            self.calls[-1].behind = self._take(0 if ends is None else ends.end())
            self._behind = False
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class OwnReader(Reader):
    """Reads as the tokenizer's ``response_template`` says, whose parser knows a call when it is over. Where that fails,
    what was not told is content, and so is the rest."""

    def __init__(self, parser: Any, names: Sequence[str], several: bool = True) -> None:
        super().__init__(several)
        self._parser, self._names, self._untold = parser, names, ""

    def _read(self, last: bool) -> None:
        given, self._held = self._held, ""
        for letter in (*given, *[""] * last):
            self._untold += letter
            try:
                for event in self._parser.feed(letter) if letter else self._parser.finalize()[1]:
                    self._see(event["type"], event["field"], event)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                self._parser = None
                self.content, self._untold = self.content + self._untold, ""

    def _see(self, kind: str, name: str, event: dict[str, Any]) -> None:
        if kind == "region_chunk" and name != "tool_calls":
            self._untold = self._untold.partition(event["text"])[2]
            self.content += event["text"]
        elif kind == "region_close" and name == "tool_calls":
            said = event["value"] if isinstance(event["value"], list) else [event["value"]]
            made = [
                (self._names[self._names.index(one["function"]["name"])], one["function"]["arguments"]) for one in said
            ]
            texts = [given if isinstance(given, str) else json.dumps(given, ensure_ascii=False) for _, given in made]
            for (name, _), text in zip(made, texts, strict=True):
                if self._several or not self.calls:
                    self.calls.append(ToolCall(name, len(self.content), "", text))
            self._untold = ""


class Showing:
    """A tokenizer whose texts show some of its special tokens."""

    def __init__(self, tokenizer: Any, shown: set[int]) -> None:
        self._tokenizer, self._shown = tokenizer, shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **settings: Any) -> str:
        runs = groupby(tokens, self._shown.__contains__) if skip_special_tokens else [(True, tokens)]
        decode = self._tokenizer.decode
        return "".join(decode(list(run), skip_special_tokens=not shown, **settings) for shown, run in runs)


def each_text(value: Any, change: Callable[[str], str], depth: int = _DATA["depth"]) -> Any:
    """A document of JSON with every text changed; ``depth`` is that of lists and objects in each other, at most."""
    if isinstance(value, str):
        return change(value)
    if not depth:
        raise ApiError(
            f"tools, or messages: more than {_DATA['depth']} lists and objects stand in each other.", param="tools"
        )
    if isinstance(value, list):
        return [each_text(item, change, depth - 1) for item in value]
    if isinstance(value, dict):
        return {change(key): each_text(item, change, depth - 1) for key, item in value.items()}
    return value


class ToolTemplate:
    """What a chat template, and its tokenizer, do with tools."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._own = getattr(tokenizer, "response_template", None) is not None
        added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self.tokenizer = Showing(tokenizer, {token for token in added if self._own or added[token] in _DATA["marks"]})

    @cached_property
    def _writes_tools(self) -> bool:
        return _NAME in self._text(_DATA["talk"][:1], [_DATA["tool"]])

    @cached_property
    def _talk(self) -> str:
        """How a call and its outcome stand in a prompt."""
        return self._text(_DATA["talk"])

    @cached_property
    def _form(self) -> dict[str, str] | None:
        """The form in which the template writes calls."""
        for form in FORMS:
            reader = FormReader(form, [_NAME])
            reader.feed(self._talk)
            if any(call.right and "probed" in call.arguments for call in reader.calls):
                return form
        return None

    def _text(self, messages: Any, tools: Any = ()) -> str:
        try:
            return written(self._tokenizer, messages, self._template, tools=tools)[0]
        except LookaheadError:
            return ""

    def check(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], choice: Any) -> None:
        """Refuse what the template leaves out, and calls in a form that is not known. Answers of tools are given their
        names, which some templates write."""
        made = dict[str, str]()
        for said in messages:
            made |= {call["id"]: call["function"]["name"] for call in said.get("tool_calls", ())}
            if said["role"] == "tool":
                if (asked := said.get("tool_call_id")) not in made:
                    told = f"messages: tool_call_id is {asked!r}: expected the id of a call in a message before."
                    raise ApiError(told, param="messages")
                said.setdefault("name", made[asked])
        if made and not all(part in self._talk for part in (_NAME, _DATA["talk"][-1]["content"])):
            raise _unsupported("messages", "tool_calls are not written by this model's chat template")
        if choice not in ("none", "auto"):
            raise _unsupported("tool_choice", 'expected "auto" or "none"')
        if tools and not self._writes_tools:
            raise _unsupported("tools", "this model's chat template does not write them; --chat-template names another")
        if tools and not (self._own or self._form):
            known = ", ".join(form["name"] for form in FORMS)
            raise _unsupported("tools", f"this model writes calls in a form that is not known, which are {known}")

    def reader(self, tools: Sequence[Any], prompt: Sequence[int], several: bool) -> Callable[[], Reader]:
        """What makes a reader of an answer to a prompt with these tools."""
        names = [tool["function"]["name"] for tool in tools]
        if self._form is not None and not self._own:
            return partial(FormReader, self._form, names, several)
        make = partial(self._tokenizer.get_response_parser, prefix=list(prompt), tools=list(tools))
        return lambda: OwnReader(make(), names, several)


def _unsupported(name: str, reason: str) -> ApiError:
    return ApiError(f"{name} is not supported here: {reason}.", param=name, code="unsupported_parameter")

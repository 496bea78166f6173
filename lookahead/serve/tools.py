"""Tools in chats: what a model's template writes of them, and the calls in its answers, read as they come.

The template is asked: it writes a call, and the form that reads it back is the model's. A tokenizer that has a
``response_template`` says itself how answers are read. ``tools.json`` has the forms, what templates are asked, the
most calls that a grammar lets through (small models find no end), and how long ids are: some templates take no others.
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
from lookahead.serve.bodies import ChatRequest
from lookahead.serve.errors import ApiError

_DATA = json.loads(Path(__file__).with_name("tools.json").read_text(encoding="utf-8"))
_NAME = _DATA["tool"]["function"]["name"]
FORMS: tuple[dict[str, Any], ...] = tuple(_DATA["forms"])
_SPACE = r"\s{0,8}+"  # what a space in a form stands for: as much is held back before a call
_FIRST = r'(?P<first>\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+"|(?&first))*+\})'  # arguments that stand before a name
_ARGUMENTS = regex.compile(f"(?s){_FIRST}")


@dataclass
class ToolCall:
    """A call in an answer."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(_DATA["id"])[: _DATA["id"]])

    def told(self) -> dict[str, Any]:
        """The call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reader:
    """Splits an answer into content and calls as it comes."""

    def __init__(self) -> None:
        self.content, self.calls = "", list[ToolCall]()
        self._held = ""  # not told yet

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
        """The fields of a whole message."""
        told = {"tool_calls": [call.told() for call in self.calls]} if self.calls else {}
        return {"content": self.content or (None if told else "")} | told

    def _read(self, last: bool) -> None:
        """Take what is known from the text that is held: all is content where there are no tools."""
        self.content += self._take(len(self._held))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class FormReader(Reader):
    """Reads calls in a form. A streamed one begins once all before its arguments is there, and has these as they come::

        Wait.<tool_   call>{"name": "f", "arguments": {"x"   : 1}}</tool_call>
        content Wait.                 call f, arguments {"x"   : 1}

    One of a whole answer is text where its arguments are no JSON, or have no end.
    """

    def __init__(self, form: dict[str, Any], names: Sequence[str], request: ChatRequest) -> None:
        super().__init__()
        self._streams, self._several = request.stream, request.parallel_tool_calls
        name = f"(?P<name>{'|'.join(map(regex.escape, names))})"
        begins = form["begins"].replace(" ", _SPACE).replace("NAME", name).replace("OBJECT", _FIRST)
        self._begins, self._ends = regex.compile(f"(?s){begins}"), regex.compile(form["ends"].replace(" ", _SPACE))
        self._open = self._behind = False  # in the last call's arguments; behind these

    def _read(self, last: bool) -> None:
        while self._passed(last):
            begins = self._begins.search(self._held, partial=True)
            first = begins.groupdict().get("first") and begins.start("first")
            given = _ARGUMENTS.match(self._held, first or begins.end(), partial=True)
            size = max(begins.end(), given.end()) - begins.start()
            begun = not begins.partial and (self._streams or not given.partial)
            text = self._take(len(self._held) if last and not begun else begins.start())
            self.content += text.rstrip() if last and self.calls else text
            if not begun:
                return
            if not (self._streams or _is_object(given[0])):
                self.content += self._take(size)
                continue
            if not self._open:
                self.calls.append(ToolCall(begins["name"], ""))
            self.calls[-1].arguments, self._open, self._behind = given[0], given.partial, not given.partial
            if given.partial:
                return
            self._take(size)

    def _passed(self, last: bool) -> bool:
        """Whether what ends a call is there, or cannot come any more. Behind the only call nothing is read."""
        ends = self._ends.match(self._held, partial=True) if self._behind else None
        if ends is not None and ends.partial and not last:
            return False
        self._take(0 if ends is None else ends.end())
        self._behind = False
        if self.calls and not (self._several or self._open):
            self._held = ""
        return True


class OwnReader(Reader):
    """Reads as the tokenizer's ``response_template`` says, whose parser knows a call when it is over. Where that fails,
    what was not told is content, and so is the rest."""

    def __init__(self, parser: Callable[[], Any], names: Sequence[str], request: ChatRequest) -> None:
        super().__init__()
        self._parser, self._names, self._several, self._untold = parser(), names, request.parallel_tool_calls, ""

    def _read(self, last: bool) -> None:
        for letter in (*self._take(len(self._held)), *[""] * last):
            self._untold += letter
            try:
                for event in self._parser.feed(letter) if letter else self._parser.finalize()[1]:
                    if event["type"] == "region_chunk" and event["field"] != "tool_calls":
                        self._untold = self._untold.partition(event["text"])[2]
                        self.content += event["text"]
                    elif event["type"] == "region_close" and event["field"] == "tool_calls":
                        self._add(event["value"])
                        self._untold = ""
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                self._parser = None
                self.content, self._untold = self.content + self._untold, ""

    def _add(self, value: Any) -> None:
        for said in value if isinstance(value, list) else [value]:
            given, place = said["function"]["arguments"], self._names.index(said["function"]["name"])
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            if self._several or not self.calls:
                self.calls.append(ToolCall(self._names[place], text))


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
        raise ApiError(f"More than {_DATA['depth']} lists and objects stand in each other.", param="tools")
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
        added = tokenizer.added_tokens_decoder
        self._marks = {entry.content: token for token, entry in added.items() if entry.content in _DATA["marks"]}
        hidden = {token for token, entry in added.items() if entry.special}
        self.tokenizer = Showing(tokenizer, hidden if self._own else hidden & {*self._marks.values()})

    @cached_property
    def _writes_tools(self) -> bool:
        return _NAME in self._text(_DATA["talk"][:1], [_DATA["tool"]])

    @cached_property
    def _talk(self) -> str:
        """How a call and its outcome stand in a prompt."""
        return self._text(_DATA["talk"])

    @cached_property
    def _form(self) -> dict[str, Any] | None:
        """The form in which the template writes calls."""
        for form in FORMS:
            reader = FormReader(form, [_NAME], ChatRequest(messages=_DATA["talk"][:1]))
            reader.feed(self._talk)
            if any("probed" in call.arguments for call in reader.calls):
                return form
        return None

    def _text(self, messages: Any, tools: Any = ()) -> str:
        try:
            return written(self._tokenizer, messages, self._template, tools=tools)[0]
        except LookaheadError:
            return ""

    def tools(self, messages: Sequence[dict[str, Any]], request: ChatRequest) -> list[dict[str, Any]]:
        """The tools of a request that may be called, where the template writes all that it holds, and calls have a form
        that is known. Answers of tools are given their names, which some templates write."""
        tools, made = _callable(request), dict[str, str]()
        for message in messages:
            made |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
            if message["role"] == "tool":
                if (asked := message.get("tool_call_id")) not in made:
                    told = f"messages: tool_call_id is {asked!r}: expected the id of a call in a message before."
                    raise ApiError(told, param="messages")
                message.setdefault("name", made[asked])
        if made and not all(part in self._talk for part in (_NAME, _DATA["talk"][-1]["content"])):
            raise _unsupported("messages", "tool_calls are not written by this model's chat template")
        if request.tool_choice not in ("none", "auto") and not tools:
            raise _unsupported("tool_choice", 'expected "none", "auto", "required", or one of the functions in tools')
        if tools and not self._writes_tools:
            raise _unsupported("tools", "this model's chat template does not write them; --chat-template names another")
        if tools and not (self._own or self._form):
            known = ", ".join(form["name"] for form in FORMS)
            raise _unsupported("tools", f"this model writes calls in a form that is not known, which are {known}")
        return tools

    def reader(self, tools: Sequence[Any], prompt: Sequence[int], request: ChatRequest) -> Callable[[], Reader]:
        """What makes a reader of an answer to a prompt with these tools."""
        names = [tool["function"]["name"] for tool in tools]
        if self._form is not None and not self._own:
            return partial(FormReader, self._form, names, request)
        parser = partial(self._tokenizer.get_response_parser, prefix=list(prompt), tools=list(tools))
        return partial(OwnReader, parser, names, request)

    def grammar(self, tools: Sequence[Any], request: ChatRequest) -> dict[str, str]:
        """The grammar of answers that call what they have to, with arguments by their schema, in llguidance's Lark;
        with ``tool_choice`` "auto" of what follows the token that begins a call. Nothing where any text will do."""
        choice = request.tool_choice
        if choice == "auto" and not any(tool.function.strict for tool in request.tools):
            return {}
        if self._own or self._form is None:
            raise _unsupported("tool_choice", "this tokenizer's response_template does not say how calls are written")
        opens, call, between, closes = self._form["written"]
        several = request.parallel_tool_calls and choice in ("auto", "required") and between
        more = f"({self._lark(between)} call){{0,{_DATA['forced'] - 1}}}" if several else ""
        calls = f"{self._lark(opens)} call {more} {self._lark(closes)}"
        if choice == "auto":
            if (mark := next((self._marks[mark] for mark in self._marks if opens.startswith(mark)), None)) is None:
                raise _unsupported("tools", 'strict needs a token that begins calls, or tool_choice "required"')
            calls = f"<[^{mark}]>* ({calls})?"
        chosen = []
        for tool in (tool["function"] for tool in tools):
            schema = json.dumps({"type": "object"} | tool["parameters"] | _DATA["style"])
            before, behind = map(self._lark, call.replace("NAME", tool["name"]).split("ARGUMENTS"))
            chosen.append(f"({before} %json {schema} {behind})")
        return {"grammar": f"start: {calls}\ncall: {' | '.join(chosen)}\n"}

    def _lark(self, text: str) -> str:
        """A text that stands for itself, and tokens that do."""
        ours, parts = self._marks, regex.split(f"({'|'.join(map(regex.escape, _DATA['marks']))})", text)
        return " ".join(f"<[{ours[part]}]>" if part in ours else json.dumps(part) for part in parts if part)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _callable(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that may be called, as chat templates take them."""
    found = []
    for tool in request.tools:
        if request.tool_choice in ("auto", "required", {"type": "function", "function": {"name": tool.function.name}}):
            given = {name: said for name, said in tool.function if name != "strict" and said is not None}
            found.append({"type": "function", "function": given})
    return found


def _unsupported(name: str, reason: str) -> ApiError:
    return ApiError(f"{name} is not supported here: {reason}.", param=name, code="unsupported_parameter")

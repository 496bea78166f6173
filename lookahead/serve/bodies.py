"""Fields of a request's body. Null is as if left out. Fields that are not listed are ignored, as OpenAI's
clients send many; fields that would change the answer and are not supported are refused by name."""

import json
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError

from lookahead.serve.calls import Calling, MadeCall
from lookahead.serve.constraints import Constrained
from lookahead.serve.errors import ApiError
from lookahead.serve.parts import FIRST, UNSUPPORTED, BodyPart

_MOST_CHOICES = 16
_MOST_BIASES = 1024  # entries of logit_bias: all of them are looked at for each token
_SMALL = 1 << 16  # bytes of a body that the parser in C reads in a few milliseconds, in which no other thread runs
MOST_VALUES = 1 << 18  # in a body
_CONTAINER = 16  # values that a list or an object counts for, by the memory that it takes


class TextPart(BodyPart):
    type: Literal["text"]
    text: str


_Ids = Annotated[list[int], FIRST]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
_Content = str | Annotated[list[TextPart], FIRST]


class ChatMessage(BodyPart):
    where = "messages"
    unsupported = UNSUPPORTED["message"]
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], FIRST] = Field(default=[])
    tool_call_id: str | None = None

    def as_text(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        if self.role != "assistant" and (self.content is None or self.tool_calls):
            raise ApiError("messages: content may be left out, calls made, by the assistant alone.", param="messages")
        role = "system" if self.role == "developer" else self.role
        more = self.model_dump(include={"name", "tool_calls", "tool_call_id"})
        return {"role": role, "content": text_of(self.content or "")} | {key: it for key, it in more.items() if it}


class Prediction(BodyPart):
    type: Literal["content"]
    content: _Content


class StreamOptions(BodyPart):
    include_usage: bool = False


class Details(BodyPart):
    """The project's own options: ``details`` adds to each chunk of a stream which tokens were drafted, and by what."""

    details: bool = False


class Request(Constrained):
    """Fields that both kinds of completion share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=_MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    prediction: Prediction | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    n_max: Annotated[int, Field(ge=0, le=1024, alias="speculative.n_max")] = 1024
    use_lookahead: bool = True
    lookahead: Details = Details()

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(Calling, Request):
    unsupported = UNSUPPORTED["request"] | UNSUPPORTED["chat"]
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0


class CompletionRequest(Request):
    unsupported = UNSUPPORTED["request"] | UNSUPPORTED["completion"]
    prompt: str | Annotated[list[str], FIRST] | _Ids | Annotated[list[_Ids], FIRST]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None


_Model = TypeVar("_Model", bound=Request)


class _Counting(json.JSONDecoder):
    """A parser that stops at a number of values. It is Python's own, so that other threads run beside it."""

    def __init__(self, most: int) -> None:
        super().__init__(parse_int=_whole, parse_constant=_refuse_constant)
        self._most = self._left = most
        self.parse_array = lambda at, scan, *rest: JSONArray(at, self._counted(scan), *rest)
        self.parse_object = lambda at, strict, scan, *rest: JSONObject(at, strict, self._counted(scan), *rest)
        self.scan_once = py_make_scanner(self)

    def _counted(self, scan: Any) -> Any:
        self._left -= _CONTAINER

        def one(text: str, at: int) -> Any:
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {self._most} values, where a list or an object counts as {_CONTAINER}")
            return scan(text, at)

        return one


def read(raw: bytes, kind: type[_Model], most_values: int = MOST_VALUES) -> _Model:
    """Parse a body; an :class:`ApiError` says what is wrong with it, the first thing alone."""
    try:
        text = raw.decode("utf-8-sig")
        if len(raw) <= _SMALL:
            document = json.loads(text, parse_int=_whole, parse_constant=_refuse_constant)
        else:
            document = _Counting(most_values).decode(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not JSON that can be read: {str(error)[:200]}.") from error
    if not isinstance(document, dict):
        raise ApiError(f"The body must be a JSON object: got {type(document).__name__}.")
    try:
        return kind.model_validate(document)
    except RecursionError as error:
        raise ApiError("The body is nested too deeply.") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        param = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(f"{where}: {first['msg']}.", param=param) from error


def _whole(digits: str) -> int:
    if len(digits) > 40:  # no field takes more, and thousands of digits take long
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def text_of(content: str | list[TextPart]) -> str:
    """A message's content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)

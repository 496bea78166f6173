"""What may stand in a request's body. Fields that are not listed are ignored, as OpenAI's clients send many; fields
that would change the answer and are not supported are refused."""

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead.serve.errors import ApiError

_MOST_CHOICES = 16
_Finite = Field(allow_inf_nan=False)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_text(self) -> dict[str, str]:
        """The message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_of(self.content)}


class Prediction(_Body):
    type: Literal["content"]
    content: str | list[TextPart]


class StreamOptions(_Body):
    include_usage: bool = False


class Details(_Body):
    """The project's own options: ``details`` adds to each chunk of a stream which tokens were drafted, and by what."""

    details: bool = False


class Request(_Body):
    """What both kinds of completion share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    prediction: Prediction | None = None
    use_lookahead: bool | None = None
    lookahead: Details | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(Request):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


_Model = TypeVar("_Model", bound=Request)
_EMPTY: dict[str, tuple[Any, ...]] = {  # what these fields may say: nothing that would change the answer
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "best_of": (None, 1),
}


def read(raw: bytes, kind: type[_Model]) -> _Model:
    """Parse a body; an :class:`ApiError` says what is wrong with it."""
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ApiError(f"The body must be a JSON object: got {type(document).__name__}.")
    for name, allowed in _EMPTY.items():
        if document.get(name) not in allowed:
            raise ApiError(f"{name} is not supported. Leave it out.", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(document)
    except (ValidationError, RecursionError) as error:
        raise _told(error) from error


def check_model(request: Request, name: str) -> None:
    """Refuse a request for another model than the one of that name."""
    if request.model not in (None, name):
        told = f"The model {request.model[:100]!r} does not exist here: this server has {name!r}."
        raise ApiError(told, 404, code="model_not_found", param="model")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _told(error: ValidationError | RecursionError) -> ApiError:
    if isinstance(error, RecursionError):
        return ApiError("The body is nested too deeply.")
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    return ApiError(f"{where}: {first['msg']}.", param=str(first["loc"][0]) if first["loc"] else None)


def text_of(content: str | list[TextPart]) -> str:
    """A message's content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)

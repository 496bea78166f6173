"""Fields of a chat's body that tools and calls of them stand in."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Json

from lookahead.serve.parts import BodyPart


class Tool(BodyPart):
    class Function(BodyPart):
        model_config = ConfigDict(extra="allow")  # templates may read more
        name: Annotated[str, Field(pattern=r"^[\w./:-]{1,64}$")]
        description: str | None = None
        parameters: dict[str, Any] = Field(default={"type": "object", "properties": {}})
        strict: bool = False

    type: Literal["function"]
    function: Function


class MadeCall(BodyPart):
    class Function(BodyPart):
        name: str
        arguments: Json[dict[str, Any]]

    id: str
    type: Literal["function"] = "function"
    function: Function


class Calling(BodyPart):
    """What a chat's answer may call, and has to."""

    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

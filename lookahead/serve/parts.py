"""What parts of a request's body have in common: null is as if left out, and what is not supported is refused."""

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lookahead.serve.errors import ApiError

FIRST = Field(fail_fast=True)  # of a list: what is wrong with its first wrong item is all that is told
UNSUPPORTED = json.loads(Path(__file__).with_name("unsupported.json").read_text(encoding="utf-8"))


class BodyPart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    unsupported: ClassVar[dict[str, list[Any]]] = {}
    where: ClassVar[str | None] = None  # the field of the body that such parts stand in

    @model_validator(mode="before")
    @classmethod
    def _given(cls, document: Any) -> Any:
        """The fields that say something."""
        if not isinstance(document, dict):
            return document
        given = {name: value for name, value in document.items() if value is not None}
        for name in cls.unsupported.keys() & given.keys():
            if given[name] not in cls.unsupported[name]:
                told = f"{name} is not supported. Leave it out."
                raise ApiError(told, param=cls.where or name, code="unsupported_parameter")
        return given

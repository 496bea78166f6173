"""Fields of a body that say what an answer has to follow."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jacobi import LookaheadError
from lookahead.serve.errors import ApiError
from lookahead.serve.parts import BodyPart
from lookahead.strategies.grammar import Grammar


class JsonSchema(BodyPart):
    document: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(BodyPart):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema = JsonSchema(schema={})


class Constrained(BodyPart):
    """OpenAI's and vLLM's fields; one of them may be given."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: dict[Literal["json", "json_object", "regex", "choice", "grammar"], Any] = Field(default={})
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def grammars(self) -> list[tuple[str, dict[str, Any]]]:
        """What the answer has to follow, as :class:`lookahead.Grammar` takes it, each behind its field."""
        schema, kind = self.response_format.json_schema.document, str(self.response_format.type)
        found: list[tuple[str, str, Any]] = []
        found.append(("response_format", kind, {"json_object": True, "json_schema": schema}.get(kind)))
        found += [("structured_outputs", kind, what) for kind, what in self.structured_outputs.items()]
        guided = ("json", "regex", "choice", "grammar")
        found += [(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")) for kind in guided]
        given = [each for each in found if each[2] not in (None, False)]
        return [(field, {"json_schema" if kind == "json" else kind: what}) for field, kind, what in given]

    def grammar(self, tokenizer: Any, ends: list[int] | None, *others: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """The one :class:`lookahead.Grammar` that is asked for, by these fields or ``others``: its arguments, of which
        an answer's ``ends`` are one; empty where none is."""
        given = [*self.grammars, *others]
        if not any(what for _, what in given):
            return {}
        (field, grammar), *rest = given
        if rest or self.min_tokens:
            other = rest[0][0] if rest else "min_tokens"
            raise ApiError(f"{field} and {other} both say how long an answer is. Leave one of them out.", param=other)
        try:
            Grammar(tokenizer, **grammar, eos_token_id=ends)
        except LookaheadError as error:
            raise ApiError(f"{field}: {error}", param=field) from error
        return grammar | {"eos_token_id": ends}

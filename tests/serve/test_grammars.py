"""Answers that follow a grammar: what fields ask for is honoured at both endpoints, or refused by name."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers.serving import NAME, PROMPT, bundled, plain, served
from openai import OpenAI
from pydantic import BaseModel

from lookahead import Grammar
from lookahead.serve.errors import ApiError
from lookahead.serve.plans import Limits, RequestPlanner

pytest.importorskip("llguidance", reason="grammars need the extra 'grammar'")

PROPERTIES = {"name": {"type": "string", "maxLength": 10}, "on": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["name", "on"], "additionalProperties": False}
SCHEMA_OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": SCHEMA_OF_OPENAI}, {"json_schema": SCHEMA}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"guided_regex": "[0-9]{3}-[a-z]{4}"}, {"regex": "[0-9]{3}-[a-z]{4}"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": 'root ::= ("ab" | "cd") "!"'}, {"grammar": 'root ::= ("ab" | "cd") "!"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
]
HI = [{"role": "user", "content": "hi"}]


def said(address: str, body: dict[str, Any]) -> list[str]:
    path = "chat/completions" if "messages" in body else "completions"
    answer = httpx.post(f"{address}/v1/{path}", json={"max_tokens": 60} | body, timeout=60).json()
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"]), answer
    return [choice["message"]["content"] if "messages" in body else choice["text"] for choice in answer["choices"]]


def test_answers_are_plain_generate_s_with_the_same_grammar() -> None:
    """All at once: they share passes with each other, and with an answer that follows none."""
    drawn = {"temperature": 0.9, "top_k": 50, "seed": 5}
    asked = [{"prompt": PROMPT, "temperature": 0} | field for field, _ in FIELDS]
    asked += [{"prompt": PROMPT} | drawn | field for field, _ in FIELDS[:3]]
    asked.append({"messages": HI, "temperature": 0} | FIELDS[1][0])
    with served() as address, ThreadPoolExecutor(6) as pool:
        beside = pool.submit(httpx.post, f"{address}/v1/completions", json={"prompt": "x = ", "max_tokens": 120})
        found = list(pool.map(lambda body: said(address, body)[0], asked))
        several = said(address, {"prompt": PROMPT, "n": 2} | drawn | FIELDS[1][0])
        assert beside.result().status_code == 200
    for text, body, (_, given) in zip(found, asked, [*FIELDS, *FIELDS[:3]], strict=False):
        settings = {"do_sample": True, "temperature": 0.9, "seed": 5} if "seed" in body else {"do_sample": False}
        settings |= {"logits_processor": [Grammar(bundled()[1], **given)], "max_new_tokens": 60}
        assert text == plain(PROMPT, **settings), body
    assert several[0] == found[len(FIELDS) + 1]
    assert all(set(json.loads(text)) == {"name", "on"} for text in (*several, found[-1]))


def test_openai_s_client_parses_what_it_asks_for(openai: OpenAI) -> None:
    class Switch(BaseModel):
        name: bool
        on: bool

    messages: Any = HI
    given: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 60, "temperature": 0}
    parsed = openai.chat.completions.parse(**given, response_format=Switch).choices[0].message.parsed
    with openai.chat.completions.stream(**given, response_format=Switch) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    usage: Any = openai.chat.completions.create(**given, extra_body=FIELDS[2][0]).usage
    assert isinstance(parsed, Switch) and usage.lookahead["sources"]["grammar"] > 0


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize(
    ("field", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "Input should be 'text', 'json_object'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "dictionary"),
        ({"guided_json": {"type": "x"}}, "guided_json", "Invalid type: x"),
        ({"guided_choice": []}, "guided_choice", "must be texts"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs", "must be text"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "Input should be 'json'"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "Leave one of them out"),
        ({"guided_regex": "a+", "min_tokens": 2}, "min_tokens", "Leave one of them out"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_name(chat: bool, field: dict[str, Any], param: str, told: str) -> None:
    planner = RequestPlanner(*bundled(), Limits(1024))
    body = ({"messages": HI} if chat else {"prompt": "x"}) | field
    with pytest.raises(ApiError, match=told) as refused:
        planner.plan(json.dumps(body).encode(), chat, NAME)
    assert (refused.value.status, refused.value.param) == (400, param)

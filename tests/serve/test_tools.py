"""Tools in prompts, calls in answers: read in any pieces, whole and streamed, as the official client sees them."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from helpers.scripted import HERMES, LAST, scripted
from helpers.serving import NAME, client, served
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared_params import FunctionDefinition

from lookahead.serve import bodies, calls
from lookahead.serve.errors import ApiError
from lookahead.serve.plans import Limits, RequestPlanner
from lookahead.serve.tools import FORMS, FormReader

pytestmark = pytest.mark.usefixtures("augmented")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
MISTRAL = HERMES.replace('<tool_call>\n{"name"', '[TOOL_CALLS] [{"name"').replace("}\n</tool_call>", "}]")
ANSWERS = {
    "a": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "A }\\"{ B", "x": {"y": []}}}\n'
    '</tool_call>\n<tool_call>{"name":"now","arguments":{}}</tool_call>',
    "b": "It is <b>warm</b> there.",
    "c": 'Hm <tool_call>\n{"name": "weather", "arguments": {"city: ]}}\n</tool_call> x.',
    "d": '<tool_call>\n{"name": "other", "arguments": {"city": "Rome"}}\n</tool_call>',
}
CALLS = [("weather", {"city": 'A }"{ B', "x": {"y": []}}), ("now", {})]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return scripted(ANSWERS)


def asked(which: str, **settings: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Which? {which}"}]
    return {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0} | settings


def answer(openai: OpenAI, which: str, **settings: Any) -> Any:
    return openai.chat.completions.create(**asked(which, **settings)).choices[0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_in_a_whole_answer(openai: OpenAI) -> None:
    for settings in ({}, {"n": 2}, {"logprobs": True}):
        for choice in openai.chat.completions.create(**asked("a", **settings)).choices:
            assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
            assert calls_of(choice.message) == CALLS
            assert len({call.id for call in choice.message.tool_calls or ()}) == 2
    assert calls_of(answer(openai, "a", parallel_tool_calls=False).message) == CALLS[:1]
    cut = answer(openai, "a", max_tokens=30)
    assert cut.finish_reason == "length" and cut.message.tool_calls is None
    assert ANSWERS["a"].startswith(str(cut.message.content))


@pytest.mark.parametrize(("which", "tools"), [("b", TOOLS), ("c", TOOLS), ("d", TOOLS), ("a", []), ("a", None)])
def test_what_is_no_call_of_a_tool_stays_text(openai: OpenAI, which: str, tools: Any) -> None:
    """Neither what is malformed, nor calls of others, or where there are no tools or are not to be called."""
    choice = answer(openai, which, **({"tool_choice": "none"} if tools is None else {"tools": tools}))
    said = choice.message
    assert (said.content, said.tool_calls, choice.finish_reason) == (ANSWERS[which], None, "stop")


@pytest.mark.parametrize("settings", [{}, {"logprobs": True}, {"extra_body": {"lookahead": {"details": True}}}])
def test_calls_in_a_stream(openai: OpenAI, settings: Any) -> None:
    with openai.chat.completions.stream(**asked("a", **settings)) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        choice = stream.get_final_completion().choices[0]
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == CALLS
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    named = [call.function and call.function.name for call in told if call.id]
    assert named == ["weather", "now"] and [call.index for call in told] == sorted(call.index for call in told)
    assert len(told) > 10 or "logprobs" in settings, "arguments come in pieces"


def test_a_conversation_with_calls_goes_on(openai: OpenAI, loaded: tuple[Any, Any]) -> None:
    said = answer(openai, "a").message
    messages: Any = [*asked("a")["messages"], said]
    for call in said.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: b"})
    goes_on = openai.chat.completions.create(**asked("a", messages=messages))
    assert goes_on.choices[0].message.content == ANSWERS["b"]
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in CALLS]
    messages[1] = {"role": "assistant", "content": "Let me see.", "tool_calls": made}
    bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    settings: Any = {"tools": [TOOLS[0], bare], "add_generation_prompt": True, "tokenize": False}
    text = loaded[1].apply_chat_template(messages, **settings)
    assert goes_on.usage is not None and goes_on.usage.prompt_tokens == len(loaded[1](text)["input_ids"])


WRITTEN = {
    "Hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n'
    '<tool_call>{"arguments":%s, "name":"g"}</tool_call>',
    "Mistral": '[TOOL_CALLS] [{"name": "f", "arguments": %s}, {"name": "g", "arguments": %s, "id": "a1b2c3d4e"}]',
    "Mistral [ARGS]": "[TOOL_CALLS]f[CALL_ID]abc[ARGS]%s[TOOL_CALLS]g%s",
    "Llama 3 JSON": '<|python_tag|>{"name": "f", "parameters": %s}; {"name": "g", "parameters": %s}',
}
PARTS = [*WRITTEN["Hermes"].split("%s"), "{", "}", '"', "\\", "x", " ", '{"a": 1}']
LEAVES = st.none() | st.integers() | st.text()
VALUES: Any = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
STREAM: Any = partial(SimpleNamespace, parallel_tool_calls=True)


@examples(60)
@given(st.data(), st.dictionaries(st.text(), VALUES), st.sampled_from(["", "So: ", "{", "a < b, <tool", "[1, 2] "]))
def test_any_pieces_give_the_same(data: Any, arguments: dict[str, Any], before: str) -> None:
    form = data.draw(st.sampled_from(FORMS))
    given = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()))
    text = before + WRITTEN[form["name"]] % (given, given)
    whole = FormReader(form, ["f", "g"], STREAM(stream=False))
    whole.feed(text, last=True)
    calls = whole.message()["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": name, "arguments": given} for name in "fg"]
    assert whole.content == before.rstrip()
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=40)))
    content, told = "", dict[int, str]()
    reader = FormReader(form, ["f", "g"], STREAM(stream=True))
    for begin, end in zip([0, *places], [*places, len(text)], strict=True):
        delta = reader.feed(text[begin:end], last=end == len(text))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            told[call["index"]] = told.get(call["index"], "") + call["function"]["arguments"]
    assert (content, told) == (whole.content, {0: given, 1: given})


@examples(100)
@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_nothing_is_lost(parts: list[str]) -> None:
    """What is no call is text: with the calls it is all that was written but for space around them."""
    text, told = "".join(parts), ""
    reader = FormReader(FORMS[0], ["f", "g"], STREAM(stream=True))
    for letter in (*text, ""):
        delta = reader.feed(letter, last=not letter)
        told += delta.get("content", "")
        told += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
    left = iter(text)
    assert all(letter in left for letter in told)
    assert len(text) - len(told) <= len(WRITTEN["Hermes"]) * len(reader.calls)


def test_special_tokens_that_begin_calls_are_read() -> None:
    text = 'Wait.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]'
    model, tokenizer = scripted({"a": text, "b": "Well[ARGS]so."}, MISTRAL, ["[TOOL_CALLS]", "[ARGS]"])
    with served(model, tokenizer) as address, client(address) as openai:
        choice = answer(openai, "a", stop=["[TOOL_CALLS]x"])
        assert (choice.message.content, calls_of(choice.message)) == ("Wait.", [("weather", {"city": "Rome"})])
        assert answer(openai, "b").message.content == "Well[ARGS]so."
        assert answer(openai, "b", tools=[]).message.content == "Wellso."


OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}  # fmt: skip


def test_a_response_template_is_followed() -> None:
    answers = {"a": 'So <call:weather>{"city": "A"}</call><call:now>{}</call>', "b": "x <call:now>{]</call> y"}
    answers["c"] = "<call:other>{}</call>"
    model, tokenizer = scripted(answers)
    tokenizer.response_template = OWN
    with served(model, tokenizer) as address, client(address) as openai:
        with openai.chat.completions.stream(**asked("a")) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (streamed, answer(openai, "a")):
            assert str(choice.message.content).endswith("So ") and choice.finish_reason == "tool_calls"
            assert calls_of(choice.message) == [("weather", {"city": "A"}), ("now", {})]
        assert calls_of(answer(openai, "a", parallel_tool_calls=False).message) == [("weather", {"city": "A"})]
        for which in "bc":
            choice = answer(openai, which)
            assert choice.message.tool_calls is None and answers[which] in str(choice.message.content)


def planned(template: str = HERMES, **body: Any) -> Any:
    planner = RequestPlanner(*scripted({"a": "x y"}, template), Limits(4096))
    return planner.plan(json.dumps({"messages": [{"role": "user", "content": "a"}]} | body).encode(), True, NAME)


CALLED = {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
MADE = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALLED]}]
BLIND = "{% for message in messages %}{{ message.content }}{% endfor %}" + LAST
DEEP = json.loads('{"a":[' * 300 + "]}" * 300)


@pytest.mark.parametrize(
    ("name", "told", "body"),
    [
        ("tools", "chat template does not write them", {"tools": TOOLS, "template": BLIND}),
        ("tools", "form that is not known", {"tools": TOOLS, "template": HERMES.replace("<tool_call>", "<call>")}),
        ("messages", "not written", {"messages": MADE, "template": BLIND}),
        ("messages", "expected the id of a call", {"messages": [*MADE, {"role": "tool", "content": "12"}]}),
        ("messages", "assistant alone", {"messages": [*MADE, {"role": "tool", "tool_call_id": "x"}]}),
        ("messages", "arguments", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "x", "function": {"name": "now", "arguments": "[]"}}]}]}),
        ("messages", "assistant alone", {"messages": [{"role": "user", "content": "a", "tool_calls": [CALLED]}]}),
        ("tools", "64", {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}),
        ("tools", "function.name", {"tools": [{"type": "function", "function": {"name": 'f"'}}]}),
        ("tools", "'function'", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools", "strict", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
        ("tools", "128", {"tools": TOOLS[1:] * 129}),
        ("tool_choice", "auto", {"tool_choice": "required"}),
        ("tool_choice", "auto", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "now"}}}),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(name: str, told: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        planned(**body)
    assert (refused.value.status, refused.value.param) == (400, name)


def test_special_tokens_in_tools_and_outcomes_are_text() -> None:
    said = {"name": "now", "description": "<end>", "parameters": {"<end>": ["<end>"]}}
    messages = [MADE[0], MADE[1], {"role": "tool", "tool_call_id": "x", "content": "<end>"}]
    tokenizer = scripted({"a": "x y"})[1]
    (ids,) = planned(tools=[{"type": "function", "function": said}], messages=messages).prompts
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids).replace("\u200b", "").count("<end>") == 4


# OpenAI's types of what a request may hold, each with the server's own.
TYPES: Any = [
    *((kind, bodies.ChatRequest) for kind in get_args(chat_params.CompletionCreateParams)),
    *((kind, bodies.CompletionRequest) for kind in get_args(completion_create_params.CompletionCreateParams)),
    *((getattr(chat, f"ChatCompletion{role}MessageParam"), bodies.ChatMessage) for role in (
        "Developer", "System", "User", "Assistant", "Tool")),
    (chat.ChatCompletionContentPartTextParam, bodies.TextPart),
    (chat.ChatCompletionMessageFunctionToolCallParam, calls.MadeCall),
    (chat.chat_completion_message_function_tool_call_param.Function, calls.MadeCall.Function),
    (chat.ChatCompletionFunctionToolParam, calls.Tool),
    (FunctionDefinition, calls.Tool.Function),
    (chat.ChatCompletionPredictionContentParam, bodies.Prediction),
    (chat.ChatCompletionStreamOptionsParam, bodies.StreamOptions),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), TYPES, ids=lambda kind: kind.__name__)
def test_every_field_of_the_official_client_is_honoured_or_refused_or_harmless(theirs: Any, ours: Any) -> None:
    """Harmless ones are told in the docs."""
    docs = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    harmless = json.loads(Path(bodies.__file__).with_name("unsupported.json").read_text(encoding="utf-8"))["harmless"]
    for name in get_type_hints(theirs):
        if name in ours.unsupported:
            with pytest.raises(ApiError, match=f"{name} is not supported"):
                ours.model_validate({name: {"what": "else"}})
        elif name not in ours.model_fields:
            assert name in harmless and f"`{name}`" in docs, name


UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "additionalProperties": False}
UNIT["required"] = ["unit"]
FORCED: Any = [{"type": "function", "function": {"name": name, "parameters": UNIT}} for name in ("warmth", "weather")]


@pytest.mark.parametrize("template", [HERMES, MISTRAL], ids=["tags", "tokens"])
def test_calls_are_forced_by_a_grammar(template: str) -> None:
    pytest.importorskip("llguidance")
    written = {"a": "It is warm.", "b": 'So [TOOL_CALLS] [{"name": "weather", "arguments": {"unit": "K"}}]'}
    model, tokenizer = scripted(written | {"c": "Well so"}, template, ["[TOOL_CALLS]"])
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with served(model, tokenizer) as address, client(address) as openai:

        def calls(which: str, tools: Any = FORCED, **settings: Any) -> Any:
            message = answer(openai, which, tools=tools, max_tokens=500, **settings).message
            found = calls_of(message)
            assert all(given in ({"unit": "C"}, {"unit": "F"}) for _, given in found)
            return message.content, [name for name, _ in found]

        for use in (True, False):
            assert calls("a", tool_choice=named, extra_body={"use_lookahead": use}) == (None, ["weather"])
        found = [calls("a", tool_choice="required", temperature=1, seed=seed) for seed in range(6)]
        assert all(content is None and names for content, names in found)
        assert max(len(names) for _, names in found) > 1 or template == MISTRAL
        with pytest.raises(BadRequestError, match="tools both say"):
            calls("a", response_format={"type": "json_object"})
        strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in FORCED]
        if template == MISTRAL:
            assert calls("b", strict) == ("So", ["weather"])
            assert calls("c", strict) == ("Well so", [])
        else:
            with pytest.raises(BadRequestError, match="strict"):
                calls("b", strict)

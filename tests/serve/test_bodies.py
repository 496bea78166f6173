"""Bodies that are large, wrong or foreign: what is refused, how soon, and what the loop does meanwhile."""

import json
import threading
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from helpers.serving import NAME, PROMPT, bundled, client, plain, served

from lookahead.serve.bodies import ChatRequest, CompletionRequest, read
from lookahead.serve.errors import ApiError
from lookahead.serve.plans import Limits, RequestPlanner

pytestmark = pytest.mark.usefixtures("augmented")
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LARGE = {
    "wrong prompts": {"prompt": [1.5] * 80_000},
    "prompts and nulls": {"prompt": ["a", None] * 50_000},
    "wrong lists": {"prompt": [["x"]] * 100_000},
    "wrong messages": {"messages": [{"role": "x"}] * 70_000},
    "no messages": {"messages": [1] * 100_000},
    "wrong parts": {"messages": [{"role": "user", "content": [{"type": "x"}] * 70_000}]},
    "small prompts": {"prompt": [[1]] * 62_500},
    "small texts": {"prompt": ["a"] * 62_500},
    "biases": {"messages": HI, "logit_bias": {str(token): 1 for token in range(40_000)}},
    "a long number": {"messages": HI, "seed": 10**4000},
    "stops": {"messages": HI, "stop": ["a"] * 80_000},
    "unknown fields": {f"x{number}": number for number in range(25_000)},
    "a long text": {"prompt": "hello world " * 80_000},
    "a long message": {"messages": [{"role": "user", "content": "hello world " * 80_000}]},
}


# Where their fields are read, and as unknown ones.
KNOWN = [(name, "prompt" not in LARGE[name]) for name in LARGE]


@pytest.mark.parametrize(
    ("name", "chat"), [*KNOWN, *(pytest.param(name, not chat, marks=pytest.mark.slow) for name, chat in KNOWN)]
)
def test_large_bodies_are_refused_in_little_memory(name: str, chat: bool) -> None:
    planner = RequestPlanner(*bundled(), Limits(1024))
    raw = json.dumps(LARGE[name]).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            planner.plan(raw, chat, NAME)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400 and len(str(refused.value)) < 500
    assert peak < 20 * len(raw) + (8 << 20)


@pytest.mark.parametrize("raw", [b"[" * 1_000_000, b'{"a":' * 200_000, b'{"seed": ' + b"9" * 1_000_000 + b"}"])
def test_what_is_nested_or_long_without_end_is_refused(raw: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        for given in (raw, raw[:50_000]):
            with pytest.raises(ApiError, match="not JSON"):
                read(given, kind)


def test_large_bodies_that_are_right_are_read() -> None:
    ids = list(range(100_000))
    assert read(json.dumps({"prompt": ids, "seed": -3}).encode(), CompletionRequest).prompt == ids
    text = 'a, [b] {c} "\\\n \u20ac' * 100_000
    assert read(json.dumps({"prompt": text, "top_p": 0.5}).encode(), CompletionRequest).prompt == text
    assert len(read(json.dumps({"messages": HI * 4_000}).encode(), ChatRequest).messages) == 4_000


def test_the_loop_goes_on_while_a_body_is_read() -> None:
    """The bound is wide for machines that do much else; reading on the loop took 8 to 30 seconds."""
    longest, done = 0.0, threading.Event()
    with served(limits=Limits(1024, body=8 << 20)) as address:

        def look() -> None:
            nonlocal longest
            with httpx.Client() as heart:
                while not done.is_set():
                    begin = time.monotonic()
                    heart.get(f"{address}/health")
                    longest = max(longest, time.monotonic() - begin)

        looking = threading.Thread(target=look)
        looking.start()
        bodies = [
            (name, json.dumps(LARGE[name])) for name in ("wrong prompts", "wrong messages", "biases", "a long text")
        ]
        for name, body in bodies:
            for path in (CHAT, TEXT):
                headers = {"Content-Type": "application/json"}
                assert httpx.post(address + path, content=body, headers=headers, timeout=60).status_code == 400, name
        done.set()
        looking.join()
    assert longest < 2.0


NULLS = ["model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]
NULLS += ["frequency_penalty", "presence_penalty", "logit_bias", "n", "stop", "max_tokens", "min_tokens", "prediction"]
NULLS += ["use_lookahead", "lookahead", "logprobs", "top_logprobs", "max_completion_tokens", "echo", "best_of", "tools"]
NULLS += ["tool_choice", "functions", "function_call", "response_format", "audio", "modalities", "user", "suffix"]
NULLS += ["metadata", "service_tier", "reasoning_effort", "verbosity", "web_search_options", "parallel_tool_calls"]
NULLS += ["store", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"]


def test_null_is_as_if_left_out() -> None:
    nulls: dict[str, Any] = dict.fromkeys(NULLS)
    for kind, needed in ((ChatRequest, {"messages": HI}), (CompletionRequest, {"prompt": "x"})):
        assert read(json.dumps(nulls | needed).encode(), kind) == read(json.dumps(needed).encode(), kind)
    inner = {"stream_options": {"include_usage": None}, "lookahead": {"details": None}, "stream": True}
    said = [{"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "name": None, "audio": None}]
    asked = read(json.dumps({"messages": HI + said} | inner).encode(), ChatRequest)
    assert asked.messages[1].as_text() == {"role": "assistant", "content": ""}
    with pytest.raises(ApiError, match="content may be left out"):
        read(b'{"messages": [{"role": "user", "content": null}]}', ChatRequest).messages[0].as_text()
    for body in ({"messages": None}, {"prompt": None}):
        with pytest.raises(ApiError, match="Field required"):
            read(json.dumps(body).encode(), ChatRequest if "messages" in body else CompletionRequest)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((path, field) for path in (CHAT, TEXT) for field in (
            {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"web_search_options": {}}, {"structural_tag": {}}, {"guided_whitespace_pattern": ""}, {"ignore_eos": True},
            {"best_of": 3}, {"suffix": "x"}, {"reasoning_effort": "low"}, {"stop_token_ids": [1]}, {"bad_words": ["a"]},
            {"logits_processors": ["x"]}, {"use_beam_search": True}, {"chat_template_kwargs": {"a": 1}},
            {"skip_special_tokens": False}, {"function_call": {"name": "f"}}, {"functions": [{}]}, {"grammar": "x"},
        )),
        (CHAT, {"echo": True}),
        (TEXT, {"max_completion_tokens": 3}),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(path: str, field: dict[str, Any]) -> None:
    planner, chat, (name,) = RequestPlanner(*bundled(), Limits(1024)), path == CHAT, field
    body = {"messages": HI} if chat else {"prompt": "x"}
    with pytest.raises(ApiError, match=name) as refused:
        planner.plan(json.dumps(body | field).encode(), chat, NAME)
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    "said", [{"tool_calls": [{}]}, {"function_call": {}}, {"audio": {"id": "x"}}, {"refusal": "no"}]
)
def test_parts_of_messages_that_would_be_lost_are_refused(said: dict[str, Any]) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "x"} | said]}
    with pytest.raises(ApiError, match=next(iter(said))) as refused:
        read(json.dumps(body).encode(), ChatRequest)
    assert refused.value.param == "messages"


def test_what_changes_nothing_passes() -> None:
    usual = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    usual |= {
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "tools": [],
    }
    for kind, needed in ((ChatRequest, {"messages": HI}), (CompletionRequest, {"prompt": "x"})):
        read(json.dumps(usual | needed).encode(), kind)
    assert RequestPlanner(*bundled(), Limits()).plan(b'{"prompt": "x", "n": 2, "best_of": 2}', False, NAME).count == 2


def test_sampling_that_is_off_is_generates() -> None:
    with served() as address, client(address) as openai:
        given: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 30, "seed": 4, "temperature": 1.2}
        for top_k in (0, -1):
            found = openai.completions.create(**given, extra_body={"top_k": top_k}).choices[0].text
            assert found == plain(PROMPT, 4, max_new_tokens=30, do_sample=True, temperature=1.2, top_k=0)
        best = openai.completions.create(**given, top_p=0).choices[0].text
        assert best == plain(PROMPT, 4, max_new_tokens=30, do_sample=True, temperature=1.2, top_p=0.0)
        assert best == plain(PROMPT, max_new_tokens=30, do_sample=False)
        bias: Any = {"temperature": 0, "logit_bias": {"0": 100}, "max_tokens": 9}
        least = openai.completions.create(**given | bias, extra_body={"min_tokens": 5})
        assert least.usage is not None and least.usage.completion_tokens == 6
        refused = httpx.post(address + TEXT, json={"prompt": "x", "max_tokens": 3, "min_tokens": 4})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


def test_lines_of_a_stream_end_where_its_events_do() -> None:
    prompt = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\rj"
    with served() as address:
        body = {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 3}
        lines = httpx.post(address + TEXT, json=body).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert lines[1::2] == [""] * len(events) and events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["text"] == prompt

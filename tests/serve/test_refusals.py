"""Bad requests: OpenAI's error shape, a 4xx status, and a server that goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import NAME, PROMPT, client, plain, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AuthenticationError, BadRequestError, NotFoundError

from lookahead.serve import Limits

pytestmark = pytest.mark.usefixtures("augmented")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(limits=Limits(1024, body=20_000)) as found:
        yield found


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, [], "must be a JSON object: got list"),
        (CHAT, {}, "messages: Field required"),
        (CHAT, {"messages": []}, "at least 1 item"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": HI, "temperature": 3}, "less than or equal to 2"),
        (CHAT, {"messages": HI, "n": 0}, "greater than or equal to 1"),
        (CHAT, {"messages": HI, "max_tokens": "9"}, "max_tokens"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "needs logprobs"),
        (CHAT, {"messages": HI, "stop": [""]}, "stop holds an empty text"),
        (CHAT, {"messages": HI, "logit_bias": {"4096": 1}}, "expected token ids"),
        (CHAT, {"messages": HI, "logit_bias": {"../x": 1}}, "expected token ids"),
        (CHAT, {"messages": HI, "max_tokens": 5000}, "context holds 1024 tokens"),
        (TEXT, {"prompt": ""}, "prompt is empty"),
        (TEXT, {"prompt": []}, "prompt is empty"),
        (TEXT, {"prompt": [4096]}, "token ids outside"),
        (TEXT, {"prompt": "\ud800"}, "surrogate"),
        (TEXT, {"prompt": PROMPT, "echo": True, "logprobs": 0}, "Leave one of them out"),
        (TEXT, {"prompt": PROMPT, "prediction": "text"}, "prediction"),
    ],
)
def test_bad_bodies(address: str, path: str, body: Any, told: str) -> None:
    for extra in ({}, {"stream": True}):
        sent = body | extra if isinstance(body, dict) else body
        assert told in refused(httpx.post(address + path, content=json.dumps(sent)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "max_tokens": 5000}, "max_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 1500}]}, "messages"),
        (TEXT, {"prompt": PROMPT, "max_tokens": 5000}, "max_tokens"),
        (TEXT, {"prompt": "x " * 1500, "max_tokens": 5}, "prompt"),
    ],
)
def test_what_is_too_long_is_named(address: str, path: str, body: Any, param: str) -> None:
    answer = httpx.post(address + path, json=body)
    assert "context holds" in refused(answer) and answer.json()["error"]["param"] == param


def test_bad_json_and_bad_paths(address: str) -> None:
    assert "not JSON" in refused(httpx.post(address + CHAT, content=b'{"messages": '))
    assert "not JSON" in refused(httpx.post(address + CHAT, content=b'{"temperature": NaN}'))
    assert "not JSON" in refused(httpx.post(address + CHAT, content=b"[" * 15_000))
    assert "not JSON" in refused(httpx.post(address + CHAT, content=b"\xff\xfe"))
    refused(httpx.get(address + "/v1/nothing"), 404)
    refused(httpx.get(address + CHAT), 405)
    assert "larger than 20000 bytes" in refused(httpx.post(address + CHAT, content=b" " * 20_001), 413)

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    assert "larger than 20000 bytes" in refused(httpx.post(address + CHAT, content=chunks()), 413)


def test_the_client_reads_the_errors(address: str) -> None:
    with client(address) as openai:
        with pytest.raises(BadRequestError, match="context holds 1024 tokens") as found:
            openai.completions.create(model=NAME, prompt="x " * 1500, max_tokens=5)
        assert found.value.code == "context_length_exceeded"
        with pytest.raises(NotFoundError, match="'other' does not exist here"):
            openai.completions.create(model="other", prompt=PROMPT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["messages", "prompt", "temperature", "top_p", "n", "stop", "logit_bias", "seed", "stream", "logprobs", "top_k"]
NAMES += ["prediction", "stream_options", "use_lookahead", "lookahead", "echo", "frequency_penalty", "tools", "model"]
FIELDS = st.sampled_from(NAMES)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(FIELDS, JSON, max_size=5), st.booleans())
def test_whatever_comes_is_answered(address: str, path: str, body: Any, valid: bool) -> None:
    if valid:
        body = {"messages": HI, "prompt": "x"} | body
    answer = httpx.post(address + path, content=json.dumps(body | {"max_tokens": 2}), timeout=60)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        refused(answer, answer.status_code)


def test_it_still_answers(address: str) -> None:
    with client(address) as openai:
        answer = openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].text == plain(PROMPT, max_new_tokens=8, do_sample=False)


def test_keys() -> None:
    with served(api_key="secret") as address:
        for key in ("wrong", "secret2", "geheim-ü"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert "API key" in refused(httpx.post(address + TEXT, headers=headers, json={"prompt": "x"}), 401)
        for header in ("secret", "Basic secret", "Bearer", ""):
            refused(httpx.post(address + TEXT, headers={"Authorization": header}, json={"prompt": "x"}), 401)
        for scheme in ("bearer", "BEARER", "Bearer "):  # a scheme is read in any case
            assert httpx.get(address + "/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200
        with client(address, "wrong") as openai, pytest.raises(AuthenticationError):
            openai.models.list()
        with client(address, "secret") as openai:
            assert openai.models.list().data[0].id == NAME
        assert httpx.get(f"{address}/health").status_code == 200

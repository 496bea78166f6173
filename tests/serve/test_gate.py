"""Who may ask, and bad requests: OpenAI's error shape, a 4xx status, and a server that goes on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from helpers.serving import NAME, PROMPT, bundled, client, plain, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AuthenticationError, BadRequestError, NotFoundError
from starlette.applications import Starlette
from starlette.routing import Mount

from lookahead.serve import Limits, application
from lookahead.serve.gate import Gate

pytestmark = pytest.mark.usefixtures("augmented")
OPEN, CLOSED = ("/health", "/"), ("/v1/models", "/metrics", "/v1/completions", "//v1/models", "/v1/models/", "/docs")


def asked(app: Any, method: str, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("how", ["alone", "FastAPI", "Starlette", "twice", "root path"])
def test_the_key_holds_wherever_the_application_is_mounted(how: str) -> None:
    app = application(*bundled(), NAME, api_key="secret")
    outer, prefix = app, ""
    if how in ("FastAPI", "twice"):
        outer, prefix = FastAPI(), "/llm"
        outer.mount("/llm", app)
    if how == "twice":
        outer, prefix = FastAPI(), "/a/llm"
        inner = FastAPI()
        inner.mount("/llm", app)
        outer.mount("/a", inner)
    elif how == "Starlette":
        outer, prefix = Starlette(routes=[Mount("/v1", app)]), "/v1"
    elif how == "root path":
        app.root_path, prefix = "/proxy", "/proxy"
    try:
        for path in CLOSED:
            for method in ("GET", "HEAD", "OPTIONS", "POST"):
                assert asked(outer, method, prefix + path).status_code == 401, (method, path)
                assert asked(outer, method, prefix + path, Authorization="Bearer wrong").status_code == 401
        for path in OPEN:
            assert asked(outer, "GET", prefix + path).status_code == 200, path
            assert asked(outer, "POST", prefix + path).status_code == 401
        for path in ("/v1/models", "/metrics"):
            assert asked(outer, "GET", prefix + path, Authorization="Bearer secret").status_code == 200
    finally:
        app.state.service.engine.close()


def test_other_scopes_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*given: Any) -> None:
        raise AssertionError("It was let through.")

    asyncio.run(Gate(never, None, 100)({"type": "websocket", "path": "/", "headers": []}, never, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


LOCAL = (
    "127.0.0.1:8000",
    "localhost",
    "LOCALHOST:1",
    "[::1]:8000",
    "192.168.7.9",
    "box:80",
    "x.localhost",
    "localhost.",
)
FOREIGN = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil.example.", "1.2.3.4.nip.io")


def status(host: str, origin: str | None = None, kind: str | None = "application/json", **given: Any) -> Any:
    """The status of a POST to an application that always says 200, and the error's code."""
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"code": null}}'})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": host, "origin": origin, "content-type": kind} | given.pop("headers", {})
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items() if value is not None]
    asyncio.run(Gate(inner, **{"api_key": None, "most_bytes": 100} | given)(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], httpx.Response(200, content=sent[1]["body"]).json()["error"]["code"]


def test_names_that_a_page_may_have_given_are_refused() -> None:
    assert {status(host) for host in LOCAL} == {(200, None)}
    assert {status(host) for host in FOREIGN} == {(403, "wrong_host")}
    assert status("chat.example:80", hosts=["chat.example"]) == status("evil.example", hosts=["*"]) == (200, None)
    key = {"authorization": "Bearer k"}
    assert status("chat.example", "https://other.example", api_key="k", headers=key) == (200, None)
    assert status("chat.example", api_key="k")[0] == 401


def test_pages_of_other_sites_are_refused() -> None:
    for host in LOCAL:
        assert status(host, f"http://{host}") == (200, None)
        for origin in ("null", "https://evil.example", "http://localhost:9", f"http://{host}.evil.example", host):
            assert status(host, origin)[1] == "wrong_origin" or origin == f"http://{host}"
    assert status("127.0.0.1:8000", "https://chat.example", hosts=["chat.example"]) == (200, None)


def test_other_types_than_json_are_refused() -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert status("localhost", kind=kind) == (415, "unsupported_media_type")
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8", None):
        assert status("localhost", kind=kind) == (200, None)


def test_refusals_say_what_was_expected() -> None:
    with served() as address:
        sent: Any = {"json": {"prompt": "x", "max_tokens": 1}}
        assert httpx.post(f"{address}/v1/completions", **sent).status_code == 200
        own = httpx.post(f"{address}/v1/completions", headers={"Origin": address}, **sent)
        assert own.status_code == 200
        for headers, told in (
            ({"Host": "evil.example"}, "expected localhost"),
            ({"Origin": "https://evil.example"}, "expected one of this server's own"),
            ({"Content-Type": "text/plain"}, "expected the header Content-Type: application/json"),
        ):
            error = httpx.post(f"{address}/v1/completions", headers=headers, **sent).json()["error"]
            assert told in error["message"] and error["type"] == "invalid_request_error"
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 403


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

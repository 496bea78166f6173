"""Who may ask: the key wherever the application is mounted, pages of other sites, names that they give, types."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from helpers.serving import NAME, bundled, served
from starlette.applications import Starlette
from starlette.routing import Mount

from lookahead.serve import application
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


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_other_types_than_json_are_refused(kind: str) -> None:
    assert status("localhost", kind=kind) == (415, "unsupported_media_type")


def test_json_passes() -> None:
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

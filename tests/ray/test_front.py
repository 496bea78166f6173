"""The front, before replicas that die, wait or are full when the test says so."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from lookahead.ray.front import AsgiRequest, Front, session_of
from lookahead.serve.gate import Gate

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Dead(Exception):
    pass


class Full(Exception):
    pass


def piece(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Stream:
    """What one replica does with a request: messages to say, an error to raise, or seconds to wait."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self._said = self._say(steps)
        self._failed: Exception | None = None
        self.cancelled = False

    async def _say(self, steps: Sequence[Any]) -> AsyncIterator[list[dict[str, Any]]]:
        for step in steps:
            if isinstance(step, Exception):
                self._failed = step
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    def __aiter__(self) -> Any:
        return self._said

    def cancel(self) -> None:
        self.cancelled = True
        if self._failed is not None:  # as Ray's streams do
            raise self._failed


class Replicas:
    """A handle whose requests end one after the other as ``scripts`` say."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.asked: list[AsgiRequest] = []
        self.streams: list[Stream] = []
        self.options_given: list[dict[str, Any]] = []

    def options(self, **given: Any) -> "Replicas":
        self.options_given.append(given)
        return self

    def remote(self, asked: AsgiRequest) -> Stream:
        self.asked.append(asked)
        self.streams.append(Stream(self.scripts[len(self.streams)]))
        return self.streams[-1]


class Asking:
    """One request to an ASGI application."""

    def __init__(self, body: bytes = b"{}", headers: Sequence[tuple[bytes, bytes]] = (), path: str = "/v1/x") -> None:
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "state": object()}
        self._given = [{"type": "http.request", "body": body}]
        self.leave = asyncio.Event()
        self.said: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._given:
            return self._given.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.said.append(message)

    @property
    def status(self) -> int:
        return int(self.said[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(message["body"] for message in self.said[1:])


def front(*scripts: Sequence[Any], timeout: float = 5.0) -> tuple[Front, Replicas]:
    replicas = Replicas(*scripts)
    return Front(replicas, timeout, ((Dead,), Full)), replicas


def ask(made: Callable[..., Any], **given: Any) -> Asking:
    async def asked() -> Asking:
        asking = Asking(**given)
        await made(asking.scope, asking.receive, asking.send)
        return asking

    return asyncio.run(asked())


WHOLE = [[START, piece(b"a")], [piece(b"b"), piece(b"", False)]]


def test_an_answer_passes_through() -> None:
    made, replicas = front(WHOLE)
    answer = ask(made, body=b'{"a": 1}', headers=[(b"x-session-id", b"me")])
    assert (answer.status, answer.text) == (200, b"ab")
    assert replicas.asked[0].body == b'{"a": 1}' and "state" not in replicas.asked[0].scope
    assert replicas.options_given[0]["session_id"] and made.idle


@pytest.mark.parametrize("before", [[Dead()], [[START], Dead()]])
def test_what_has_not_begun_goes_to_another_replica(before: Sequence[Any]) -> None:
    made, replicas = front(before, before, WHOLE)
    answer = ask(made)
    assert (answer.status, answer.text) == (200, b"ab")
    assert len(replicas.streams) == 3 and sum(message is START for message in answer.said) == 1


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    made, replicas = front([[START, piece(b"data: 1\n\n")], Dead()])
    answer = ask(made)
    begin, end = answer.text.split(b"\n\n", 1)
    assert begin == b"data: 1" and answer.said[-1]["more_body"] is False
    error = json.loads(end.removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_lost" and "not whole" in error["message"]
    assert len(replicas.streams) == 1


def test_a_request_that_kills_replicas_is_given_up() -> None:
    made, replicas = front(*[[Dead()]] * 9)
    answer = ask(made)
    assert answer.status == 503 and b"replica_lost" in answer.text and len(replicas.streams) == 4


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [([Full()], 429, b"queue_full"), ([3.0], 504, b"timeout"), ([[START], 3.0], 504, b"time")],
)
def test_refusals(script: Sequence[Any], status: int, code: bytes) -> None:
    made, replicas = front(script, timeout=0.1)
    answer = ask(made)
    assert answer.status == status and code in answer.text
    assert replicas.streams[0].cancelled


@pytest.mark.parametrize(("begun", "status"), [([], 500), ([[START, piece(b"data: 1\n\n")]], 200)])
def test_other_failures_have_the_shape_of_errors(
    begun: Sequence[Any], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = front([*begun, RuntimeError("secret")])
    answer = ask(made)
    told = json.loads(answer.text.rpartition(b"data: ")[2])["error"]
    assert (answer.status, told["code"], told["type"]) == (status, "internal_error", "server_error")
    assert "secret" not in told["message"] and "secret" in caplog.text and made.idle


def test_large_bodies_are_refused_before_a_replica_is_asked() -> None:
    made, replicas = front(WHOLE)
    assert ask(Gate(made, None, 1024), body=b"x" * 2000).status == 413
    assert not replicas.asked


def test_a_client_that_leaves_ends_its_request() -> None:
    made, replicas = front([[START, piece(b"a")], 30.0])

    async def leave() -> Asking:
        asking = Asking()
        task = asyncio.ensure_future(made(asking.scope, asking.receive, asking.send))
        while not asking.said:
            await asyncio.sleep(0.001)
        asking.leave.set()
        await task
        return asking

    assert asyncio.run(leave()).text == b"a"
    assert replicas.streams[0].cancelled and made.idle


def test_it_stops() -> None:
    made, _ = front([[START, piece(b"a")], 30.0], WHOLE)

    async def stop() -> tuple[Asking, Asking]:
        asking, late = Asking(), Asking()
        task = asyncio.ensure_future(made(asking.scope, asking.receive, asking.send))
        while not asking.said:
            await asyncio.sleep(0.001)
        made.refuse()
        await made(late.scope, late.receive, late.send)
        assert not made.idle
        made.cut()
        await task
        return asking, late

    cut, late = asyncio.run(stop())
    assert late.status == 503 and b"shutting_down" in late.text
    assert cut.text.startswith(b"adata: ") and b"shutting_down" in cut.text and made.idle


def session(body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> str:
    return session_of(AsgiRequest({"headers": headers}, json.dumps(body).encode()))


def test_requests_of_one_conversation_share_a_session() -> None:
    system, first = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    more = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    begin = session({"messages": [system, first]})
    assert begin and session({"messages": [system, first, *more]}) == begin
    assert session({"messages": [system, more[1]]}) != begin != session({"messages": [first]})
    assert session({"prompt_cache_key": "k"}) == session({"prompt_cache_key": "k", "prompt": "x"}) != ""
    assert session({}, [(b"X-Session-Id", b"1")]) == session({"messages": [first]}, [(b"x-session-id", b"1")])


@pytest.mark.parametrize("body", [[], 3, {}, {"messages": 3}, {"messages": ["x"]}, {"messages": [{}]}, {"prompt": "x"}])
def test_what_is_of_no_conversation(body: Any) -> None:
    assert session(body) == ""
    assert session_of(AsgiRequest({"headers": []}, b"{")) == ""

"""The front: an ASGI application that gives each request to a replica, and to another one if that replica dies.

Nothing is sent to a client before a replica has written a first piece of its answer. Until then, a request whose
replica dies begins again with another one; from then on, its stream ends with an error that says so::

    client       front              replica 1        replica 2
      | ---------> | ----------------> |
      |            |                   x dies
      |            | ------------------------------------> |
      | <--------- | <------------------------------------ |  the first piece
      | <--------- | <------------------------------------ x  dies: an error ends the stream

Requests of one conversation go to one replica, which has kept its keys and values: by the header ``X-Session-Id``, else
by the body's ``prompt_cache_key``, else by what the conversation begins with.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from lookahead.ray.cluster import ray_of
from lookahead.serve.errors import ApiError, give_up, internal_error, shutting_down
from lookahead.serve.gate import Receive, Scope, Send, body_of, refuse
from lookahead.serve.metrics import METRICS_TYPE, merged

log = logging.getLogger("lookahead.ray")
_TRIES = 4  # replicas that one request may outlive: it may be what kills them
_PAUSE = 0.1  # seconds before the next one is asked, in which the dead one becomes known


@dataclass(frozen=True)
class AsgiRequest:
    """A request as it travels to a replica: its ASGI scope, and its whole body."""

    scope: dict[str, Any]
    body: bytes


Errors = tuple[tuple[type[BaseException], ...], type[BaseException]]  # the replica is gone, no replica has room


class Front:
    """Forwards requests to replicas.

    Args:
        replicas: the handle of a deployment of :class:`lookahead.ray.replicas.Replica`.
        timeout: seconds that a request may wait for its first bytes.
        errors: of the handle; None = Ray's.
        client_timeout: seconds that a client may take to send its body.
    """

    def __init__(
        self, replicas: Any, timeout: float = 600.0, errors: Errors | None = None, client_timeout: float = 60.0
    ) -> None:
        self._replicas, self._timeout, self._client_timeout = replicas, timeout, min(timeout, client_timeout)
        if errors is None:
            ray = ray_of()
            gone = ray.exceptions.RayActorError, ray.serve.exceptions.ReplicaUnavailableError
            errors = gone, ray.serve.exceptions.BackPressureError
        self._dead, self._full = errors
        self._under_way: dict[asyncio.Task[None], asyncio.AbstractEventLoop] = {}
        self._closing = self._cut = False

    # What the server asks when it is told to stop.

    @property
    def idle(self) -> bool:
        """True if no request is under way."""
        return not self._under_way

    def refuse(self) -> None:
        """Take no more requests; those that were taken go on."""
        self._closing = True

    def cut(self) -> None:
        """End what is under way; each client is told that the server stops."""
        self._closing = self._cut = True
        for task, loop in list(self._under_way.items()):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        client = _Client(receive, send)
        try:
            if self._closing:
                raise shutting_down()
            asked = AsgiRequest(_plain(scope), await body_of(Request(scope, receive), self._client_timeout))
            if scope["path"] == "/metrics":
                text = merged(await self._replicas.broadcast("metrics").results_async())
                await PlainTextResponse(text, media_type=METRICS_TYPE)(scope, receive, client.send)
                return
            task, gone = asyncio.ensure_future(self._forward(asked, client)), asyncio.ensure_future(client.gone())
            self._under_way[task] = asyncio.get_running_loop()
            try:
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if task.done() or client.ended:
                    await task
            finally:
                del self._under_way[task]
                give_up(task)
                gone.cancel()
        except ApiError as error:
            await client.end(error)
        except asyncio.CancelledError:
            if not self._cut:
                raise
            await client.end(shutting_down())
        except Exception as error:
            log.error("A request failed.", exc_info=error)
            await client.end(internal_error())

    async def _forward(self, asked: AsgiRequest, client: "_Client") -> None:
        end = asyncio.get_running_loop().time() + self._timeout
        handle = self._replicas.options(method_name="answer", stream=True, session_id=session_of(asked))
        for _ in range(_TRIES):
            try:
                await self._pass_on(handle.remote(asked), client, end)
                return
            except self._dead:
                log.warning("A replica is gone. Its request %s.", "was cut" if client.begun else "goes to another one")
                if client.begun:
                    break
                await asyncio.sleep(_PAUSE)
        told = "The replica that wrote this answer is gone. " + (
            "What was streamed of it is right, but not whole: ask again."
            if client.begun
            else f"So are {_TRIES - 1} others that were asked for it."
        )
        raise ApiError(told, 503, code="replica_lost", headers={"Retry-After": "1"})

    async def _pass_on(self, stream: Any, client: "_Client", end: float) -> None:
        """Send what a replica says, the first of it before ``end``."""
        try:
            async with asyncio.timeout_at(None if client.begun else end) as limit:
                async for messages in stream:
                    limit.reschedule(None)
                    for message in messages:
                        await client.send(message)
                    limit.reschedule(None if client.begun else end)
        except TimeoutError as error:
            raise ApiError("No replica has answered in time.", 504, code="timeout") from error
        except self._full as error:
            told = "All replicas are busy, and the queue is full. Try again later."
            raise ApiError(told, 429, code="queue_full", headers={"Retry-After": "1"}) from error
        finally:
            with suppress(Exception):  # where the stream has failed, Ray raises its error once more
                stream.cancel()


class _Client:
    """The other side: what was sent to it, and how an error is told from here on."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._start: MutableMapping[str, Any] | None = None  # kept back until there is something after it
        self.begun = self.ended = False

    async def gone(self) -> None:
        """Ends when the client does."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start, self.begun = self._start, None, True
            await self._send(start)
        self.ended = not message.get("more_body", False)
        await self._send(message)

    async def end(self, error: ApiError) -> None:
        """Tell an error: as the answer, or as the last event of the one that has begun."""
        if not self.begun:
            await refuse(self._send, error)
        elif not self.ended:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _plain(scope: Scope) -> dict[str, Any]:
    """Part of a scope that can travel."""
    names = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
    found = {name: scope[name] for name in (*names, "client", "server") if name in scope}
    return found | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]]}


def session_of(asked: AsgiRequest) -> str:
    """Key that the requests of one conversation share; empty where a request is of none."""
    for name, value in asked.scope["headers"]:
        if name.lower() == b"x-session-id":
            return "id " + hashlib.sha256(value).hexdigest()
    try:
        body = json.loads(asked.body or b"{}")
        if isinstance(key := body.get("prompt_cache_key"), str):
            return "key " + hashlib.sha256(key.encode()).hexdigest()
        begin = []
        for message in body.get("messages", []):
            begin.append(message)
            if message["role"] == "user":
                return "begin " + hashlib.sha256(json.dumps(begin).encode()).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # the replica says what is wrong
    return ""

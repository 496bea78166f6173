"""Checks before every request: the API key, where it comes from, and the type, size and reading of the body."""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from lookahead.serve.errors import ApiError, client_left

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Names that no page has given to this machine: addresses, and names without a dot, which nobody on the Internet owns.
_LOCAL = re.compile(r"[^.]*|[\d.]+|\[[\da-f:.]*\]|.*\.localhost")
_OPEN = ("", "/", "/health")  # paths that ask for no key


class Gate:
    """ASGI middleware: who may ask, from where, and how much. Other scopes than HTTP's are refused.

    Args:
        api_key: what every path but the page and ``/health`` asks for, compared in constant time; None = nothing, and
            then a page of another site that the user has open is refused.
        most_bytes: of a body.
        hosts: names by which the server is called, and hosts of pages that may ask; ``*`` = all.
    """

    def __init__(self, app: Any, api_key: str | None, most_bytes: int, hosts: Sequence[str] = ()) -> None:
        self._app, self._most = app, most_bytes
        self._key = None if api_key is None else api_key.encode()
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": f"{scope['type']}.close", "code": 1008})
        elif (error := self._refusal(scope)) is not None:
            await refuse(send, error)
        else:
            await self._app(scope, self._counted(receive), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._key is None:
            error = self._foreign(*(headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin")))
            if error is not None:
                return error
        elif not (scope["method"] in ("GET", "HEAD") and _path(scope) in _OPEN):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.lstrip(b" "), self._key):
                told = "The API key is missing or wrong: expected the header Authorization: Bearer KEY."
                return ApiError(told, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            told = f"The body is {kind.decode('latin-1')[:100]!r}: expected the header Content-Type: application/json."
            return ApiError(told, 415, code="unsupported_media_type")
        length = headers.get(b"content-length", b"0")
        fits = length.isdigit() and len(length) < 20 and int(length) <= self._most
        return None if fits else self._too_large()

    def _foreign(self, host: str, origin: str) -> ApiError | None:
        """Refuse a page of another site, also one that calls this machine by the site's own name."""
        name, asking = _name(host), origin.partition("://")[2]
        if "*" not in self._hosts and not (_LOCAL.fullmatch(name) or name in self._hosts):
            told, code = f"The server is not called {name[:100]!r}: expected localhost or its IP address.", "wrong_host"
        elif origin and "*" not in self._hosts and asking.lower() != host.lower() and _name(asking) not in self._hosts:
            told, code = f"A page of {origin[:100]!r} may not ask: expected one of this server's own.", "wrong_origin"
        else:
            return None
        return ApiError(f"{told} lookahead serve --allowed-host NAME allows another.", 403, code=code)

    def _too_large(self) -> ApiError:
        return ApiError(f"The body is larger than {self._most} bytes.", 413, code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a stated length are counted as they come."""
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise self._too_large()
            return message

        return counted


async def body_of(request: Request, seconds: float) -> bytes:
    """A request's whole body; an :class:`ApiError` where it does not come in time, or its client leaves before."""
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except ClientDisconnect as error:
        raise client_left() from error
    except TimeoutError as error:
        told = f"The body was not complete after {seconds:g} seconds."
        raise ApiError(told, 408, code="timeout", headers={"Connection": "close"}) from error


async def refuse(send: Send, error: ApiError) -> None:
    """Answer by an error."""
    answer = JSONResponse(error.body(), error.status, error.headers | {"Connection": "close"})
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body})


def _path(scope: Scope) -> str:
    """The path within the application, as its routes see it, wherever it is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    inside = path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/")
    return path[len(root) :] if inside else path


def _name(host: str) -> str:
    """A host without its port, in small letters."""
    return re.sub(r":\d*$", "", host).lower().removesuffix(".")

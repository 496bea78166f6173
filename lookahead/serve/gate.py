"""What stands before every request: the API key, and the size of the body."""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lookahead.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TooLarge(ApiError):
    """A body beyond the limit."""

    def __init__(self, most: int) -> None:
        super().__init__(f"The body is larger than {most} bytes.", 413, code="body_too_large")


class Gate:
    """ASGI middleware; the key, if there is one, guards ``/v1``, and is compared in constant time."""

    def __init__(self, app: Any, api_key: str | None, most_bytes: int) -> None:
        self._app, self._most = app, most_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._key is not None and scope["path"].startswith("/v1"):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.lstrip(b" "), self._key):
                told = "The API key is missing or wrong: expected the header Authorization: Bearer KEY."
                kinds = {"kind": "authentication_error", "code": "invalid_api_key"}
                await refuse(send, ApiError(told, 401, headers={"WWW-Authenticate": "Bearer"}, **kinds))
                return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) <= self._most:
            await self._app(scope, self._counted(receive), send)
        else:
            await refuse(send, TooLarge(self._most))

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a stated length are counted as they come."""
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise TooLarge(self._most)
            return message

        return counted


async def refuse(send: Send, error: ApiError) -> None:
    """Answer by an error."""
    body = json.dumps(error.body()).encode()
    named = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers = [(name.lower().encode(), value.encode()) for name, value in (named | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

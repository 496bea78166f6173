"""Refusals in the shape of OpenAI's errors."""

import asyncio
from typing import Any

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused: an HTTP status, and what to tell."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON document of the answer."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def shutting_down() -> ApiError:
    """Error that is told while the server stops."""
    return ApiError("The server is shutting down.", 503, code="shutting_down", headers={"Retry-After": "5"})


def internal_error() -> ApiError:
    """Error that is told where the fault is the server's, and the reason stands in its log alone."""
    return ApiError("The server failed to answer. Its log says why.", 500, code="internal_error")


def client_left() -> ApiError:
    """Error of a request whose client has closed its connection: nobody waits for the answer any more."""
    return ApiError("The client left before it was answered.", 499, code="cancelled")


def give_up(task: asyncio.Task[Any]) -> None:
    """End what nobody waits for any more; asyncio would log its error."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())

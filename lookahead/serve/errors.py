"""Refusals in the shape of OpenAI's errors, and clients that have left."""

import asyncio
from typing import Any


class ApiError(Exception):
    """A request that is refused: an HTTP status, and what to tell."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.headers = status, kind, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON document of the answer."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def shutting_down() -> ApiError:
    """Error that is told while the server stops."""
    told, headers = "The server is shutting down.", {"Retry-After": "5"}
    return ApiError(told, 503, kind="server_error", code="shutting_down", headers=headers)


def internal_error() -> ApiError:
    """Error that is told where the fault is the server's, and the reason stands in its log alone."""
    told = "The server failed to answer. Its log says why."
    return ApiError(told, 500, kind="server_error", code="internal_error")


class ClientLeft(Exception):
    """The client has closed its connection."""


def give_up(task: asyncio.Task[Any]) -> None:
    """End what nobody waits for any more; asyncio would log its error."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())

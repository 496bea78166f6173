"""Running the application in this process until it is told to stop, which lets requests under way finish."""

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from time import monotonic, sleep
from types import FrameType
from typing import Any, Protocol

from jacobi import LookaheadError

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise LookaheadError('The server needs uvicorn: pip install "lookahead-decoding[serve]".') from error

_LOOKS = 0.05  # seconds between two looks at whether the engine is idle
_LAST_BYTES = 5  # seconds for what was written to reach the clients


class Drains(Protocol):
    """Requests that a server waits for before it stops: of the engine of an application, or a front of replicas."""

    @property
    def idle(self) -> bool: ...

    def refuse(self) -> None: ...

    def cut(self) -> None: ...


def check_address(host: str, port: int) -> None:
    """Refuse an address on which this process cannot listen, before a model is loaded for it."""

    async def listen() -> None:
        async with await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port):
            pass

    try:
        asyncio.run(listen())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        told = f"--host {host} --port {port}: nothing can be served there ({reason})."
        raise LookaheadError(f"{told} Name another address, or end what listens at this one.") from error


class Patient(H11Protocol):
    """A connection that is cut where its client takes more than ``most_s`` seconds (at most twice as many) to send the
    head of a request, or to read something of what was written."""

    most_s = 60.0
    _look: asyncio.TimerHandle | None = None
    _reads = 0  # times that the client has made room again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again(None)

    def _look_again(self, before: tuple[object, int] | None) -> None:
        waits = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        now = (self.cycle, self._reads) if waits else None
        if now is not None and now == before:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(self.most_s, self._look_again, now)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads += 1

    def connection_lost(self, error: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(error)


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT. From then on new requests get 503, while those under way, and those that wait,
    have ``grace`` seconds; then it stops, and what is left is cut off. A second signal stops it at once. ``begun`` is
    called with the port when requests are taken; ``client_timeout`` is that of :class:`Patient`."""

    def __init__(
        self,
        application: Any,
        engine: Drains,
        *,
        host: str,
        port: int,
        log_level: str = "info",
        grace: float = 30.0,
        client_timeout: float = 60.0,
        begun: Callable[[int], None] | None = None,
    ) -> None:
        http = type("Protocol", (Patient,), {"most_s": client_timeout})
        config = uvicorn.Config(application, host=host, port=port, log_level=log_level, ws="none", http=http)
        config.server_header = False
        config.timeout_graceful_shutdown = _LAST_BYTES
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._begun = begun
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        gc.freeze()  # looking through a model's objects for garbage takes longer than a client should wait
        await super().startup(sockets)
        if self._begun is not None and self.started:
            self._begun(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping:
            self.force_exit = self.should_exit = True
            return
        self._stopping = True
        # A signal may come while this very thread holds the engine's lock: another thread has to ask for it.
        threading.Thread(target=self._drain, name="lookahead-drain", daemon=True).start()

    def _drain(self) -> None:
        self._engine.refuse()
        end = monotonic() + self._grace
        while not self._engine.idle and monotonic() < end:
            sleep(_LOOKS)
        self._engine.cut()
        self.should_exit = True

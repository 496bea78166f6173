"""The ASGI application: routes, streams, and what becomes of a client that leaves."""

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from jacobi import LookaheadError

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise LookaheadError('The server needs FastAPI: pip install "lookahead-decoding[serve]".') from error

from lookahead._version import __version__
from lookahead.chat_format import context_of
from lookahead.generation.memories import learning
from lookahead.patch import augment_all
from lookahead.serve.engine import Engine
from lookahead.serve.errors import ApiError, client_left, give_up, internal_error
from lookahead.serve.gate import Gate, body_of
from lookahead.serve.jobs import Answer, Job, Piece
from lookahead.serve.metrics import METRICS_TYPE, Metrics
from lookahead.serve.plans import Limits, RequestPlan, RequestPlanner
from lookahead.serve.shapes import Shape
from lookahead.strategies.automatic import AutomaticStrategy
from lookahead.strategies.lookahead import Lookahead

log = logging.getLogger("lookahead.serve")
_PAGE = Path(__file__).with_name("chat.html")
_T = TypeVar("_T")
_READERS = 4  # bodies that are read at a time: each thread that is busy makes the loop wait for its turn
_LOOKS = 0.1  # seconds between two looks at whether a client is still there


class Service:
    """One model behind an application."""

    def __init__(self, engine: Engine, planner: RequestPlanner, name: str, limits: Limits) -> None:
        self.engine, self.planner, self.name, self.limits = engine, planner, name, limits
        self.metrics = Metrics(name, lambda: engine.running, lambda: engine.waiting)
        self._reading = asyncio.Semaphore(_READERS)

    async def complete(self, request: Request, chat: bool) -> Response:
        """Answer a request of either kind."""
        raw = await body_of(request, min(self.limits.timeout, self.limits.client_timeout))
        async with self._reading:
            plan = await run_in_threadpool(self.planner.plan, raw, chat, self.name)
        shape = Shape(self.name, self.engine.tokenizer, plan, chat)
        with ExitStack() as unheard:
            running = _Running(self, plan, request.client.host if request.client else "")
            unheard.callback(running.drop)
            if plan.request.stream:
                first = await _while_there(request, running.next())  # a call that is refused is told by its status
                unheard.pop_all()
                chunks = _chunks(running, shape, first)
                return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            answers = await _while_there(request, running.all())
        return Response(await run_in_threadpool(_json, shape.whole, answers), media_type="application/json")


async def _while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, unless the client leaves before."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_LOOKS))[0]:
            if await request.is_disconnected():
                raise client_left()
        return task.result()
    finally:
        give_up(task)


class _Running(Job):
    """A job as the event loop sees it."""

    def __init__(self, service: Service, plan: RequestPlan, address: str) -> None:
        super().__init__(plan, self._hear, address)
        self._service, self._asked = service, perf_counter()
        self._events: asyncio.Queue[Piece | Answer | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._told = False
        service.engine.submit(self)

    def _hear(self, event: Piece | Answer | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed, so nobody listens
            self.cancel()

    async def next(self) -> Piece | Answer | None:
        """Next piece; None when all answers are done."""
        left = self._service.limits.timeout - (perf_counter() - self._asked)
        try:
            event = await asyncio.wait_for(self._events.get(), max(0.0, left))
        except TimeoutError as error:
            told = f"The request took longer than {self._service.limits.timeout:g} seconds."
            raise ApiError(told, 504, code="timeout") from error
        metrics, passed = self._service.metrics, perf_counter() - self._asked
        if isinstance(event, Answer):
            metrics.count(event)
        elif event is None:
            metrics.latency.observe(passed)
        elif isinstance(event, BaseException):
            raise _refusal(event) from event
        elif not self._told:
            self._told = True
            metrics.first_token.observe(passed)
        return event

    async def all(self) -> list[Answer]:
        """The answers when they are done."""
        while await self.next() is not None:
            pass
        return self.answers

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self._service.engine.drop(self)


async def _chunks(running: _Running, shape: Shape, event: Piece | Answer | None) -> AsyncIterator[str]:
    """The events of a stream. Log probabilities are known at the end, so with them an answer comes as one chunk."""
    opened, gathers = set[int](), shape.plan.logprobs is not None
    try:
        while event is not None:
            if event.index not in opened:
                opened.add(event.index)
                yield _event(shape.begin, event.index)
            if isinstance(event, Answer):
                yield await run_in_threadpool(_event, shape.end, event, event.text if gathers else None)
            elif not gathers and (chunk := shape.piece(event)):
                yield _event(dict, chunk)
            event = await running.next()
        if shape.plan.request.stream_options.include_usage:
            yield _event(shape.last, running.answers)
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body)
    finally:
        running.drop()


def _event(make: Callable[..., dict[str, Any]], *given: Any) -> str:
    """An event in ASCII: clients may take other characters for the end of a line."""
    return f"data: {_json(make, *given)}\n\n"


def _json(make: Callable[..., dict[str, Any]], *given: Any) -> str:
    """A document in ASCII, made in steps, between which other threads run."""
    return "".join(json.JSONEncoder().iterencode(make(*given)))


def _refusal(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), error.status_code, headers=dict(error.headers or {}))
    if isinstance(error, LookaheadError):
        return ApiError(str(error))
    log.error("A request failed.", exc_info=error)
    return internal_error()


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = _refusal(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


def application(
    model: Any,
    tokenizer: Any,
    name: str,
    *,
    strategy: AutomaticStrategy | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] = (),
    template: str | None = None,
    prefix_mib: int = 1024,
    rows: int = 16,
    memory: bool = True,
    learn: bool | Path = False,
) -> FastAPI:
    """An ASGI application that answers OpenAI's chat and text completions with one model.

    Args:
        name: what the model is called in requests.
        strategy: how requests are decoded that do not say ``"use_lookahead": false``; None is the automatic mode.
        limits: of contexts, bodies, queue and time; None = the model's context, and defaults.
        api_key: what all but the page and ``/health`` ask for; None = nothing.
        hosts: names by which the application may be called without a key, beside localhost, IP addresses and names
            without a dot; ``*`` = all.
        template: a Jinja chat template in place of the tokenizer's.
        prefix_mib: MiB of keys and values kept for texts with a common beginning; 0 = none.
        rows: answers that are written at a time, which share passes.
        memory: False = nothing of a request is remembered for others: no keys and values, no recycled tokens.
        learn: at the end, add what the model has answered to this memory's file, or, True, the one in the cache folder.
            False = nothing of requests and answers is kept.

    Raises:
        LookaheadError: FastAPI is not installed, or the model cannot be decoded by ``generate``.
    """
    augment_all()
    limits, strategy = limits or Limits(context=context_of(model)), strategy or Lookahead()
    strategy = replace(strategy, remember=strategy.remember and memory)
    engine = Engine(model, tokenizer, strategy, limits.queue, (prefix_mib << 20) * memory, rows)
    service = Service(engine, RequestPlanner(model, tokenizer, limits, template), name, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        file = learn if isinstance(learn, Path) else None
        with learning(model, file) if learn else nullcontext():
            yield
            engine.cut()  # what is still under way has no client any more
            await run_in_threadpool(engine.close)

    handlers: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, LookaheadError, Exception), _refuse)
    app = FastAPI(
        title="lookahead", version=__version__, lifespan=lifespan, openapi_url=None, exception_handlers=handlers
    )
    app.state.service = service
    app.add_middleware(Gate, api_key=api_key, most_bytes=limits.body, hosts=hosts)
    card = {"id": service.name, "object": "model", "created": 0, "owned_by": "lookahead"}

    for path, chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
        app.add_route(path, partial(service.complete, chat=chat), methods=["POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.name:
            raise ApiError(f"The model {name[:100]!r} does not exist here.", 404, code="model_not_found")
        return JSONResponse(card)

    @app.get("/health")
    async def health() -> Response:
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=METRICS_TYPE)

    page = _PAGE.read_text(encoding="utf-8")
    # The page may run its own script and style, and ask this server; nothing else.
    policy = ["default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"]
    policy.append("frame-ancestors 'none'")
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        sums = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        policy.append(" ".join([kind, *(f"'sha256-{each}'" for each in sums)]))
    safe = {"Content-Security-Policy": "; ".join(policy), "X-Content-Type-Options": "nosniff"}

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers=safe)

    return app

"""A replica: the server's application in a process of Ray's, asked over ASGI messages; and batches on Ray Data."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jacobi import LookaheadError
from lookahead.ray.cluster import ray_of, share
from lookahead.ray.front import AsgiRequest, Front
from lookahead.serve.batches import Answerer, Line, Outcome
from lookahead.serve.gate import Gate

log = logging.getLogger("lookahead.ray")
AsgiMessage = dict[str, Any]
_LAST_WORDS = 5.0  # seconds that the application has to end a request nobody waits for
_ROUNDS = 4  # times that a replica's rows are filled by one task: fewer lose less to a kill, more waste less at its end


class Replica:
    """One process with a model.

    Args:
        make: makes the application (:func:`lookahead.serve.application`), in the replica's process.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._application = make()
        self._service = self._application.state.service

    async def answer(self, asked: AsgiRequest) -> AsyncIterator[list[AsgiMessage]]:
        """The application's ASGI messages, in lists of what is at hand."""
        messages: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()
        left = asyncio.Event()
        body = [asked.body]

        async def receive() -> AsgiMessage:
            if body:
                return {"type": "http.request", "body": body.pop()}
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._application(dict(asked.scope), receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            going = True
            while going:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                going = found[-1] is not None
                if told := [message for message in found if message is not None]:
                    yield told
        finally:
            left.set()
            await asyncio.wait({task}, timeout=_LAST_WORDS)
            task.cancel()
            with suppress(asyncio.CancelledError):
                if task.done() and (error := task.exception()) is not None:
                    log.error("A request failed.", exc_info=error)

    def check_health(self) -> None:
        """Health check that Ray runs now and then; a replica that does not answer, or raises, is replaced."""
        if not self._service.engine.alive:
            raise RuntimeError("The engine's thread has ended.")

    def metrics(self) -> str:
        """Text of this replica's ``/metrics``."""
        return self._service.metrics.text().decode()

    def __del__(self) -> None:
        if hasattr(self, "_service"):  # else the application was never made
            self._service.engine.cut()
            self._service.engine.close()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Number of replicas, and what each takes.

    Attributes:
        replicas: at least.
        most: at most; between the two Ray follows the load. None = as many as at least.
        rows: requests that a replica is given at a time; others wait in the front.
        queue: requests that wait there; further ones are told to come back.
        grace: seconds that a replica has for what it has begun, before it is stopped.
        resources: Ray's ``ray_actor_options`` of a replica; None = an even part of the cluster.
    """

    replicas: int = 2
    most: int | None = None
    rows: int = 16
    queue: int = 32
    grace: float = 30.0
    resources: dict[str, Any] | None = None
    period: float = field(default=5.0, repr=False)  # seconds between two looks at a replica's health

    def check(self) -> None:
        if self.replicas < 1 or (self.most is not None and self.most < self.replicas):
            told = "expected at least one, and no fewer at most than at least."
            raise LookaheadError(f"replicas={self.replicas} to {self.most or self.replicas}: {told}")


def _deployment(ray: Any, make: Callable[[], Any], scale: Scale) -> Any:
    scale.check()
    many: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.most is not None and scale.most > scale.replicas:
        # A replica more where the rows of those that are there are nearly all taken.
        limits = {"min_replicas": scale.replicas, "max_replicas": scale.most}
        many = {"autoscaling_config": limits | {"target_ongoing_requests": max(1.0, 0.75 * scale.rows)}}
    router = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    deployment = ray.serve.deployment(
        Replica,
        name="replicas",
        ray_actor_options=scale.resources,
        max_ongoing_requests=scale.rows,
        max_queued_requests=scale.queue,
        graceful_shutdown_timeout_s=scale.grace,
        health_check_period_s=scale.period,
        request_router_config=ray.serve.config.RequestRouterConfig(
            request_router_class=router,
            request_router_kwargs={"num_fallback_replicas": (scale.most or scale.replicas) - 1},
        ),
        logging_config={"enable_access_log": False},
        **many,
    )
    return deployment.bind(make)


def started(ray: Any, make: Callable[[], Any], scale: Scale, name: str = "lookahead") -> Any:
    """Start replicas under an application's name, without any proxy of Ray's; gives the handle for a :class:`Front`.

    Raises:
        LookaheadError: the replicas do not start; Ray's reason is in it.
    """
    if scale.resources is None:
        scale = replace(scale, resources=share(ray, scale.most or scale.replicas))
    ray.serve.start(proxy_location="Disabled")
    try:
        return ray.serve.run(_deployment(ray, make, scale), name=name, route_prefix=None)
    except RuntimeError as error:
        raise LookaheadError(f"The replicas did not start: {error}") from error


def stopped(ray: Any, name: str = "lookahead") -> None:
    """Let replicas finish what they have begun, and stop them."""
    ray.serve.delete(name)


def bound(
    make: Callable[[], Any],
    *,
    body: int = 8 << 20,
    timeout: float = 600.0,
    api_key: str | None = None,
    hosts: Sequence[str] = (),
    **scale: Any,
) -> Any:
    """Front and replicas as one application for ``serve run`` and ``serve deploy``, behind Ray's own proxy.

    Args:
        make: makes the application (:func:`lookahead.serve.application`) in each replica.
        body: most bytes of a request.
        timeout: seconds that a request may wait for its first bytes.
        api_key, hosts: as :func:`lookahead.serve.application` has them; give it the same.
        scale: fields of :class:`Scale`.
    """
    ray = ray_of()

    def front() -> Any:
        name = ray.serve.get_replica_context().app_name
        return Gate(Front(ray.serve.get_deployment_handle("replicas", name), timeout), api_key, body, hosts)

    class Ingress:
        def __init__(self, replicas: Any) -> None: ...

    inner = _deployment(ray, make, Scale(**scale))
    ingress = ray.serve.ingress(front)(Ingress)
    settings: dict[str, Any] = {"name": "front", "max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}
    return ray.serve.deployment(ingress, **settings).bind(inner)


class _Actor:
    """A replica: answers the lines of one task after the other."""

    def __init__(self, make: Callable[[], Answerer]) -> None:
        self._answerer = make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        lines = [Line(**json.loads(text)) for text in batch["line"]]
        return {"outcome": [json.dumps(vars(outcome)) for outcome in self._answerer.answer(lines)]}

    def __del__(self) -> None:
        if hasattr(self, "_answerer"):
            self._answerer.close()


def answered(
    ray: Any,
    make: Callable[[], Answerer],
    lines: Sequence[Line],
    replicas: int,
    rows: int = 16,
    resources: dict[str, Any] | None = None,
) -> Iterator[Outcome]:
    """Outcomes of requests, in the order in which tasks end. A task whose replica dies is done again by another
    one; nothing of it has been told before.

    Args:
        ray: the module, connected (:func:`lookahead.ray.cluster.connected`).
        make: makes what answers, in each replica's process.
        replicas: processes with a model.
        rows: answers that each of them writes at a time.
        resources: ``num_cpus`` and ``num_gpus`` of each; None = an even part of the cluster.
    """
    size = max(1, min(_ROUNDS * rows, -(-len(lines) // (2 * replicas))))
    tasks = -(-len(lines) // size)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    texts = [{"line": json.dumps(vars(line))} for line in lines]
    found = ray.data.from_items(texts, override_num_blocks=tasks).map_batches(
        _Actor,
        fn_constructor_args=(make,),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        **(share(ray, replicas) if resources is None else resources),
    )
    for row in found.iter_rows():
        yield Outcome(**json.loads(row["outcome"]))

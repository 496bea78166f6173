"""Requests of a batch, answered by one engine in OpenAI's batch format, in the order in which they end."""

import json
import queue
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jacobi import LookaheadError
from lookahead.chat_format import context_of
from lookahead.patch import augment_all
from lookahead.serve.engine import Engine
from lookahead.serve.errors import ApiError
from lookahead.serve.jobs import Answer, Job, Piece
from lookahead.serve.plans import Limits, RequestPlanner
from lookahead.serve.shapes import Shape

_REQUEST = "batch_req_"
BEGIN = f'{{"id": "{_REQUEST}'  # of every record as JSON


@dataclass(frozen=True)
class Line:
    """A request of a file.

    Attributes:
        number: of the line, from 1.
        chat: a conversation; else a completion.
        body: as in a request to the server.
    """

    number: int
    custom_id: str
    chat: bool
    body: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Outcome of the request of line ``number``: a record of OpenAI's batch output, or why it was refused."""

    number: int
    custom_id: str | None = None
    record: dict[str, Any] | None = None
    error: str | None = None


class Answerer(Engine):
    """An engine that answers batches with one model; :meth:`close` ends its thread, and what is under way.

    Args:
        name: what answers call the model.
        new_tokens: of a chat answer, where a request does not say.
        rows: answers that are written at a time.
        prefix_mib: MiB of keys and values kept for requests with a common beginning; 0 = none.
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str, *, new_tokens: int = 1024, rows: int = 16, prefix_mib: int = 1024
    ) -> None:
        augment_all()
        self._planner = RequestPlanner(model, tokenizer, Limits(context=context_of(model), new_tokens=new_tokens))
        self._most = 2 * rows  # asked for at a time: the next ones wait at hand
        self._name = name
        super().__init__(model, tokenizer, most_waiting=self._most, prefix_bytes=prefix_mib << 20, rows=rows)

    def close(self) -> None:
        self.cut()
        super().close()

    def answer(self, lines: Iterable[Line]) -> Iterator[Outcome]:
        """Answer requests, or refuse them, one after the other as they end. Any other error ends the batch."""
        told: queue.Queue[tuple[int, Any]] = queue.Queue()
        waiting, asked = deque(lines), dict[int, tuple[Line, Job | None]]()
        while waiting or asked:
            while waiting and len(asked) < self._most:
                line, job = waiting.popleft(), None
                try:
                    plan = self._planner.plan(json.dumps(line.body).encode(), line.chat, name=self._name)
                    job = Job(plan, partial(lambda number, event: told.put((number, event)), line.number))
                    self.submit(job)
                except (ApiError, LookaheadError) as error:
                    told.put((line.number, error))
                asked[line.number] = line, job
            number, event = told.get()
            if isinstance(event, Piece | Answer):
                continue
            line, job = asked.pop(number)
            if isinstance(event, ApiError | LookaheadError):
                yield Outcome(number, line.custom_id, error=str(event))
            elif event is not None:
                raise event
            elif job is not None:
                shape, request = Shape(self._name, self.tokenizer, job.plan, line.chat), secrets.token_hex(12)
                response = {"status_code": 200, "request_id": request, "body": shape.whole(job.answers)}
                record = {"id": f"{_REQUEST}{request}", "custom_id": line.custom_id, "response": response}
                yield Outcome(number, line.custom_id, record | {"error": None})

"""One thread that decodes: answers share passes, and no two of them share random numbers or keys and values."""

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Queue
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from lookahead.generation.conversations import Conversations
from lookahead.generation.watch import Pass
from lookahead.pieces import Pieces, first_stop, text_of
from lookahead.scheduling import Scheduler, Ticket
from lookahead.serve.errors import ApiError
from lookahead.serve.plans import Penalties, Plan, StopStrings
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

_LEAST = -9999.0  # log probability of what is impossible, for which JSON has no number


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Piece:
    """A bit of an answer's text, with what is known of its tokens: text, whether it was drafted, and the source."""

    index: int
    text: str
    tokens: list[dict[str, Any]] = field(default_factory=list)
    passes: int = 0
    tokens_per_second: float = 0.0


@dataclass
class Answer:
    """One answer when it is done."""

    index: int
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish: str  # "stop" or "length"
    stats: DecodingStats
    text: str = ""
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None


Told = Callable[[Piece | Answer | BaseException | None], None]  # None = all answers are done


class Job:
    """A request on its way. ``tell`` is called from the engine's thread."""

    def __init__(self, plan: Plan, tell: Told) -> None:
        self.plan, self.tell = plan, tell
        self.begun = 0  # answers that were begun
        self.begin = 0.0  # when the first of them was
        self.tasks: list[_Task] = []  # answers that are being written
        self._ended: Exception | None = None

    def cancel(self, reason: Exception | None = None) -> None:
        """End it at its next pass, or leave it out where it has not begun; ``reason`` is what it is told."""
        self._ended = self._ended or reason or Cancelled()

    def check(self) -> None:
        if self._ended is not None:
            raise self._ended


def _shutting_down() -> ApiError:
    told, headers = "The server is shutting down.", {"Retry-After": "5"}
    return ApiError(told, 503, kind="server_error", code="shutting_down", headers=headers)


class Engine:
    """Decodes jobs in a thread of its own, each answer as if it were alone (:mod:`lookahead.scheduling`).

    Args:
        strategy: what requests are decoded with; their references are added to it.
        rows: answers that are written at a time.
        most_waiting: jobs that may wait beside those that have begun.
        conversations: KV caches kept; 0 = none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        strategy: Lookahead | None = None,
        most_waiting: int = 32,
        conversations: int = 4,
        rows: int = 8,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._strategy = strategy or Lookahead()
        self._most_waiting = most_waiting
        self._waiting: deque[Job] = deque()
        self._scheduler = Scheduler(model, rows, self._strategy)
        self._rows = rows
        self._jobs: list[Job] = []  # that have begun
        self._changed = threading.Condition()
        self._kept = Conversations(model, conversations)
        self._closing = False
        self._usual_s = 1.0  # what a job takes, of late
        self._thread = threading.Thread(target=self._work, name="lookahead-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs that have begun."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def idle(self) -> bool:
        """Whether nothing is decoded, and nothing waits."""
        with self._changed:
            return not self.running and not self._waiting

    def submit(self, job: Job) -> None:
        """Queue a job, or say by an :class:`ApiError` that there is no place."""
        with self._changed:
            if not self.alive:
                raise _shutting_down()
            if len(self._waiting) + min(0, self.running - self._rows) >= self._most_waiting:
                raise ApiError(
                    f"{len(self._waiting)} requests wait already. Try again later.",
                    429,
                    kind="rate_limit_error",
                    code="queue_full",
                    headers={"Retry-After": str(max(1, math.ceil(len(self._waiting) * self._usual_s / self._rows)))},
                )
            self._waiting.append(job)
            self._changed.notify_all()

    def drop(self, job: Job) -> None:
        """Cancel a job; one that has not begun leaves the queue."""
        job.cancel()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def warm_up(self, tokens: int = 24) -> None:
        """Learn what passes of several widths cost before anybody waits: one text, and twice more with itself as the
        reference. The draft memory keeps that, and the text is forgotten."""
        prompt = self.tokenizer("def f(x):", add_special_tokens=False)["input_ids"] or [0]
        references: tuple[tuple[int, ...], ...] = ()
        for _ in range(3):
            told: Queue[Any] = Queue()
            settings = {"do_sample": False, "min_new_tokens": tokens}
            plan = Plan([prompt], 1, 0, settings, (0.0, 0.0), [], True, references, room=[tokens])
            self.submit(Job(plan, told.put))
            while (event := told.get()) is not None:
                if isinstance(event, Answer):
                    references = (tuple(event.tokens),)
                elif not isinstance(event, Piece):
                    raise event

    def refuse(self) -> None:
        """Take no more jobs; those that were submitted go on."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def cut(self) -> None:
        """End what was submitted; each job is told that the server stops."""
        with self._changed:
            self._closing = True
            for job in [*self._waiting, *self._jobs]:
                job.cancel(_shutting_down())

    def close(self) -> None:
        """Finish what was submitted, and stop."""
        self.refuse()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._jobs or self._closing)
                if not (self._waiting or self._jobs):
                    return
            while self._scheduler.has_room and (job := self._next()) is not None:
                self._submit(job)
            self._scheduler.step()
            for job in list(self._jobs):
                self._see(job)

    def _next(self) -> Job | None:
        """The job whose next answer is to be begun; None = all were."""
        with self._changed:
            job = next((job for job in self._jobs if job.begun < job.plan.count), None)
            if job is None and self._waiting:
                job = self._waiting.popleft()
                job.begin = perf_counter()
                self._jobs.append(job)
            return job

    def _submit(self, job: Job) -> None:
        """Begin a job's next answer."""
        index, job.begun = job.begun, job.begun + 1
        try:
            job.check()
            job.tasks.append(self._task(job, index))
        except BaseException as error:
            self._end(job, error)

    def _see(self, job: Job) -> None:
        """Tell a job of its answers that are written, and end it with the last one, or with an error."""
        try:
            job.check()
            for task in [task for task in job.tasks if task.ticket.done]:
                job.tasks.remove(task)
                job.tell(self._answer(job, task))
        except BaseException as error:
            self._end(job, error)
            return
        if job.begun == job.plan.count and not job.tasks:
            self._end(job, None)

    def _end(self, job: Job, error: BaseException | None) -> None:
        for task in job.tasks:
            task.ticket.cancel()
        job.tasks.clear()
        with self._changed:
            self._jobs.remove(job)
            self._usual_s += 0.2 * (perf_counter() - job.begin - self._usual_s)
        job.tell(error)

    def _task(self, job: Job, index: int) -> "_Task":
        plan = job.plan
        which, copy = divmod(index, plan.n)
        ids = plan.prompts[which]
        cache, cached = self._kept.take(ids)
        stream = _Stream(job, index, self.tokenizer)
        settings = plan.settings | {"max_new_tokens": plan.room[which], "streamer": stream}
        if any(plan.penalties):
            settings["logits_processor"] = [Penalties(len(ids), *plan.penalties)]
        if plan.stops:
            settings["stopping_criteria"] = [StopStrings(self.tokenizer, plan.stops)]
        if cache is not None:
            settings["past_key_values"] = cache
        inputs = torch.tensor([ids], device=self.model.device)
        ticket = self._scheduler.submit(
            seed=plan.seed + copy,
            watcher=stream.see,
            use_lookahead=plan.lookahead,
            lookahead_strategy=replace(self._strategy, references=plan.references or None),
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            return_dict_in_generate=True,
            output_logits=plan.logprobs is not None,
            **settings,
        )
        return _Task(index, ids, cached, stream, ticket, partial(self._kept.put, cache=cache))

    def _answer(self, job: Job, task: "_Task") -> Answer:
        plan, ids, stream = job.plan, task.ids, task.stream
        output = task.ticket.result()
        text = output.sequences[0].tolist()
        task.keep(text)
        tokens = text[len(ids) :]
        ended = bool(tokens) and tokens[-1] in _ends(self.model)
        room = plan.room[task.index // plan.n]
        finish = "stop" if ended or stream.close() or len(tokens) < room else "length"
        stats = getattr(output, "stats", None) or DecodingStats(steps=len(tokens), emitted=len(tokens))
        found = None if plan.logprobs is None else _logprobs(output.logits, tokens, plan.logprobs)
        whole = text_of(self.tokenizer, tokens)
        kept = whole[: first_stop(whole, plan.stops)]
        return Answer(task.index, tokens, len(ids), task.cached, finish, stats, kept, found)


@dataclass
class _Task:
    """An answer while it is written; ``keep`` puts its KV cache away under its whole text."""

    index: int
    ids: list[int]
    cached: int
    stream: "_Stream"
    ticket: Ticket
    keep: Callable[[list[int]], None]


class _Stream(BaseStreamer):
    """Tells a job of its text as it is written, and ends the call when nobody waits for it."""

    def __init__(self, job: Job, index: int, tokenizer: Any) -> None:
        self._job, self._index = job, index
        self._pieces = Pieces(tokenizer, job.plan.stops)
        self._details = job.plan.details
        self._known: deque[tuple[bool, str]] = deque()  # of tokens that a pass has written: drafted, source
        self._tokens: list[dict[str, Any]] = []  # not told yet
        self._prompt_seen = False
        self._passes = self._count = 0
        self._begin = perf_counter()

    def see(self, record: Pass) -> None:
        self._job.check()
        self._passes = record.index + 1
        row = record.rows[0]
        sources = [row.sources[node] for node in row.accepted[1:]]
        bonus = len(row.written) - 1
        self._known.extend((place < bonus, sources[place] if place < bonus else "") for place in range(bonus + 1))

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._job.check()
        for token in value.tolist():
            self._count += 1
            drafted, source = self._known.popleft() if self._known else (False, "")
            piece = self._pieces.add(token)
            self._tokens.append({"text": piece, "drafted": drafted, "source": source})
            self._tell(piece)

    def end(self) -> None:
        """Nothing: :meth:`close` is called when the call has succeeded."""

    def close(self) -> bool:
        """Tell the rest; whether a stop string ended the text."""
        rest = self._pieces.close()
        if rest:
            self._tokens.append({"text": rest, "drafted": False, "source": ""})
        self._tell(rest)
        return self._pieces.stopped

    def _tell(self, text: str) -> None:
        if not text:
            return
        tokens, self._tokens = [token for token in self._tokens if token["text"]], []
        speed = self._count / max(1e-9, perf_counter() - self._begin)
        passes = self._passes or self._count
        details = (tokens, passes, speed) if self._details else ([], 0, 0.0)
        self._job.tell(Piece(self._index, text, *details))


def _ends(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _logprobs(logits: Any, tokens: list[int], most: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """Of each token its log probability by the model's own logits, and the likeliest ones beside it."""
    found = []
    for line, token in zip(logits, tokens, strict=True):
        logs = torch.log_softmax(line[0].float(), dim=-1)
        best = torch.topk(logs, most) if most else None
        others = [] if best is None else list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found.append((max(_LEAST, float(logs[token])), [(other, max(_LEAST, log)) for other, log in others]))
    return found

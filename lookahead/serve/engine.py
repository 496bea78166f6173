"""One thread that decodes: answers share passes, and no two of them share random numbers or keys and values."""

import math
import threading
from collections import deque
from dataclasses import replace
from queue import Queue
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessor

from lookahead.pieces import text_of, tokens_of
from lookahead.scheduling import Scheduler, Ticket
from lookahead.serve.errors import ApiError, shutting_down
from lookahead.serve.fairness import FairTurns
from lookahead.serve.jobs import Answer, AnswerStream, Job
from lookahead.serve.plans import Penalties, RequestPlan, StopStrings
from lookahead.stats import DecodingStats
from lookahead.strategies.automatic import AutomaticStrategy
from lookahead.strategies.grammar import Grammar
from lookahead.strategies.lookahead import Lookahead

_PER_SPARE = 4  # rows for which there is one more, for a job that has none beside one that has several


class Engine:
    """Decodes jobs in a thread of its own, each answer as if it were alone (:mod:`lookahead.scheduling`).

    Args:
        strategy: what requests are decoded with; their references are added to it.
        rows: answers that are written at a time.
        most_waiting: jobs that may wait beside those that have begun.
        prefix_bytes: of keys and values kept for texts with a common beginning; 0 = none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        strategy: AutomaticStrategy | None = None,
        most_waiting: int = 32,
        prefix_bytes: int = 1 << 30,
        rows: int = 16,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._strategy: AutomaticStrategy = strategy or Lookahead()
        self._most_waiting = most_waiting
        self._waiting: deque[Job] = deque()
        self._scheduler = Scheduler(model, rows - (-rows // _PER_SPARE), self._strategy, prefix_bytes)
        self._rows = rows
        self._jobs: list[Job] = []  # that have begun
        self._turns = FairTurns()
        self._changed = threading.Condition()
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
        """True if nothing is decoded, and nothing waits."""
        with self._changed:
            return not self.running and not self._waiting

    def submit(self, job: Job) -> None:
        """Queue a job, or say by an :class:`ApiError` that there is no place."""
        with self._changed:
            if not self.alive:
                raise shutting_down()
            if len(self._waiting) + min(0, self.running - self._rows) >= self._most_waiting:
                told = f"{len(self._waiting)} requests wait already. Try again later."
                seconds = max(1, math.ceil(len(self._waiting) * self._usual_s / self._rows))
                raise ApiError(told, 429, code="queue_full", headers={"Retry-After": str(seconds)})
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
            plan = RequestPlan([prompt], [tokens], settings, references=references)
            job = Job(plan, told.put)
            self.submit(job)
            while (event := told.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
            references = (tuple(job.answers[0].tokens),)

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
                job.cancel(shutting_down())

    def close(self) -> None:
        """Finish what was submitted, and stop: a thread that still runs when Python ends may abort the process."""
        self.refuse()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._closing)
                if not self._has_work:
                    return
            while (job := self._next()) is not None:
                index, job.begun = job.begun, job.begun + 1
                try:
                    job.check()
                    self._begin(job, index)
                except BaseException as error:
                    self._end(job, error)
            self._scheduler.step()
            for job in list(self._jobs):
                self._see(job)

    @property
    def _has_work(self) -> bool:
        # Answers that were cancelled with their jobs are still to be left out.
        return bool(self._waiting or self._jobs or self._scheduler.running or self._scheduler.waiting)

    def _next(self) -> Job | None:
        """The job whose next answer is to be begun; None = none is, or can be now."""
        with self._changed:
            free = self._scheduler.running + self._scheduler.waiting < self._rows
            several = self._scheduler.has_room and any(len(job.tasks) > 1 for job in self._jobs)
            begun = [job for job in self._jobs if free and job.begun < job.plan.count]
            job = self._turns.next([*begun, *(self._waiting if free or several else ())], self._jobs)
            if job is not None and job in self._waiting:
                self._waiting.remove(job)
                job.begin = perf_counter()
                self._jobs.append(job)
            return job

    def _see(self, job: Job) -> None:
        """Tell a job of its answers that are written, and end it with the last one, or with an error."""
        try:
            job.check()
            for ticket in [ticket for ticket in job.tasks if ticket.done]:
                job.answers.append(self._answer(job.plan, job.tasks.pop(ticket), ticket))
                job.tell(job.answers[-1])
        except BaseException as error:
            self._end(job, error)
            return
        if job.begun == job.plan.count and not job.tasks:
            self._end(job, None)

    def _end(self, job: Job, error: BaseException | None) -> None:
        for ticket in job.tasks:
            ticket.cancel()
        job.tasks.clear()
        with self._changed:
            self._jobs.remove(job)
            self._usual_s += 0.2 * (perf_counter() - job.begin - self._usual_s)
        job.tell(error)

    def _begin(self, job: Job, index: int) -> None:
        """Begin an answer of a job."""
        plan, request = job.plan, job.plan.request
        which, copy = divmod(index, request.n)
        ids = plan.prompts[which]
        stream = AnswerStream(job, index, self.tokenizer)
        settings = plan.settings | {"max_new_tokens": plan.room[which], "streamer": stream}
        settings["logits_processor"] = processors = list[LogitsProcessor](() if stream.logs is None else (stream.logs,))
        if request.frequency_penalty or request.presence_penalty:
            processors.append(Penalties(len(ids), request.frequency_penalty, request.presence_penalty))
        if plan.grammar:
            processors.append(Grammar(self.tokenizer, **plan.grammar))
        if request.stops:
            settings["stopping_criteria"] = [StopStrings(plan.tokenizer or self.tokenizer, request.stops)]
        most = max(1, min(self._strategy.max_nodes, request.n_max))
        inputs = torch.tensor([ids], device=self.model.device)
        ticket = self._scheduler.submit(
            seed=plan.seed + copy,
            salt=request.cache_salt,
            watcher=stream.see,
            use_lookahead=request.use_lookahead and request.n_max > 0,
            lookahead_strategy=replace(self._strategy, references=plan.references or None, max_nodes=most),
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            return_dict_in_generate=True,
            **settings,
        )
        job.tasks[ticket] = stream

    def _answer(self, plan: RequestPlan, stream: AnswerStream, ticket: Ticket) -> Answer:
        """The answer of what ``generate`` has written."""
        output, which = ticket.result(), stream.index // plan.request.n
        length = len(plan.prompts[which])
        tokens = output.sequences[0].tolist()[length:]
        ends = plan.settings.get("eos_token_id", self.model.generation_config.eos_token_id)
        ended = bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])
        stopped = stream.close()
        finish = "stop" if ended or stopped or len(tokens) < plan.room[which] else "length"
        stats = getattr(output, "stats", None) or DecodingStats(steps=len(tokens), emitted=len(tokens))
        whole = text_of(plan.tokenizer or self.tokenizer, tokens)
        kept, found = stream.text if stopped else whole, None
        if stream.logs is not None:
            shown = len(tokens) if kept == whole else tokens_of(plan.tokenizer or self.tokenizer, tokens, kept)
            found = stream.logs.all(tokens)[:shown]
        return Answer(stream.index, tokens, length, ticket.cached or 0, finish, stats, stream.drafts, kept, found)

"""The loop of many requests: sequences join while there is room, share passes, and leave as they end."""

from collections import deque
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.draft.strategy import DraftStrategy as Strategy
from lookahead.generation import transformers_loop
from lookahead.generation.call import Call
from lookahead.generation.decode import decode
from lookahead.generation.plan import assisted, plan_of
from lookahead.generation.prefixes import Prefixes
from lookahead.generation.watch import Watcher, watching
from lookahead.models.traits import ModelTraits
from lookahead.registry import strategy_from
from lookahead.runtime.attention import switched_attention
from lookahead.scheduling.batch import Rows
from lookahead.scheduling.parts import behind_known
from lookahead.scheduling.requests import Ticket, prepared, why_alone
from lookahead.scheduling.row import Row
from lookahead.support import route as support
from lookahead.support.call import check_mode


class Scheduler:
    """Decodes many requests on one device, several of them in each pass.

    A static batch is done when its longest text is, and rows that have ended are fed along until then. Here a request
    takes the place of one that has ended, between two passes::

        static batch                    scheduler
        a a a a a a a a                 a a a a a a a a
        b b b - - - - -                 b b b d d d d d
        c c c c c - - -   then d        c c c c c e e e

    Every text is the one that plain ``generate`` would have written for its request alone, seed for seed: what a row
    writes depends on its own logits and its own random numbers. Trees are as wide as pays for all rows together. What
    cannot share passes (several sequences in one request, models without trees, heads that read hidden states) is
    decoded by itself when its turn comes.

    Args:
        model: a model that lookahead supports; nothing else may decode on it meanwhile.
        rows: most requests in a pass.
        strategy: how requests are drafted that do not say it; None = :class:`lookahead.Lookahead`.
        prefix_bytes: of keys and values that are kept, so that texts with a common beginning read it once, and long
            prompts in parts; 0 = none.

    Raises:
        LookaheadError: ``rows`` is no number from 1 up, or the model cannot be decoded with lookahead.

    One thread uses it. For example::

        with Scheduler(model, rows=8) as scheduler:
            tickets = [scheduler.submit(**tokenizer(text, return_tensors="pt"), max_new_tokens=200) for text in texts]
            scheduler.run()
        outputs = [ticket.result() for ticket in tickets]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int = 16,
        strategy: Strategy | dict[str, Any] | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise LookaheadError(f"Scheduler(rows=) must be a whole number from 1 up: got {rows!r}.")
        self._model, self._most = model, rows
        self._strategy = strategy_from(strategy)
        self._traits = ModelTraits.of(model)
        support.check_model(model, self._traits)
        self._waiting: deque[Ticket] = deque()
        self._prefixes, faster = Prefixes(model, prefix_bytes), self._strategy
        self._rows = Rows(model, self._traits, rows, self._prefixes, traces=faster.traces, pack=faster.pack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def running(self) -> int:
        """Requests that are being written."""
        return len(self._rows.held) + len(self._rows.unread)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request that is submitted now begins with the next pass."""
        return self.running + self.waiting < self._most

    def submit(
        self,
        *,
        seed: int | None = None,
        salt: str | None = None,
        watcher: Watcher | None = None,
        use_lookahead: bool = True,
        lookahead_strategy: Strategy | dict[str, Any] | None = None,
        **inputs: Any,
    ) -> Ticket:
        """Queue a request.

        Args:
            seed: with ``do_sample`` the text is the one after ``torch.manual_seed(seed)``; None = torch's own generator
                gives a seed when the request begins.
            salt: requests of another one share no kept beginnings with it.
            watcher: is called with a :class:`lookahead.generation.watch.Pass` for each pass of its own, as by
                :func:`lookahead.watching`.
            use_lookahead: False = one token a pass.
            lookahead_strategy: how it is drafted; None = the scheduler's.
            inputs: as for ``generate``: ``input_ids``, ``attention_mask``, ``max_new_tokens``, ``streamer``, ...

        Raises:
            LookaheadError: an argument belongs to the scheduler, or ``seed`` is no number. What ``generate`` refuses is
                told by the ticket's result.
        """
        if "custom_generate" in inputs:
            raise LookaheadError("custom_generate= belongs to the scheduler: got it among generate's own arguments.")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise LookaheadError(f"seed must be a whole number or None: got {seed!r}.")
        given = self._strategy if lookahead_strategy is None else strategy_from(lookahead_strategy)
        ticket = Ticket(inputs, given if use_lookahead else None, seed, watcher, salt)
        self._waiting.append(ticket)
        return ticket

    def run(self) -> None:
        """Decode until every request is done."""
        while self.step():
            pass

    @torch.no_grad()
    def step(self) -> bool:
        """Let requests join, and run one pass. False = there is nothing to do."""
        try:
            for row in [row for row in [*self._rows.held, *self._rows.unread] if row.ticket.cancelled]:
                self._rows.leave(row, LookaheadError("The request was cancelled."))
            while self._waiting and self.running < self._most:
                self._begin(self._waiting[0])
                self._waiting.popleft()
            self._rows.read()
            if self._rows.held:
                self._rows.step()
        finally:
            self._rows.rest()
        return bool(self.running or self._waiting)

    def close(self) -> None:
        """End what is not done: those results are errors."""
        error = LookaheadError("The scheduler was closed before this request was done.")
        for row in [*self._rows.held, *self._rows.unread]:
            self._rows.leave(row, error)
        while self._waiting:
            self._waiting.popleft().end(error=error)
        self._rows.rest()

    def _begin(self, ticket: Ticket) -> None:
        """Give a request a row, or end it at once, because it cannot share passes or fails."""
        if ticket.cancelled:
            ticket.end(error=LookaheadError("The request was cancelled."))
            return
        try:
            call = prepared(self._model, ticket.inputs)
            check_mode(call.config)
            if ticket.strategy is not None:
                ticket.strategy = assisted(ticket.strategy, call.config, ticket.inputs)
            plan = self._rows.kept(plan_of(ticket.strategy, call, test=False))
            shares = plan.route == "tree" and why_alone(plan) is None and self._rows.takes(plan)
            if shares and support.self_test(self._model, call.traits) is None:
                self._rows.unread.append(Row(ticket, plan, self._rows.memory(ticket.strategy)))
            else:
                ticket.end(self._alone(ticket, call, plan.bits.limits is None))
        except Exception as error:
            ticket.end(error=error)

    def _alone(self, ticket: Ticket, call: Call, anyhow: bool) -> Any:
        """Decode a request by itself, behind what is known of its text if it may be read ``anyhow``."""
        call, cache = behind_known(call, ticket, self._prefixes) if anyhow else (call, None)
        output = self._decoded(ticket, call)
        text = output if isinstance(output, Tensor) else output.sequences
        self._prefixes.keep(text[0].tolist(), cache, ticket.salt)
        return output

    def _decoded(self, ticket: Ticket, call: Call) -> Any:
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with ExitStack() as stack:
            if ticket.seed is not None:
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(ticket.seed)
            if ticket.watcher is not None:
                stack.enter_context(watching(ticket.watcher))
            if ticket.strategy is None:
                return transformers_loop.run(call, "none", None)
            stack.enter_context(switched_attention(self._model, ticket.strategy.attention))
            return decode(ticket.strategy, call)

"""The loop of many requests: sequences join while there is room, share passes, and leave as they end."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError, Path, Scores, Step, Wants
from lookahead.draft.guard import Guard
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory, borrowed
from lookahead.draft.planner import Planner
from lookahead.generation import transformers_loop
from lookahead.generation.call import Call
from lookahead.generation.decode import assisted, decode, wanted
from lookahead.generation.watch import Watcher, watching
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import switched_attention
from lookahead.scheduling.requests import Ticket, check_inputs, prepared, why_alone
from lookahead.scheduling.rows import Row, part_of
from lookahead.scheduling.shared import SharedPasses
from lookahead.strategies.automatic import AutomaticStrategy
from lookahead.strategies.base import Strategy
from lookahead.strategies.registry import strategy_from
from lookahead.support import route as support
from lookahead.support.call import check_mode
from lookahead.verify.choices import walked_together
from lookahead.verify.sequences import Sequences


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

    Raises:
        LookaheadError: ``rows`` is no number from 1 up, or the model cannot be decoded with lookahead.

    One thread uses it. For example::

        with Scheduler(model, rows=8) as scheduler:
            tickets = [scheduler.submit(**tokenizer(text, return_tensors="pt"), max_new_tokens=200) for text in texts]
            scheduler.run()
        outputs = [ticket.result() for ticket in tickets]
    """

    def __init__(self, model: PreTrainedModel, rows: int = 8, strategy: Strategy | dict[str, Any] | None = None) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise LookaheadError(f"Scheduler(rows=) must be a whole number from 1 up: got {rows!r}.")
        self._model, self._most = model, rows
        self._strategy = strategy_from(strategy)
        self._traits = ModelTraits.of(model)
        support.check_model(model, self._traits)
        self._waiting: deque[Ticket] = deque()
        self._rows: list[Row] = []
        self._busy = ExitStack()  # open while there are rows
        self._memory: Memory | None = None
        self._guard = Guard(apart=True)
        self._planners: dict[tuple[int, int | None, int], Planner] = {}
        self._planner: Planner | None = None
        self._changed = False  # rows have joined or left since the last pass
        self._shared = SharedPasses(
            model, self._traits, rows, traces=self._strategy.traces, pack=self._strategy.pack, renewed=self._renewed
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def running(self) -> int:
        """Requests that are being written."""
        return len(self._rows)

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
        watcher: Watcher | None = None,
        use_lookahead: bool = True,
        lookahead_strategy: Strategy | dict[str, Any] | None = None,
        **inputs: Any,
    ) -> Ticket:
        """Queue a request.

        Args:
            seed: with ``do_sample`` the text is the one after ``torch.manual_seed(seed)``; None = torch's own generator
                gives a seed when the request begins.
            watcher: is called with a :class:`lookahead.generation.watch.Pass` for each pass of its own, as by
                :func:`lookahead.watching`.
            use_lookahead: False = one token a pass.
            lookahead_strategy: how it is drafted; None = the scheduler's.
            inputs: as for ``generate``: ``input_ids``, ``attention_mask``, ``max_new_tokens``, ``streamer``, ...

        Raises:
            LookaheadError: an argument belongs to the scheduler, or ``seed`` is no number. What ``generate`` refuses is
                told by the ticket's result.
        """
        check_inputs(inputs, seed)
        given = self._strategy if lookahead_strategy is None else strategy_from(lookahead_strategy)
        ticket = Ticket(inputs, given if use_lookahead else None, seed, watcher)
        self._waiting.append(ticket)
        return ticket

    def run(self) -> None:
        """Decode until every request is done."""
        while self.step():
            pass

    @torch.no_grad()
    def step(self) -> bool:
        """Let requests join, and run one pass. False = there is nothing to do."""
        for row in [row for row in self._rows if row.ticket.cancelled]:
            self._leave(row, LookaheadError("The request was cancelled."))
        while self._waiting and len(self._rows) < self._most:
            self._begin(self._waiting.popleft())
        if self._rows:
            with self._shared.running():
                self._pass()
        return bool(self._rows or self._waiting)

    def close(self) -> None:
        """End what is not done: those results are errors."""
        error = LookaheadError("The scheduler was closed before this request was done.")
        for row in list(self._rows):
            self._leave(row, error)
        while self._waiting:
            self._waiting.popleft().end(error=error)
        self._busy.close()

    def _begin(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            ticket.end(error=LookaheadError("The request was cancelled."))
            return
        try:
            call = prepared(self._model, ticket.inputs)
            row = self._row(ticket, call)
            if row is None:
                ticket.end(self._alone(ticket, call))
                return
        except Exception as error:
            ticket.end(error=error)
            return
        try:
            with self._shared.running():
                row.read(self._curve)
        except Exception as error:
            if row.seat.row is None:
                ticket.end(error=error)
                row.close()
            else:
                self._joined(row)
                self._leave(row, error)
            return
        self._joined(row)
        if row.done:
            self._leave(row)

    def _joined(self, row: Row) -> None:
        self._rows.append(row)
        self._changed = True

    def _row(self, ticket: Ticket, call: Call) -> Row | None:
        """A row for a request, or None where it cannot share passes."""
        check_mode(call.config)
        if ticket.strategy is not None:
            ticket.strategy = assisted(ticket.strategy, call.config, ticket.inputs)
        sequences = Sequences(call.input_ids, call.criteria, call.config, keep_up=False)
        support.check(self._model, call.traits, call.input_ids, call.kwargs)
        given = call.input_ids, call.kwargs, call.cache
        plan = support.plan(self._model, call.traits, *given, sequences.most_new)
        if plan.route != "tree":
            return None
        wants = Wants()
        if ticket.strategy is not None:
            wants, _ = wanted(ticket.strategy, call, plan, sequences.most_new)
        if why_alone(call, ticket.strategy, wants, sequences.most_new) is not None:
            return None
        support.self_test(self._model, call.traits)
        if self._memory is None:
            self._memory = self._busy.enter_context(borrowed(self._model, call.traits.vocab_size, True))
        memory = self._memory
        if ticket.strategy is None or not ticket.strategy.remembers:
            memory = Memory(call.traits.vocab_size, times=memory.times)
        return Row(ticket, call, sequences, wants, self._shared, memory)

    def _alone(self, ticket: Ticket, call: Call) -> Any:
        """Decode a request by itself."""
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

    def _curve(self) -> StepTimes:
        assert self._memory is not None  # there is a row
        return self._shared.curve(self._memory)

    def _renewed(self, spent_ms: float) -> None:
        """Passes over as many rows as there are now are run in another way."""
        planner = self._planner
        self._planners = {key: kept for key, kept in self._planners.items() if kept is planner}
        if planner is not None:
            planner.costs.renew(spent_ms)

    def _regroup(self) -> None:
        """Let the drafts of those rows that are here size their trees together."""
        self._changed = False
        sized = [row for row in self._rows if row.planner is not None]
        self._planner = self._planner_of(sized[0]) if sized else None
        if self._planner is not None:
            self._planner.share_anew()
            for row in sized:
                row.follow(self._planner)

    def _planner_of(self, row: Row) -> Planner:
        own, strategy, count = row.planner, row.strategy, len(self._rows)
        assert own is not None and isinstance(strategy, AutomaticStrategy)
        if count == 1:
            return own
        key = count, strategy.nodes, strategy.max_nodes
        if key not in self._planners:
            given = strategy.step_times()
            curve = self._curve if given is None else lambda: given
            self._planners[key] = Planner(
                curve(),
                own.acceptance,
                limits=self._shared,
                batch=count,
                most_nodes=strategy.max_nodes,
                nodes=strategy.nodes,
                expensive=own.expensive,
                guard=self._guard,
                anew=curve,
                apart=True,
            )
        return self._planners[key]

    def _pass(self) -> None:
        if self._changed:
            self._regroup()
        shared, planner, failed = self._shared, self._planner, dict[Row, Exception]()
        if planner is not None:
            planner.open(shared.context)
        begin = perf_counter()
        for row in list(self._rows):
            if _tried(failed, row, row.draft) is None:
                self._leave(row, failed[row])
        if not self._rows:
            return
        rows, trees = list(self._rows), [row.tree for row in self._rows]
        draft_ms, begin = _ms(begin), perf_counter()
        try:
            parts = self._scored(rows, failed)
        except Exception as error:
            for row in rows:
                self._leave(row, error)
            return
        forward_ms, begin = _ms(begin), perf_counter()
        paths = _decided(rows, parts, failed)
        verify_ms, begin = _ms(begin), perf_counter()
        shared.keep(paths)
        for row, part, path in zip(rows, parts, paths, strict=True):
            if path.tokens:
                _tried(failed, row, row.learn, part, path)
        step = Step(trees, paths, draft_ms, forward_ms, verify_ms, _ms(begin))
        if planner is not None and not self._changed:
            planner.observe(step)
        shared.see(sum(map(len, trees)), forward_ms)
        for at, row in enumerate(rows):
            _tried(failed, row, row.see, step, at)
        for row in rows:
            if row in failed or row.done:
                self._leave(row, failed.get(row))

    def _scored(self, rows: list[Row], failed: dict[Row, Exception]) -> list[Scores]:
        """Run a pass over the rows' trees; each row's part of what it says."""
        counts: list[int] = []

        def look(logits: Tensor) -> tuple[Tensor, ...]:
            found: list[Tensor] = []
            for at, row in enumerate(rows):
                own = row.look()(logits[at : at + 1, : len(row.tree)])
                counts.append(len(own))
                found += own
            return tuple(found)

        wait = self._shared.launch([row.tree for row in rows], look)
        for row in rows:
            _tried(failed, row, row.catch_up)
        scores = wait()
        counts = counts or [0] * len(rows)
        ends = [sum(counts[: at + 1]) for at in range(len(rows))]
        beside = [scores.beside[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return [part_of(scores, at, row.tree, beside[at]) for at, row in enumerate(rows)]

    def _leave(self, row: Row, error: Exception | None = None) -> None:
        output = None
        if error is None:
            try:
                output = row.output()
            except Exception as failure:
                error = failure
        at = self._rows.index(row)
        self._rows[at] = self._rows[-1]
        del self._rows[-1]
        self._shared.drop(at)
        if at < len(self._rows):
            self._rows[at].seat.row = at
        self._changed = True
        row.close()
        row.ticket.end(output, error)
        if not self._rows:
            self._planner = None
            self._planners.clear()
            self._memory = None
            self._busy.close()


def _tried(failed: dict[Row, Exception], row: Row, action: Callable[..., Any], *given: Any) -> Any:
    """What an action of a row gives that has not failed yet; a failure ends that row alone."""
    if row in failed:
        return None
    try:
        return action(*given)
    except Exception as error:
        failed[row] = error
        return None


def _decided(rows: list[Row], parts: list[Scores], failed: dict[Row, Exception]) -> list[Path]:
    """Write what the model would have written; rows that sample alike do so in one computation."""
    going = [(row, part) for row, part in zip(rows, parts, strict=True) if row not in failed]
    found = walked_together([row.deciding(part) for row, part in going])
    paths: dict[Row, Path] = {}
    for (row, _), decided in zip(going, found, strict=True):
        if isinstance(decided, Exception):
            failed[row] = decided
        else:
            (paths[row],) = decided
    return [paths.get(row) or Path() for row in rows]


def _ms(begin: float) -> float:
    return 1e3 * (perf_counter() - begin)

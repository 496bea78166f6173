"""A request that is being written in shared passes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from jacobi import Path, Scores, Step, TokenTree
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.generation.group import CallGroup
from lookahead.generation.plan import Plan
from lookahead.runtime.tree import TreeModel
from lookahead.scheduling.prompts import Asked
from lookahead.scheduling.requests import Ticket
from lookahead.verify.verifier import walked_together


@dataclass
class Seat:
    """A sequence's place in shared passes, which changes as others leave; without a ``model`` it has not joined yet."""

    model: TreeModel | None = None
    row: int = 0

    def room(self) -> list[int] | None:
        """How deep the sequence's next tree may be; None = no limit."""
        limits = None if self.model is None else self.model.room()
        return limits and [limits[self.row]]

    def holds(self, row: int) -> bool:
        """Nobody waits for others."""
        return False


class Row(CallGroup):
    """A request that is being written: a group of one sequence, which ends alone by what it does wrong.

    Attributes:
        ticket: what was asked.
        asked: what its prompt's pass is given and wanted for.
        seat: its place in the shared passes.
        error: what it has failed with; None = it goes on.
    """

    def __init__(self, ticket: Ticket, plan: Plan, memory: Memory) -> None:
        self.ticket, self.seat, self._memory = ticket, Seat(), memory
        self.error: Exception | None = None
        sequences = plan.call.sequences()
        self.asked = Asked(plan.call, plan.wants, plan.new_tokens, frozenset(ticket.inputs), plan.bits.limits)
        draws = None
        if plan.call.config.do_sample:  # without a seed by the next number of torch's own generator
            seed = int(torch.randint(0, 2**62, ()).item()) if ticket.seed is None else ticket.seed
            draws = torch.Generator(sequences.device).manual_seed(seed)
        super().__init__(plan, sequences, self.seat, ExitStack(), generator=draws, in_turn=False)

    @property
    def done(self) -> bool:
        return self.error is not None or self.verifier.done

    def join(self, model: TreeModel, row: int, curve: Callable[[], StepTimes]) -> None:
        """Take a seat; the prompt is read, and the sequence is a ``row`` of the model's passes."""
        self.seat.model, self.seat.row = model, row
        self._tried(self._begin, model, curve)

    def _begin(self, model: TreeModel, curve: Callable[[], StepTimes]) -> None:
        strategy = self.plan.strategy
        drafts = None if strategy is None else strategy.drafts(self.context(self._memory, model, curve))
        self.begin(drafts, self.ticket.watcher)

    def draft(self) -> None:
        self.trees = [TokenTree(0)]  # of one that fails, which nobody looks at
        self._tried(super().draft)

    def learn(self, scores: Scores) -> None:
        self._tried(super().learn, scores)

    def see(self, step: Step) -> None:
        """Take in a pass of all rows."""
        self._tried(super().see, replace(step, trees=self.trees, paths=self.paths))

    def catch_up(self) -> None:
        self._tried(super().catch_up)

    def end(self, output: Any = None, error: Exception | None = None) -> None:
        """It is written, or will not be."""
        self.ends.close()
        self.ticket.end(output, error)

    def _tried(self, action: Callable[..., Any], *given: Any) -> None:
        if self.error is None:
            try:
                action(*given)
            except Exception as error:
                self.error = error


def decide_together(rows: Sequence[Row], parts: Sequence[Scores]) -> None:
    """Write what the model would have written; rows that sample alike do so in one computation."""
    going = [(row, scores) for row, scores in zip(rows, parts, strict=True) if row.error is None]
    found = walked_together([row.verifier.deciding(row.trees, scores) for row, scores in going])
    for row in rows:
        row.paths = [Path()]
    for (row, _), decided in zip(going, found, strict=True):
        if isinstance(decided, Exception):
            row.error = decided
        else:
            row.paths = decided

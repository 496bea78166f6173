"""One sequence while it is written, by passes that it shares."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from jacobi import Drafter, Path, PlainDrafter, Scores, Step, Successors, TokenTree, Wants
from jacobi.loop import since_ms
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.draft.context import Drafts
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.draft.planner import Planner
from lookahead.generation.call import Call
from lookahead.generation.drafting import WhileWriting, draft_context
from lookahead.generation.observers import Observers
from lookahead.generation.output import decoded
from lookahead.generation.watch import PassRecords
from lookahead.runtime.scores import Look
from lookahead.scheduling.prompts import Asked
from lookahead.scheduling.requests import Ticket, drawing
from lookahead.scheduling.shared import SharedPasses
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Deciding, Verifier


class Seat:
    """A sequence's place in shared passes, which changes as others leave."""

    def __init__(self, shared: SharedPasses) -> None:
        self.row: int | None = None  # not joined yet
        self._shared = shared

    def room(self) -> list[int] | None:
        """How deep the sequence's next tree may be; None = no limit."""
        return None if self.row is None else self._shared.room(self.row)

    def holds(self, row: int) -> bool:
        """Nobody waits for others."""
        return False


class Row:
    """A request that is being written; everything of it is of one sequence.

    Attributes:
        ticket: what was asked.
        seat: its place in the shared passes.
        planner: that of its drafts while it is alone; None = their sizes are not chosen.
        strategy: what it drafts with.
    """

    def __init__(
        self, ticket: Ticket, call: Call, sequences: Sequences, wants: Wants, shared: SharedPasses, memory: Memory
    ) -> None:
        self.ticket, self.strategy, self.seat = ticket, ticket.strategy, Seat(shared)
        self._call, self._sequences, self._wants, self._shared = call, sequences, wants, shared
        self._memory, self._ends = memory, ExitStack()
        self._drafts = Drafts([PlainDrafter()])
        self._drafter: Drafter = self._drafts.drafters[0]
        self.tree = TokenTree(0)
        self.verifier = Verifier(
            sequences,
            call.processors,
            call.criteria,
            call.config,
            self.seat,
            verification="exact",
            everywhere=wants.choices,
            generator=drawing(sequences.device, ticket.seed) if call.config.do_sample else None,
        )
        self._observers: Observers  # once it has begun

    @property
    def planner(self) -> Planner | None:
        return self._drafts.planner

    @property
    def done(self) -> bool:
        return self.verifier.done

    @property
    def asked(self) -> Asked:
        """What its prompt's pass is given and wanted for."""
        return Asked(self._call, self._wants, self._sequences.most_new, frozenset(self.ticket.inputs))

    def begin(self, scores: Scores, prefill_ms: float, curve: Callable[[], StepTimes]) -> None:
        """Write the first token, by the ``scores`` of its prompt; it has joined the others. ``curve`` finds the latency
        curve of the passes that they share."""
        begin = perf_counter()
        paths = self.verifier.decide([self.tree], scores)
        verify_ms, begin = since_ms(begin), perf_counter()
        self._start(curve)
        self.learn(scores, paths[0])
        self._observers.see(Step([self.tree], paths, 0.0, prefill_ms, verify_ms, since_ms(begin)))
        self.catch_up()

    def _start(self, curve: Callable[[], StepTimes]) -> None:
        call, strategy, sequences = self._call, self.strategy, self._sequences
        if strategy is not None:
            how = self._memory, self._shared, curve, strategy, self.verifier.noise, self._ends.callback
            self._drafts = strategy.drafts(draft_context(call, sequences, *how))
        (drafter,) = self._drafts.drafters
        self._drafter = WhileWriting(drafter, 0, sequences, [0], call.traits.vocab_size)
        watched = None if self.ticket.watcher is None else PassRecords([drafter], self.ticket.watcher)
        stats = "summary" if strategy is None else strategy.stats
        # Planners are told of whole passes, and not of one row's part.
        apart = Drafts(self._drafts.drafters)
        told = stats, False, watched, call.stream(sequences), None
        self._observers = Observers(call, sequences, self._shared, apart, *told)

    def follow(self, planner: Planner) -> None:
        """Share a planner with other rows."""
        for drafter in self._drafts.drafters:
            if isinstance(drafter, AutomaticDrafter):
                drafter.follow(planner)

    def draft(self) -> TokenTree:
        """The next tree."""
        (room,) = self.verifier.room()
        self.tree = self._drafter.draft(room)
        return self.tree

    def look(self) -> Look:
        """What is to be brought to the host of this row's part of a pass."""
        return partial(self.verifier.look, [self.tree])

    def deciding(self, scores: Scores) -> Deciding:
        """Write what the model would have written, by the scores of its own tree."""
        return self.verifier.deciding([self.tree], scores)

    def learn(self, scores: Scores, path: Path) -> None:
        """Let drafts learn from the pass."""
        best = scores.successors[0] if scores.successors else None
        self._drafter.learn(self.tree, scores.greedy[0], path, best)

    def see(self, step: Step, row: int) -> None:
        """Take in a pass of all rows, in which this one was ``row``."""
        times = step.draft_ms, step.forward_ms, step.verify_ms, step.keep_ms
        self._observers.see(Step([step.trees[row]], [step.paths[row]], *times))

    def catch_up(self) -> None:
        """Stream and learn what no draft waits for."""
        self._observers.catch_up()
        self._drafts.catch_up()

    def output(self) -> Any:
        """What ``generate`` returns; the row must still be in the shared passes."""
        call, observers = self._call, self._observers
        observers.close()
        if observers.stats is not None:
            credited, by_noise = self._drafts.credits()
            observers.stats.add_plan(credited, {}, by_noise=by_noise)
        if call.exports_cache and self.seat.row is not None:
            self._shared.store(self.seat.row, call.cache)
        return decoded(call, self._sequences, self.verifier, self._drafts.drafters, observers.stats)

    def close(self) -> None:
        """It is written, or will not be."""
        self._ends.close()


def part_of(scores: Scores, row: int, tree: TokenTree, beside: Sequence[Any]) -> Scores:
    """The scores of one row's tree; ``beside`` is what was looked for in its part."""
    count = len(tree)
    broken = frozenset((0, node) for at, node in scores.broken if at == row and node < count)
    best: list[Successors] | None = None
    if scores.successors is not None and tree.top_k:
        found = scores.successors[row]
        best = [Successors(found.tokens[:count, : tree.top_k], found.logits[:count, : tree.top_k])]
    greedy = [scores.greedy[row][:count]]
    return Scores(scores.logits[row : row + 1, :count], greedy, broken, best, tuple(beside))

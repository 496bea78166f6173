"""The rows that are being written: what sizes their trees, and the passes they share."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from jacobi import Path, Scores, Step
from jacobi.loop import since_ms
from lookahead.draft.guard import Guard
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory, borrowed
from lookahead.draft.planner import Planner
from lookahead.draft.strategy import DraftStrategy
from lookahead.generation.memories import recall
from lookahead.models.traits import ModelTraits
from lookahead.scheduling.prompts import Asked, groups, read
from lookahead.scheduling.rows import Row, part_of
from lookahead.scheduling.shared import SharedPasses
from lookahead.strategies.automatic import AutomaticStrategy
from lookahead.verify.choices import walked_together


class Rows:
    """Sequences that share passes, at most ``most``. What one of them does wrong ends it alone.

    Attributes:
        shared: their passes.
        held: they themselves, in the order of the passes' rows.
    """

    def __init__(self, model: PreTrainedModel, traits: ModelTraits, most: int, *, traces: bool, pack: bool) -> None:
        self.shared = SharedPasses(model, traits, most, traces=traces, pack=pack, renewed=self._renewed)
        self.held: list[Row] = []
        self._model, self._traits = model, traits
        self._busy = ExitStack()  # open while there are rows
        self._memory: Memory | None = None
        self._guard = Guard(apart=True)
        self._planners: dict[tuple[int, int | None, int], Planner] = {}
        self._planner: Planner | None = None
        self._changed = False  # rows have joined or left since the last pass

    def memory(self, strategy: DraftStrategy | None) -> Memory:
        """What drafts have learnt on the model, as far as a request of this strategy may know it."""
        if self._memory is None:
            self._memory = self._busy.enter_context(borrowed(self._model, self._traits.vocab_size, True))
        kept = self._memory
        if strategy is None or not strategy.remembers:
            kept = Memory(self._traits.vocab_size, notes=kept.notes, times=kept.times)
        recall(kept, self._model, strategy)
        return kept

    def read(self, rows: Sequence[Row]) -> None:
        """Let rows read their prompts, several in a pass, and join the others."""
        asked = [(row, row.asked) for row in rows]
        with self.shared.running():
            for group in groups([what for _, what in asked]):
                self._read_or_end([asked[at] for at in group])

    def _read_or_end(self, asked: Sequence[tuple[Row, Asked]]) -> None:
        try:
            self._read([row for row, _ in asked], [what for _, what in asked])
        except Exception as error:
            if len(asked) == 1:
                asked[0][0].close()
                asked[0][0].ticket.end(error=error)
                return
            for one in asked:  # which may have to answer for it
                self._read_or_end([one])

    def _read(self, rows: list[Row], asked: Sequence[Asked]) -> None:
        """Read prompts in one pass, and let their rows begin; what reading raises is raised before any has joined."""
        begin = perf_counter()
        view, scores = read(asked)
        prefill_ms = since_ms(begin)
        self.shared.join(view)
        for row in rows:
            row.seat.row = len(self.held)
            self.held.append(row)
        self._changed = True
        failed: dict[Row, Exception] = {}
        for row, said in zip(rows, scores, strict=True):
            _tried(failed, row, row.begin, said, prefill_ms, self._curve)
        for row in rows:
            if row in failed or row.done:
                self.leave(row, failed.get(row))

    def _curve(self) -> StepTimes:
        assert self._memory is not None  # there is a row
        return self.shared.curve(self._memory)

    def _renewed(self, spent_ms: float) -> None:
        """Passes over as many rows as there are now are run in another way."""
        planner = self._planner
        self._planners = {key: kept for key, kept in self._planners.items() if kept is planner}
        if planner is not None:
            planner.costs.renew(spent_ms)

    def _regroup(self) -> None:
        """Let the drafts of those rows that are here size their trees together."""
        self._changed = False
        sized = [row for row in self.held if row.planner is not None]
        self._planner = self._planner_of(sized[0]) if sized else None
        if self._planner is not None:
            self._planner.share_anew()
            for row in sized:
                row.follow(self._planner)

    def _planner_of(self, row: Row) -> Planner:
        own, strategy, count = row.planner, row.strategy, len(self.held)
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
                limits=self.shared,
                batch=count,
                most_nodes=strategy.max_nodes,
                nodes=strategy.nodes,
                expensive=own.expensive,
                guard=self._guard,
                anew=curve,
                apart=True,
            )
        return self._planners[key]

    def step(self) -> None:
        """Run one pass over all rows."""
        with self.shared.running():
            self._pass()

    def _pass(self) -> None:
        if self._changed:
            self._regroup()
        shared, planner, failed = self.shared, self._planner, dict[Row, Exception]()
        if planner is not None:
            planner.open(shared.context)
        begin = perf_counter()
        for row in list(self.held):
            if _tried(failed, row, row.draft) is None:
                self.leave(row, failed[row])
        if not self.held:
            return
        rows, trees = list(self.held), [row.tree for row in self.held]
        draft_ms, begin = since_ms(begin), perf_counter()
        try:
            parts = self._scored(rows, failed)
        except Exception as error:
            for row in rows:
                self.leave(row, error)
            return
        forward_ms, begin = since_ms(begin), perf_counter()
        paths = _decided(rows, parts, failed)
        verify_ms, begin = since_ms(begin), perf_counter()
        shared.keep(paths)
        for row, part, path in zip(rows, parts, paths, strict=True):
            if path.tokens:
                _tried(failed, row, row.learn, part, path)
        step = Step(trees, paths, draft_ms, forward_ms, verify_ms, since_ms(begin))
        if planner is not None and not self._changed:
            measured = step
            for noise in filter(None, (row.verifier.noise for row in rows)):
                measured = noise.without(measured)
            planner.observe(measured)
        shared.see(sum(map(len, trees)), forward_ms)
        for at, row in enumerate(rows):
            _tried(failed, row, row.see, step, at)
        for row in rows:
            if row in failed or row.done:
                self.leave(row, failed.get(row))

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

        wait = self.shared.launch([row.tree for row in rows], look)
        for row in rows:
            _tried(failed, row, row.catch_up)
        scores = wait()
        counts = counts or [0] * len(rows)
        ends = [sum(counts[: at + 1]) for at in range(len(rows))]
        beside = [scores.beside[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return [part_of(scores, at, row.tree, beside[at]) for at, row in enumerate(rows)]

    def leave(self, row: Row, error: Exception | None = None) -> None:
        """It is written, or ends with an error."""
        output = None
        if error is None:
            try:
                output = row.output()
            except Exception as failure:
                error = failure
        at = self.held.index(row)
        self.held[at] = self.held[-1]
        del self.held[-1]
        self.shared.drop(at)
        if at < len(self.held):
            self.held[at].seat.row = at
        self._changed = True
        row.close()
        row.ticket.end(output, error)

    def rest(self) -> None:
        """Give back what was borrowed, if nothing is written any more."""
        if not self.held:
            self._planner = self._memory = None
            self._planners.clear()
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

"""The rows that are being written: what sizes their trees, and the passes they share."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from time import perf_counter

from transformers import PreTrainedModel

from jacobi.loop import Stepper, since_ms
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.draft.guard import Guard
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory, borrowed
from lookahead.draft.planner import Planner
from lookahead.draft.strategy import DraftStrategy
from lookahead.generation.curves import curve_of
from lookahead.generation.memories import recall
from lookahead.generation.plan import Plan
from lookahead.generation.prefixes import Prefixes
from lookahead.models.mask_rules import mask_rules, shortest_window
from lookahead.models.traits import ModelTraits
from lookahead.runtime.open import open_shared
from lookahead.runtime.packed_layers import Invariance, Packed
from lookahead.runtime.session import kernels
from lookahead.runtime.tracing.schedule import Upgrades, faster_passes
from lookahead.runtime.tree import TreeModel
from lookahead.scheduling.parts import PromptParts
from lookahead.scheduling.prompts import MOST_TOKENS, Asked, groups, read
from lookahead.scheduling.row import Row, decide_together
from lookahead.strategies.automatic import AutomaticStrategy

# Nobody knows how long a scheduler will go on: as long again as it has, say the schedules of traces and of packing.
_NEW_TOKENS, _WRITTEN = 2, 1


class Rows:
    """Sequences that share passes, at most ``most``. What one of them does wrong ends it alone. Passes on a CPU may be
    traced (``traces``) and run on packed weights (``pack``).

    Attributes:
        held: they themselves, in the order of the passes' rows.
        unread: those whose prompts are still to be read, in the order in which they came.
    """

    def __init__(
        self, model: PreTrainedModel, traits: ModelTraits, most: int, prefixes: Prefixes, *, traces: bool, pack: bool
    ) -> None:
        self.held: list[Row] = []
        self.unread: list[Row] = []
        self._prefixes, self._parts = prefixes, PromptParts(prefixes)
        self._model, self._traits, self._most = model, traits, most
        on_cpu = traits.device.type == "cpu"
        self._traced, self._packs = traces and on_cpu, pack and on_cpu
        self._view: TreeModel | None = None  # while there are rows
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

    def kept(self, plan: Plan) -> Plan:
        """The plan of a request as shared passes keep it: with kept beginnings or windows, bits are not plain's."""
        limits = plan.bits.limits
        whole = limits and limits.singly and not self._prefixes.keeps
        if limits is None or (whole and shortest_window(self._traits, mask_rules(self._model, self._traits)) is None):
            return plan
        return replace(plan, bits=plan.bits.repeatable())

    def takes(self, plan: Plan) -> bool:
        """Whether passes that all rows share can keep what a plan does."""
        limits, rows = plan.bits.limits, [*self.held, *self.unread]
        return limits is None or all(row.plan.bits.limits in (None, limits) for row in rows)

    def read(self) -> None:
        """Let rows read their prompts and join the others: the shortest first, and before those that write go on, as
        many as fill a pass. A prompt that is longer is read in parts, each before another pass."""
        left = MOST_TOKENS
        with kernels() if self.unread else nullcontext():
            waiting = self._parts.read_long(self.unread, self.leave)
            while left > 0 and (rows := [row for row in self.unread if row not in waiting]):
                asked = [self._parts.asked(row) for row in rows]
                group = min(groups(asked), key=lambda group: max(asked[at].length for at in group))
                rows, asked = [rows[at] for at in group], [asked[at] for at in group]
                common = self._parts.common(rows, asked)
                left -= sum(one.length for one in asked) if common is None else common.length
                if common is None or not self._parts.read(rows[0], common, self.leave):
                    self._read_or_end(rows, asked)

    def _read_or_end(self, rows: Sequence[Row], asked: Sequence[Asked]) -> None:
        try:
            self._read(rows, asked)
        except Exception as error:
            if len(rows) == 1:
                self.leave(rows[0], error)
                return
            for row, one in zip(rows, asked, strict=True):  # which may have to answer for it
                self._read_or_end([row], [one])

    def _read(self, rows: Sequence[Row], asked: Sequence[Asked]) -> None:
        """Read prompts in one pass, and let their rows begin; what reading raises is raised before any has joined."""
        begin = perf_counter()
        view, scores = read(asked, self._prefixes)
        for at, (row, one) in enumerate(zip(rows, asked, strict=True)):
            self._parts.begin(row, one)
            self._parts.keep(row, view, at)
        prefill_ms = since_ms(begin)
        shared, joined = self._joined(view, rows[0].plan.bits.limits), len(self.held)
        self.held += rows
        self.unread = [row for row in self.unread if row not in rows]
        self._changed = True
        for at, row in enumerate(rows, joined):
            row.join(shared, at, self._curve)
        step = self._stepper.settle(rows, scores, 0.0, prefill_ms, first=True, kept=True)
        for row in rows:
            row.see(step)
            row.catch_up()
        self._let_go(rows)

    def _joined(self, read: TreeModel, limits: Invariance | None) -> TreeModel:
        """The shared passes, now also over the sequences whose prompts were read, and within their ``limits``."""
        if self._view is not None:
            self._view.join(read, self._most)
            forward = self._view.forward_pass
            if limits is not None and forward.limits is None:
                forward.use(Packed({} if forward.packed is None else forward.packed.parts, limits))
            return self._view
        traced, packed = faster_passes(self._model, self._traits, traces=self._traced, packs=self._packs, limits=limits)
        view = open_shared(read, traced, packed)
        self._stepper = Stepper(view, self.held, self._catch_up, decide_together)
        self._upgrades = Upgrades(self._model, view, self._packs, _NEW_TOKENS, self._renewed)
        self._view = view
        return view

    def _catch_up(self) -> None:
        for row in self.held:
            row.catch_up()

    def _curve(self) -> StepTimes:
        assert self._memory is not None and self._view is not None  # there is a row
        return curve_of(self._model, self._view, self._memory.times, False, self._traits)

    def _renewed(self, spent_ms: float) -> None:
        """Passes over as many rows as there are now are run in another way."""
        planner = self._planner
        self._planners = {key: kept for key, kept in self._planners.items() if kept is planner}
        if planner is not None:
            planner.costs.renew(spent_ms)

    def _regroup(self) -> None:
        """Let the drafts of those rows that are here size their trees together."""
        self._changed = False
        sized = [row for row in self.held if row.drafts.planner is not None]
        self._planner = self._planner_of(sized[0]) if sized else None
        if self._planner is not None:
            self._planner.share_anew()
            for drafter in (each for row in sized for each in row.drafts.drafters):
                if isinstance(drafter, AutomaticDrafter):
                    drafter.follow(self._planner)

    def _planner_of(self, row: Row) -> Planner:
        own, strategy, count = row.drafts.planner, row.plan.strategy, len(self.held)
        assert own is not None and isinstance(strategy, AutomaticStrategy) and self._view is not None
        if count == 1:
            return own
        key = count, strategy.nodes, strategy.max_nodes
        if key not in self._planners:
            known = {"limits": self._view, "batch": count, "expensive": own.expensive, "guard": self._guard}
            self._planners[key] = strategy.planner(self._curve, own.acceptance, **known)
        return self._planners[key]

    def step(self) -> None:
        """Run one pass over all rows."""
        if self._changed:
            self._regroup()
        rows, planner = list(self.held), self._planner
        if planner is not None and self._view is not None:
            planner.open(self._view.context)
        try:
            with kernels():
                step = self._stepper.step()
        except Exception as error:
            for row in rows:
                self.leave(row, row.error or error)
            return
        if planner is not None:
            measured = step
            for noise in filter(None, (row.verifier.noise for row in rows)):
                measured = noise.without(measured)
            planner.observe(measured)
        self._upgrades.buy(sum(map(len, step.trees)), step.forward_ms, _WRITTEN)
        for row in rows:
            row.see(step)
        self._let_go(rows)

    def _let_go(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.done:
                self.leave(row, row.error)

    def leave(self, row: Row, error: Exception | None = None) -> None:
        """It is written, or ends with an error; the last row takes its place."""
        if row in self.unread:
            self.unread.remove(row)
            row.end(error=error)
            return
        view, at = self._view, self.held.index(row)
        assert view is not None  # there is a row
        output = None
        if error is None:
            try:
                output = row.output(lambda cache: view.store(cache, at))
                self._parts.keep(row, view, at)
            except Exception as failure:
                error = failure
        self.held[at] = self.held[-1]
        del self.held[-1]
        view.drop(at)
        if at < len(self.held):
            self.held[at].seat.row = at
        self._changed = True
        if not self.held:
            view.close()
            self._view = self._planner = None
            self._planners.clear()
            del self._stepper, self._upgrades
        row.end(output, error)

    def rest(self) -> None:
        """Give back what was borrowed, if nothing is written any more."""
        if not (self.held or self.unread):
            self._memory = None
            self._busy.close()

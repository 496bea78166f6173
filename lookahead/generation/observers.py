"""Per-pass observers of a call: statistics, the planner, the schedule of traces, the streamer."""

from typing import Literal

from jacobi import Step
from lookahead.draft.context import Drafts
from lookahead.generation.call import Call
from lookahead.generation.drafting import DraftedModel
from lookahead.generation.watch import PassRecords
from lookahead.runtime.tree import TreeModel
from lookahead.runtime.upgrades import Upgrades
from lookahead.stats import DecodingStats
from lookahead.verify.noise import Noise
from lookahead.verify.sequences import Sequences
from lookahead.verify.streams import Stream


class Observers:
    """What looks at every pass of a call; ``stats`` is what was counted, None where nothing is."""

    def __init__(
        self,
        call: Call,
        sequences: Sequences,
        model: DraftedModel,
        drafts: Drafts,
        detail: Literal["none", "summary", "detailed"],
        packs: bool,
        watched: PassRecords | None,
        stream: Stream | None,
        noise: Noise | None,
    ) -> None:
        self.stats = None if detail == "none" else DecodingStats()
        self._sequences = sequences
        self._model = model
        self._drafts = drafts
        self._planner = planner = drafts.planner
        self._noise = noise
        self._detailed = detail == "detailed"
        self._upgrades: Upgrades | None = None
        if isinstance(model, TreeModel):
            renewed = [] if planner is None else [planner.costs.renew]
            self._upgrades = Upgrades(call.model, model, packs, sequences.most_new, *renewed)
        self._stream = stream
        self._first = True
        self._before = [0] * sequences.batch
        self._watched = watched
        self._seen = [0] * sequences.batch
        self._uncounted: Step | None = None

    def see(self, step: Step) -> None:
        """Take in a pass, as far as the next draft depends on it."""
        self._uncounted = step
        sequences, planner = self._sequences, self._planner
        if self._watched is not None:
            self._tell(self._watched, step)
        measured = step if self._noise is None else self._noise.without(step)
        if planner is not None and not self._first:
            planner.observe(measured)
        goes_on = not all(sequences.finished)
        if self._upgrades is not None and goes_on:
            nodes = 0 if self._first else sum(map(len, step.trees))
            self._upgrades.see(nodes, step.forward_ms, max(sequences.lengths()))
        if planner is not None and goes_on:
            planner.open(self._model.context)
            sequences.in_step = planner.in_step
        self._first = False

    def _tell(self, watched: PassRecords, step: Step) -> None:
        before, self._seen = self._seen, self._sequences.lengths()
        lines = zip(self._sequences.written, before, self._seen, strict=True)
        watched.see(step, [written[then:now] for written, then, now in lines])

    def catch_up(self) -> None:
        """Do what no draft waits for: put tokens into the stream, and count the pass seen last."""
        waits = self._first and self._watched is not None  # who watches is told of the prompt's pass before the stream
        if self._stream is not None and not waits:
            self._stream.flush()
        step, self._uncounted = self._uncounted, None
        if step is not None and self.stats is not None:
            after = self._sequences.lengths()
            written = [max(0, now - then) for now, then in zip(after, self._before, strict=True)]
            self.stats.count(step, written, first=not self.stats.steps, detailed=self._detailed)
            self._before = after

    def close(self) -> None:
        self.catch_up()
        if self._stream is not None:
            self._stream.close()
        if self.stats is not None:
            self.stats.fed_again = self._model.replayed
            if self._planner is not None:
                costs, (credited, by_noise) = self._planner.costs, self._drafts.credits()
                spent = {"single_ms": costs.single_ms, "own_ms": costs.own_ms, "timed_ms": costs.timed_ms}
                self.stats.add_plan(credited, self._planner.asked_ms, **spent, by_noise=by_noise)

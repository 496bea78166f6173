"""Per-pass observers of a group: statistics, the streamer, and whoever watches."""

from collections.abc import Sequence
from itertools import count

from jacobi import Drafter, Step
from lookahead.draft.strategy import Stats
from lookahead.generation.watch import Watcher, record
from lookahead.stats import DecodingStats
from lookahead.verify.sequences import Sequences
from lookahead.verify.streams import Stream


class Observers:
    """What looks at every pass of a group; ``stats`` is what was counted, None where nothing is."""

    def __init__(
        self,
        sequences: Sequences,
        detail: Stats,
        stream: Stream | None,
        drafters: Sequence[Drafter],
        watcher: Watcher | None,
    ) -> None:
        self.stats = None if detail == "none" else DecodingStats()
        self._sequences, self._drafters = sequences, drafters
        self._detailed = detail == "detailed"
        self._stream, self._watcher = stream, watcher
        self._numbers = count()  # of passes
        self._waits = watcher is not None  # who watches is told of the prompt's pass before the stream
        self._seen = [0] * sequences.batch  # tokens, before the pass seen last
        self._uncounted: tuple[Step, list[list[int]]] | None = None  # the pass seen last, and what it wrote

    def see(self, step: Step) -> None:
        """Take in a pass, and tell of it whoever watches."""
        before, self._seen = self._seen, self._sequences.lengths()
        lines = zip(self._sequences.written, before, self._seen, strict=True)
        written = [line[then:now] for line, then, now in lines]
        self._uncounted, self._waits = (step, written), False
        if self._watcher is not None:
            self._watcher(record(next(self._numbers), self._drafters, step, written))

    def catch_up(self) -> None:
        """Do what no draft waits for: put tokens into the stream, and count the pass seen last."""
        if self._stream is not None and not self._waits:
            self._stream.flush()
        seen, self._uncounted = self._uncounted, None
        if seen is not None and self.stats is not None:
            step, written = seen
            self.stats.count(step, list(map(len, written)), first=not self.stats.steps, detailed=self._detailed)

    def close(self) -> None:
        self.catch_up()
        if self._stream is not None:
            self._stream.close()

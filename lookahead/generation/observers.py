"""Per-pass observers of a group: statistics, the streamer, and whoever watches."""

from jacobi import Step
from lookahead.draft.strategy import Stats
from lookahead.generation.watch import PassRecords
from lookahead.stats import DecodingStats
from lookahead.verify.sequences import Sequences
from lookahead.verify.streams import Stream


class Observers:
    """What looks at every pass of a group; ``stats`` is what was counted, None where nothing is."""

    def __init__(self, sequences: Sequences, detail: Stats, stream: Stream | None, watched: PassRecords | None) -> None:
        self.stats = None if detail == "none" else DecodingStats()
        self._sequences = sequences
        self._detailed = detail == "detailed"
        self._stream = stream
        self._watched = watched
        self._first = True
        self._seen, self._counted = [0] * sequences.batch, [0] * sequences.batch  # tokens, by watchers and statistics
        self._uncounted: Step | None = None

    def see(self, step: Step) -> None:
        """Take in a pass, and tell of it whoever watches."""
        self._uncounted, self._first = step, False
        if self._watched is not None:
            before, self._seen = self._seen, self._sequences.lengths()
            lines = zip(self._sequences.written, before, self._seen, strict=True)
            self._watched.see(step, [written[then:now] for written, then, now in lines])

    def catch_up(self) -> None:
        """Do what no draft waits for: put tokens into the stream, and count the pass seen last."""
        waits = self._first and self._watched is not None  # who watches is told of the prompt's pass before the stream
        if self._stream is not None and not waits:
            self._stream.flush()
        step, self._uncounted = self._uncounted, None
        if step is not None and self.stats is not None:
            after = self._sequences.lengths()
            written = [max(0, now - then) for now, then in zip(after, self._counted, strict=True)]
            self.stats.count(step, written, first=not self.stats.steps, detailed=self._detailed)
            self._counted = after

    def close(self) -> None:
        self.catch_up()
        if self._stream is not None:
            self._stream.close()

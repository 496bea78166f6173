"""Who looks at every pass of a call: statistics, the planner of sizes, who makes traces, the streamer."""

import torch
from transformers.generation.streamers import BaseStreamer

from jacobi import Step
from lookahead.draft.planner import Planner
from lookahead.draft.rest import Mode
from lookahead.runtime.linear import ChainModel
from lookahead.runtime.tracing.record import CallTraces
from lookahead.runtime.tree import FusedModel
from lookahead.sources.recycling import BEST
from lookahead.stats import DecodingStats
from lookahead.verify.sequences import Sequences


class Readers:
    """What looks at every pass: statistics, the planner of sizes, who makes traces, the streamer."""

    def __init__(
        self,
        sequences: Sequences,
        fused: FusedModel | ChainModel,
        stats: DecodingStats | None,
        planner: Planner | None,
        traced: CallTraces | None,
        streamer: BaseStreamer | None,
        *,
        detailed: bool,
    ) -> None:
        self._sequences = sequences
        self._fused = fused
        self._stats = stats
        self._planner = planner
        self._traced = traced
        self._streamer = streamer
        self._streaming = None if streamer is None else _Streaming(streamer, sequences)
        self._detailed = detailed
        self._first = True
        self._before = [0] * sequences.batch

    def read(self, step: Step) -> None:
        """Take in one pass."""
        if self._stats is not None:
            after = self._sequences.lengths()
            written = [now - then for now, then in zip(after, self._before, strict=True)]
            self._stats.count(step, written, first=self._first, detailed=self._detailed)
            self._before = after
        if self._planner is not None and not self._first:
            self._planner.observe(step)
        if self._streaming is not None:
            self._streaming.flush()
        if self._traced is not None and not all(self._sequences.finished):
            self._traced.look(max(self._sequences.lengths()))
        if self._planner is not None:
            self._planner.open(self._fused.context)
            self._fused.harvest = 0 if self._planner.mode is Mode.REST else BEST
        self._first = False

    def close(self) -> None:
        """All is written."""
        if self._streamer is not None:
            self._streamer.end()


class _Streaming:
    """Reads steps and puts every index that all rows have written, one 1-D tensor each, as ``generate`` does."""

    def __init__(self, streamer: BaseStreamer, sequences: Sequences) -> None:
        self._streamer = streamer
        self._sequences = sequences
        self._put = 0

    def flush(self) -> None:
        """Put what has become complete."""
        sequences = self._sequences
        everything = all(sequences.finished)
        lengths = [len(row) for row in sequences.written]
        going = [n for n, done in zip(lengths, sequences.finished, strict=True) if not done]
        complete = max(lengths) if everything else min(going)
        for index in range(self._put, complete):
            tokens = [row[index] if index < len(row) else sequences.pad for row in sequences.written]
            self._put = index + 1
            self._streamer.put(torch.tensor(tokens))

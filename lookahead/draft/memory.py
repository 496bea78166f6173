"""What drafts learn on a model, kept from call to call for as long as the model lives. None of it touches the text: a
table of likely next tokens, counts of what was right, latency curves. A call borrows the memory and brings it back; of
two calls at the same time the second starts afresh."""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lookahead._per_model import MOST_KINDS, PerModel
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.guard import ExpensiveSources, Guard
from lookahead.draft.latency import StepTimes
from lookahead.sources import Source, SuccessorTable
from lookahead.sources.learned import Learned, Notes
from lookahead.sources.recycling import DRAWN_BEST

Key = tuple[Hashable, Hashable]  # sources, and the way of choosing, under which something was learnt


@dataclass
class Memory:
    """One model's: estimates by what they were learnt under (sources, way of choosing), and latency curves."""

    vocab_size: int  # of the model, when this was made
    file: Path | None = None  # what was recalled; None = nothing yet
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of acceptance, that it gave, by sources
    notes: Notes | None = None  # what the model says where it writes, if that is gathered
    table: SuccessorTable = field(init=False)
    acceptances: dict[Key, Acceptance] = field(default_factory=dict)  # the last used last
    expensive: dict[Key, ExpensiveSources] = field(default_factory=dict)
    guards: dict[tuple[Key, int], Guard] = field(default_factory=dict)
    times: dict[tuple[Hashable, ...], StepTimes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = SuccessorTable(vocab_size=self.vocab_size)

    def acceptance(self, key: Key, sources: Sequence[Source], trust: float) -> Acceptance:
        """The estimates for ``key``; new ones start from those last used for the sources."""
        known = self.acceptances.pop(key, None)
        if known is None:
            near = [other for (same, _), other in self.acceptances.items() if same == key[0]]
            known = near[-1].copy(trust) if near else Acceptance(sources, trust)
            fitted = self.weights.get(named(key[0]), ())
            if not near and len(fitted) == len(known.weights):
                known.weights = list(fitted)
        self.acceptances[key] = known
        if len(self.acceptances) > MOST_KINDS:
            del self.acceptances[next(iter(self.acceptances))]
        return known

    def recall(self, file: Path, learned: Learned) -> None:
        """Start from what a file holds."""
        self.file, self.weights, self.table = file, learned.weights, learned.table(self.vocab_size, DRAWN_BEST)

    def learned(self) -> Learned:
        """What was gathered, and the weights that were learnt last for each choice of sources."""
        fitted = {named(sources): known.weights for (sources, _), known in self.acceptances.items()}
        return (self.notes or Notes()).learned(fitted)

    def expensive_sources(self, key: Key) -> ExpensiveSources:
        """What is known under ``key`` of sources that cost time, for as long as its estimates are kept."""
        self.expensive = {kept: known for kept, known in self.expensive.items() if kept in self.acceptances}
        return self.expensive.setdefault(key, ExpensiveSources())

    def guard(self, key: Key, batch: int) -> Guard:
        """What is known under ``key``, for so many sequences, of whether drafting pays; kept as its estimates are."""
        self.guards = {kept: known for kept, known in self.guards.items() if kept[0] in self.acceptances}
        return self.guards.setdefault((key, batch), Guard(batch))


def named(sources: Hashable) -> str:
    """Sources, as a key of theirs names them, in a file."""
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:16]


_memories: PerModel[Memory] = PerModel(lambda: Memory(0))


@contextmanager
def borrowed(model: object, vocab_size: int, remember: bool) -> Iterator[Memory]:
    """The model's memory while the block runs; an empty one if another call has it, or the vocabulary was another.
    Without ``remember`` only latency curves, which are the machine's, are shared."""
    kept = _memories.take(model)
    if kept is None or kept.vocab_size != vocab_size:
        kept = Memory(vocab_size)
    try:
        yield kept if remember else Memory(vocab_size, notes=kept.notes, times=kept.times)
    finally:
        _memories.put(model, kept)


def exchange(model: object, other: Memory | None = None) -> Memory | None:
    """Give the model another memory, or None for a blank one; returns the one it had."""
    before = _memories.take(model)
    if other is not None:
        _memories.put(model, other)
    return before

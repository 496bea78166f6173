"""What drafts learn on a model, kept from call to call for as long as the model lives.

None of it touches the text: a table of likely successors, counts of what was right, step times. A call borrows the
memory and brings it back; calls that run at the same time do not share it, and the second one starts afresh.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from lookahead.draft.acceptance import Acceptance
from lookahead.draft.expensive_sources import CostlySources
from lookahead.draft.latency import StepTimes
from lookahead.models.traits import vocabulary
from lookahead.sources import Source, SuccessorTable

_MOST_MODES = 16


@dataclass
class Memory:
    """One model's.

    Attributes:
        vocab_size: of the model, when it was made.
        table: the model's best successors after what it has seen.
        acceptances: estimates by what they were learnt under: sources, and how tokens are chosen.
        costly: what is known of sources that cost time, by the same.
        times: step-time curves, by what they depend on.
    """

    vocab_size: int
    table: SuccessorTable = field(default_factory=SuccessorTable)
    acceptances: "OrderedDict[tuple[Hashable, Hashable], Acceptance]" = field(default_factory=OrderedDict)
    costly: dict[tuple[Hashable, Hashable], CostlySources] = field(default_factory=dict)
    times: dict[tuple[Hashable, ...], StepTimes] = field(default_factory=dict)

    def acceptance(self, key: tuple[Hashable, Hashable], sources: Sequence[Source], trust: float) -> Acceptance:
        """The estimates for ``key`` (sources, way of choosing); new ones start from those last used for the sources.

        Args:
            key: what they are learnt under.
            sources: in their order.
            trust: how far new estimates are believed at first (see :class:`lookahead.draft.acceptance.Acceptance`).
        """
        known = self.acceptances.pop(key, None)
        if known is None:
            near = [other for (same, _), other in self.acceptances.items() if same == key[0]]
            known = near[-1].copy(trust) if near else Acceptance(sources, trust)
        self.acceptances[key] = known
        while len(self.acceptances) > _MOST_MODES:
            self.acceptances.popitem(last=False)
        return known

    def costly_sources(self, key: tuple[Hashable, Hashable]) -> CostlySources:
        """What is known under ``key`` of sources that cost time, for as long as its estimates are kept."""
        self.costly = {kept: known for kept, known in self.costly.items() if kept in self.acceptances}
        return self.costly.setdefault(key, CostlySources())


_lock = threading.Lock()
_memories: "weakref.WeakKeyDictionary[PreTrainedModel, Memory]" = weakref.WeakKeyDictionary()


@contextmanager
def borrowed(model: PreTrainedModel, remember: bool) -> Iterator[Memory]:
    """The model's memory while the block runs; an empty one if another call has it, or the vocabulary was another.

    Args:
        model: the model.
        remember: use and keep what drafts learnt; otherwise only step times, which are the machine's, are shared.
    """
    vocab_size = vocabulary(model)
    with _lock:
        kept = _memories.pop(model, None)
    if kept is None or kept.vocab_size != vocab_size:
        kept = Memory(vocab_size)
    try:
        yield kept if remember else Memory(vocab_size, times=kept.times)
    finally:
        with _lock:
            _memories.setdefault(model, kept)


def forget(model: PreTrainedModel) -> None:
    """Drop what was learnt on a model."""
    with _lock:
        _memories.pop(model, None)

"""What a strategy knows of a call, and what it brings to it."""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jacobi import Drafter
from jacobi import Wants as Wants
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.draft.pass_costs import ModelLimits
from lookahead.draft.planner import Planner
from lookahead.models.hidden_states import HiddenStates
from lookahead.sources.perturbed import Draw


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a drafter may know of its sequence, row ``index`` of the batch."""

    prompt: Sequence[int]  # without padding
    vocab_size: int
    pad: int
    end_tokens: frozenset[int]
    rng: random.Random  # seeded if the strategy is
    index: int = 0
    chain: bool = False  # the model can only be given one branch a pass, see lookahead.runtime.linear
    draw: Draw | None = None  # how tokens are drawn; None = they are not, or nobody can know
    chance: Draw | None = None  # what happens to the logits of candidates drawn by chance; None = none are


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a strategy may know of a call."""

    model: Any
    rows: Sequence[RowContext]
    memory: Memory  # what drafts learnt on the model before; may be empty
    choice: Hashable  # stands for processors and sampling: acceptance is learnt separately for each
    new_tokens: int  # that the call writes at most
    trust: float  # how far estimates are believed for this choice before anything is learnt, from 0 to 1
    limits: ModelLimits  # what passes over the model allow and cost
    curve: Callable[[], StepTimes]  # finds the latency curve of passes as they are run now
    closing: Callable[[Callable[[], None]], object]  # is told what to call when the call is over, even by an error
    hidden: HiddenStates | None = None  # of the last pass, if the strategy wants them
    sources: Sequence[Callable[[RowContext], Any]] = ()  # of processors that know what may follow


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a strategy brings to a call: one drafter a sequence, and a planner if sizes are chosen while decoding."""

    drafters: Sequence[Drafter]
    planner: Planner | None = None

    def credits(self) -> tuple[Counter[str], int]:
        """Accepted tokens by source, and how many were not the likeliest, but for the noise."""
        mine = [drafter for drafter in self.drafters if isinstance(drafter, AutomaticDrafter)]
        return sum((drafter.credited for drafter in mine), Counter()), sum(drafter.by_noise for drafter in mine)

    def catch_up(self) -> None:
        """Let drafters learn what the next drafts do not wait for."""
        for drafter in self.drafters:
            if isinstance(drafter, AutomaticDrafter):
                drafter.catch_up()

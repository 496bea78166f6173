"""Latency curves and sources for tests of the automatic mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.models import prompts, same_as_plain

from jacobi import Path, Successors, TokenTree
from lookahead import DecodingStats, Lookahead, LookaheadOutput
from lookahead.draft import memory
from lookahead.draft.context import RowContext
from lookahead.draft.latency import NODES, StepTimes
from lookahead.draft.memory import Memory

NAMES = ("recycling", "suffix", "pool")


def curve(slope: float, first: float = 1.0, step: float = 0.0) -> StepTimes:
    """A straight curve, well known; more than one node may cost a step more."""
    times = StepTimes()
    for nodes in NODES:
        for _ in range(4):
            times.add(nodes, 64, first + slope * (nodes - 1) + step * (nodes > 1))
    return times


FLAT = curve(0.0)
STEEP = curve(3.0)
USUAL = curve(0.03)


class Oracle:
    """A source of the user's own: knows the text of ``counting_model``, and says that it is nearly sure."""

    name = "oracle"
    priors = (0.9,)

    def __init__(self, row: RowContext) -> None:
        self.row = row
        self.last = 0
        self.passes = 0

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        assert list(prompt) == list(self.row.prompt)
        self.last = prompt[-1]

    def root(self) -> int:
        return self.last

    def step(self, state: int, token: int) -> int:
        return token

    def propose(self, state: int) -> list[tuple[int, int]]:
        return [(state % 7 + 1, 0)]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.passes += 1
        self.last = path.tokens[-1]


def nodes_of(stats: DecodingStats) -> list[list[int]]:
    """Drafted nodes of each pass after the prompt's, by row."""
    return [[nodes - 1 for nodes in record["nodes"]] for record in stats.passes[1:]]


def drafted(model: Any, strategy: Lookahead, batch: int = 1, **settings: Any) -> DecodingStats:
    """What a call does, its text checked."""
    output = same_as_plain(model, prompts(batch), strategy, **{"max_new_tokens": 36} | settings)
    assert isinstance(output, LookaheadOutput)
    assert output.stats is not None
    return output.stats


@dataclass(kw_only=True)
class Limits:
    """What a model that replays ``again`` tokens tells the planner."""

    again: int = 0
    replays: bool = False
    plain_ms: float | None = None
    typical: bool = True
    repeated: int | None = None
    in_a_row: int = 0

    def bucket(self, nodes: int) -> int:
        return nodes


def memory_of(model: Any) -> Memory:
    """What drafts learnt on a model, which keeps it."""
    kept = memory._memories.take(model)
    assert kept is not None
    memory._memories.put(model, kept)
    return kept

"""Decoding on a virtual clock: texts whose candidates are right with given chances, machines with given curves."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from helpers.automatic import Limits

from jacobi import Path, Step, Successors, TokenTree, walk
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.draft.guard import Guard
from lookahead.draft.latency import StepTimes
from lookahead.draft.planner import Planner

FIXED = (0, 2, 4, 8, 16, 32, 64)
CALLS = 12

# How likely the first, second and third candidate are, from the surest state of a text to the one without a clue.
STATES = ((0.96, 0.02, 0.01), (0.72, 0.12, 0.05), (0.4, 0.15, 0.08), (0.15, 0.08, 0.04), (0.02, 0.01, 0.01))
# The states' shares in a class of texts, and how many tokens a state lasts on average.
CLASSES = {
    "looping": ((0.85, 0.08, 0.04, 0.02, 0.01), 12.0),
    "code": ((0.35, 0.2, 0.2, 0.15, 0.1), 3.0),
    "prose": ((0.08, 0.17, 0.3, 0.3, 0.15), 2.0),
    "hot": ((0.0, 0.02, 0.13, 0.45, 0.4), 2.0),
    "random": ((0.0, 0.0, 0.0, 0.0, 1.0), 1.0),
}
NO_CANDIDATE = len(STATES[0])  # the token of a text that nobody proposed


@dataclass
class Text:
    """One sequence's text: the state at every token, and which candidate is right."""

    states: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, kind: str, seed: str, length: int) -> "Text":
        rng = random.Random(f"{kind} {seed}")
        shares, lasts = CLASSES[kind]
        states: list[int] = []
        while len(states) < length:
            state = rng.choices(range(len(STATES)), shares)[0]
            states += [state] * (1 + int(rng.expovariate(1.0) * lasts))
        ranks = range(NO_CANDIDATE + 1)
        tokens = [rng.choices(ranks, [*STATES[state], 1.0 - sum(STATES[state])])[0] for state in states]
        return cls(states, tokens)


class TextSource:
    """Candidates for every node, on the text or off it, of the text's states; a kind is a state and a rank."""

    name = "text"
    priors = tuple(prior for _ in STATES for prior in (0.5, 0.15, 0.08))

    def __init__(self, text: Text) -> None:
        self.text = text
        self.at = 0
        self.asked = 0

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        pass

    def root(self) -> int:
        return self.at

    def step(self, state: int, token: int) -> int:
        return state + 1

    def propose(self, state: int) -> list[tuple[int, int]]:
        self.asked += 1
        kind = NO_CANDIDATE * self.text.states[state]
        return [(rank, kind + rank) for rank in range(NO_CANDIDATE)]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self.at += len(path.tokens)


@dataclass
class Machine(Limits):
    """Passes over so many nodes of each sequence take ``curve(nodes, context)`` milliseconds on average.

    Attributes:
        buckets: sizes that passes are rounded up to; none = every size is computed as it is.
        warms_up: each bucket first takes a pass of 25 ms, one of 200 and one of 30.
        noise: of the logarithm of what is measured; every hundredth pass takes ten times as long.
        touch: times what the first pass of a size takes.
        drift: the machine becomes so much slower and faster again, in the course of 500 passes.
        steps: several nodes take other kernels than one, see :class:`StepTimes`.
        apart: milliseconds more that passes take where sequences are out of step.
        ask: milliseconds that it takes to ask a sequence's sources for a tree.
    """

    curve: Callable[[int, int], float]
    buckets: tuple[int, ...] = ()
    warms_up: bool = False
    steps: bool = False
    noise: float = 0.15
    touch: float = 3.0
    drift: float = 0.15
    apart: float = 0.0
    ask: float = 0.0
    seed: int = 0
    passes: int = 0
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def bucket(self, nodes: int) -> int:
        return self.buckets[bisect_left(self.buckets, nodes)] if self.buckets else nodes

    def fair(self, nodes: int, context: int, apart: bool) -> float:
        return self.curve(self.bucket(nodes), context) + self.apart * apart

    def run(self, nodes: int, context: int, apart: bool) -> float:
        """What a pass is seen to take."""
        size = self.bucket(nodes)
        self.passes += 1
        before = self.seen[size] = self.seen.get(size, -1) + 1
        self.typical = not (self.warms_up and before < 3)
        if not self.typical:
            return (25.0, 200.0, 30.0)[before]
        rng = self._rng
        slow = 10.0 if rng.random() < 0.01 else 1.0 if before else self.touch
        drift = 1.0 + self.drift * math.sin(self.passes / 80.0)
        return self.fair(nodes, context, apart) * slow * drift * math.exp(rng.gauss(0.0, self.noise))


def knots(**times: float) -> Callable[[int, int], float]:
    """A curve through ``t1=..., t8=...``, straight in between and from the last two on."""
    points = [(int(name[1:]), ms) for name, ms in times.items()]

    @cache
    def curve(nodes: int, context: int) -> float:
        for (low, first), (high, last) in pairwise(points):
            if nodes <= high or high == points[-1][0]:
                return first + (last - first) * (nodes - low) / (high - low)
        return points[0][1]

    return curve


GPU_BUCKETS = (1, 8, 16, 32, 64, 128, 192)
MACHINES: dict[str, Callable[[], Machine]] = {
    "flat": lambda: Machine(
        knots(t1=5.0, t8=5.2, t32=6.0, t64=7.0, t128=9.0), GPU_BUCKETS, warms_up=True, steps=True, noise=0.05
    ),
    "steep": lambda: Machine(knots(t1=10.0, t8=15.0, t16=22.0, t64=50.0)),
    "steps": lambda: Machine(knots(t1=10.0, t8=12.0, t16=13.0, t32=17.0, t64=25.0, t128=45.0), GPU_BUCKETS, steps=True),
    "bumpy": lambda: Machine(knots(t1=10.0, t2=16.0, t4=15.5, t5=12.5, t8=13.0, t16=16.0, t64=35.0)),
    # An H200 and a small model in float32.
    "falling": lambda: Machine(
        knots(t1=0.75, t8=2.25, t16=1.9, t32=1.13, t64=1.15, t128=1.4), GPU_BUCKETS, warms_up=True, steps=True
    ),
    "dear": lambda: Machine(knots(t1=10.0, t2=18.0, t64=600.0)),
}
BATCHES: dict[str, tuple[int, Callable[[], Machine]]] = {
    "4": (4, lambda: Machine(knots(t1=10.0, t2=11.5, t4=14.5, t8=21.0, t64=110.0), apart=0.3, ask=0.3)),
    "4, recurrent": (4, lambda: Machine(knots(t1=4.0, t2=8.0, t128=30.0), steps=True, apart=0.3, ask=0.2)),
    "16": (16, lambda: Machine(knots(t1=10.0, t2=15.0, t4=24.0, t8=42.0, t64=300.0), apart=0.5, ask=0.2)),
}


@dataclass
class Run:
    """What a call has written, and its passes: width, context, and whether its sequences were out of step."""

    tokens: int
    host_ms: float = 0.0
    asked: int = 0  # sequences' sources, for a tree
    passes: list[tuple[int, int, bool]] = field(default_factory=list)

    def ms(self, machine: Machine) -> float:
        """What it takes on average, warming up not counted."""
        return self.host_ms + machine.ask * self.asked + sum(machine.fair(*each) for each in self.passes)


HOST_MS = 0.01  # for each node that is asked for candidates


def decode(machine: Machine, planner: Planner, texts: Sequence[Text], tokens: int) -> Run:
    """One call: every text is written up to ``tokens``."""
    run, sources = Run(tokens), [TextSource(text) for text in texts]
    drafters = [AutomaticDrafter([], [source], planner) for source in sources]
    for drafter, source in zip(drafters, sources, strict=True):
        drafter.learn(TokenTree(0), [0], Path([0], [source.text.tokens[0]]))
    while rows := [row for row, source in enumerate(sources) if source.at < tokens]:
        places = [source.at for source in sources]
        context, apart = 64 + max(places), len(set(places)) > 1
        planner.open(context)
        asked = [source.asked for source in sources]
        trees = [TokenTree(0) for _ in texts]
        for row in rows:
            trees[row] = drafters[row].draft(tokens - places[row] - 1)
        counts = [source.asked - before for source, before in zip(sources, asked, strict=True)]
        host_ms, trees_grown = HOST_MS * sum(counts), sum(count > 0 for count in counts)
        draft_ms = host_ms + machine.ask * trees_grown
        width = max(map(len, trees))
        taken = machine.run(width, context, apart)
        paths = [Path() for _ in trees]
        for row in [row for row in rows if not planner.in_step or places[row] == min(places)]:
            paths[row] = _followed(trees[row], sources[row])
            drafters[row].learn(trees[row], [], paths[row])
        run.host_ms += host_ms
        run.asked += trees_grown
        run.passes.append((width, context, apart))
        planner.observe(Step(trees, paths, draft_ms, taken, 0.0, 0.0))
    return run


def _followed(tree: TokenTree, source: TextSource) -> Path:
    start, text = source.at, source.text.tokens
    return walk(tree, lambda node: text[start + tree.depths[node]], lambda token: False)


def calls(kind: str, batch: int, seed: int, count: int = CALLS) -> list[tuple[list[Text], int]]:
    """The texts of each call, and how long they become: 100 to 200 tokens."""
    rng = random.Random(f"{kind} {seed}")
    lengths = [rng.randint(100, 200) for _ in range(count)]
    return [
        ([Text.of(kind, f"{seed} {call} {row}", length + 200) for row in range(batch)], length)
        for call, length in enumerate(lengths)
    ]


def automatic(machine: Machine, kind: str, batch: int = 1, seed: int = 0, nodes: int | None = None) -> list[Run]:
    """Calls one after the other, with what drafts learn kept from call to call."""
    times, acceptance, guard, runs = StepTimes(), Acceptance([TextSource(Text([], []))]), Guard(batch), []
    times.steps = machine.steps
    for texts, tokens in calls(kind, batch, seed):
        planner = Planner(times, acceptance, limits=machine, batch=batch, most_nodes=128, nodes=nodes, guard=guard)
        runs.append(decode(machine, planner, texts, tokens))
    return runs


@cache
def fixed(kind: str, batch: int, seed: int, nodes: int) -> list[Run]:
    """What ``nodes`` nodes a pass come to, whatever passes cost."""
    if nodes == 0:
        return [
            Run(tokens, 0.0, 0, [(1, 64 + at, False) for at in range(tokens)]) for _, tokens in calls(kind, batch, seed)
        ]
    return automatic(Machine(lambda nodes, context: 1.0), kind, batch, seed, nodes)


def ms_per_token(machine: Machine, runs: Sequence[Run]) -> float:
    return sum(run.ms(machine) for run in runs) / sum(run.tokens for run in runs)

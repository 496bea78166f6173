"""The automatic mode: every pass is as large as pays, and filled with the candidates most likely to be accepted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jacobi import Path, Successors, TokenTree
from lookahead.draft.best_first import BestFirstTree
from lookahead.draft.frontier import Growth, grown
from lookahead.draft.guard import Mode
from lookahead.draft.planner import Planner
from lookahead.sources import Source
from lookahead.sources.base import is_batch, is_expensive, runs_a_model
from lookahead.sources.learned import Notes, NoteTaker
from lookahead.sources.recycling import BEST, RecyclingSource


class AutomaticDrafter:
    """The drafter of one sequence; all sequences of a call share the planner. A ``chain`` has one branch only. The
    ``top_k`` best next tokens are gathered at every node; ``notes`` keep those of what is written."""

    def __init__(
        self,
        prompt: Sequence[int],
        sources: Sequence[Source],
        planner: Planner,
        chain: bool = False,
        top_k: int = BEST,
        notes: Notes | None = None,
    ) -> None:
        self.credited: Counter[str] = Counter()  # accepted tokens by source
        self._prompt, self._top_k, self._chain = prompt, top_k, chain
        self._sources = list(sources)
        self._notes = notes is not None
        self._listeners = self._sources + ([] if notes is None else [NoteTaker(notes)])
        self._acceptance = planner.acceptance
        self._trees = BestFirstTree(sources, planner.acceptance, chain)
        self._expensive: list[Any] = [source for source in sources if is_expensive(source)]
        self._whole = not all(map(runs_a_model, self._expensive))  # asked for whole trees
        self._batched = [source for source in sources if is_batch(source)]
        self._values: list[float] = []
        self._root = -1
        self._written = 0
        self._started = self._rested = False
        self._room = 1 << 30  # as far as is known before a pass
        self._wrote = False  # in the last pass
        self.follow(planner)

    @property
    def by_noise(self) -> int:
        """Accepted tokens that were not the likeliest, but for the noise."""
        return sum(source.by_noise for source in self._sources if isinstance(source, RecyclingSource))

    def follow(self, planner: Planner) -> None:
        """Share another planner from now on, because other sequences have come or gone. Estimates stay."""
        self._planner = planner
        self._ahead: TokenTree | None = None  # a tree that was grown to choose the width of all
        planner.share(self.grow_ahead)

    def draft(self, room: int) -> TokenTree:
        """The tree that pays best."""
        planner = self._planner
        self._rested = planner.mode is Mode.REST or (self._chain and not room)
        if self._rested:
            tree = TokenTree(self._root)
        elif planner.shares:
            width = planner.width  # pays best for all sequences
            ahead, self._ahead, self._room = self._ahead, None, room
            tree = grown(self._growing(room)) if ahead is None or max(ahead.depths) > room else ahead
            if width < len(tree):
                tree.truncate(width)
                del self._values[width - 1 :]
        else:
            tree = grown(self._growing(room))
        tree.top_k = self._top_k if self._notes or not self._rested else 0
        return tree

    def grow_ahead(self) -> Growth[tuple[Sequence[float], int] | None]:
        """Grow the next tree as if there were no other sequence: its nodes' values, and the tokens written so far; None
        if the sequence has not written in the last pass."""
        if not self._wrote:
            return None
        self._wrote = False
        self._ahead = yield from self._growing(self._room)
        known = self._acceptance.calibration / self._planner.acceptance.calibration  # of other choices, if not 1
        return self._values if known == 1.0 else [known * value for value in self._values], self._written

    def _growing(self, room: int) -> Growth[TokenTree]:
        return self._grow_weighing(room) if self._expensive else self._grow(room)

    def _grow(self, room: int, beside_ms: float = 0.0) -> Growth[TokenTree]:
        planner, (times, least) = self._planner, self._planner.sizes
        tree, self._values = yield from self._trees.growing(
            self._root, room, times, least, planner.floor, planner.gain, planner.cut, planner.ask_ms, beside_ms
        )
        planner.asks += self._trees.asks
        return tree

    def _grow_weighing(self, room: int) -> Growth[TokenTree]:
        planner, trees = self._planner, self._trees
        times, _ = planner.sizes
        speed = expected = 0.0
        if planner.weighs or len(times) == 1:
            trees.use([source for source in self._sources if source not in self._expensive])
            tree = yield from self._grow(room)
            expected = self._acceptance.expected(self._values)
            if len(times) == 1 or not planner.expensive.pay(expected):
                return tree
            speed = (1.0 + expected) / times[len(tree) - 1]
        trees.use(self._sources)
        before = [source.spent_ms for source in self._expensive]
        beside_ms = planner.expensive.time.ms if planner.weighs and self._whole else 0.0
        tree = yield from self._grow(room, beside_ms)
        for source, earlier_ms in zip(self._expensive, before, strict=True):
            planner.spend(source.name, source.spent_ms - earlier_ms)
        if planner.weighs and planner.expensive.time.ms:
            reached = 1.0 + self._acceptance.expected(self._values)
            taken = times[len(tree) - 1] + beside_ms + trees.asked_ms
            planner.expensive.learn(expected, reached / taken / speed)
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        if not self._started:  # the prompt's pass: its tree stands for the prompt's last token
            self._started = True
            for source in self._listeners:
                source.start(self._prompt, successors)
            successors = None
        elif not self._rested:
            credited = self._trees.learn(tree, path, self._values)
            for name in credited:
                self.credited[name] += 1
            refused = self._trees.asked and not self._values
            self._planner.learn(bool(credited), refused)
        self._written += len(path.tokens)
        self._room -= len(path.tokens)
        self._wrote = True
        for source in self._batched:
            source.rollback(path)
        for source in self._listeners:
            source.learn(tree, path, successors)
        self._root = path.tokens[-1]

    def told(self, tree: TokenTree) -> tuple[Sequence[str], Sequence[float]]:
        """Of every node of the tree drafted last: its source, and the chance that it is visited, as far as known."""
        calibration = self._acceptance.calibration
        return self._trees.sources_of(tree), [1.0, *(min(1.0, calibration * value) for value in self._values)]

    def catch_up(self) -> None:
        """Learn what the next draft does not wait for; the device may work meanwhile."""
        self._trees.catch_up()

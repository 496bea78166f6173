"""What a pass costs: the latency curve t(nodes, context). It is not monotone and differs by model,
device, dtype and attention, so it is never assumed: it starts from an optimistic guess and follows what passes take, or
is measured, saved and read back."""

import copy
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jacobi import LookaheadError
from lookahead._files import write_text

# Nodes a sequence at which the curve is kept; linear in between. oneDNN's bfloat16 kernels take six rows at a time, and
# the seventh costs as much as four others.
NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_CONTEXT_BASE = 256  # tokens in the KV cache at which the second context begins; each next one is twice as long
FORMAT = 1
_MEMORY = 32.0  # passes after which old ones fade
OUTLIER = 1.6  # times the estimate, where one is known; a pass is counted as at most this slow (or fast)
_TRUSTED = 3.0  # passes after which an estimate is good enough to tell outliers by; twice as many, drift
_FIRST_TOUCH = 0.5  # of a pass, that the very first of a size tells: it may be slow, as kernels are chosen
_STALE = 16  # passes, for each that an estimate rests on, after which it may no longer hold
_DRIFT = 0.15  # of a pass's deviation (as a power) is put down to the whole machine: other sizes are taken to share it
_BEYOND = 0.5  # past the largest measured size, as steep as so much of the curve up to it, at least
_GUESS_SLOPE = 0.008  # of t(1) for each further node, before anything is measured: optimistic, so that sizes are tried


def _context_index(context: int) -> int:
    return max(0, (max(1, context) // _CONTEXT_BASE).bit_length())


class StepTimes:
    """The latency curve of one model, device, dtype, attention and batch size.

    A ``frozen`` one never learns, so that choices made by it repeat. ``about`` says what it was measured on. It
    ``steps`` where a pass over several nodes takes other kernels than one over a single node, as with recurrent layers
    and on CUDA: then t(1) says nothing of how steep the rest is. ``costs`` are what is known of it before any pass:
    milliseconds of so many nodes, without what every pass takes, whatever their number.
    """

    def __init__(
        self, *, frozen: bool = False, about: dict[str, Any] | None = None, costs: Mapping[int, float] | None = None
    ) -> None:
        self.frozen = frozen
        self._costs = costs
        self.steps = False
        self.about = about or {}
        self._mean: dict[tuple[int, int], float] = {}  # by context index and index into NODES, milliseconds
        self._weight: dict[tuple[int, int], float] = {}
        self._guess: dict[tuple[int, int], float] = {}  # the same of passes that were run in another way
        self._forms: dict[int, list[float]] = {}  # the curve at NODES as last worked out, by context index
        self._drift = 1.0  # how much slower than ``_mean`` says the machine has become
        self._passes = 0
        self._touched: set[int] = set()  # sizes that some pass has had
        self._measured: dict[tuple[int, int], int] = {}  # the last pass that told of a place
        self.spare_ms = 0.0  # what may be spent on passes that are made to learn what they take
        self.news = 0  # passes of sizes of which little was known

    @property
    def _cells(self) -> set[tuple[int, int]]:
        """Where anything is known, be it a guess."""
        return self._mean.keys() | self._guess.keys()

    def weight(self, nodes: int, context: int) -> float:
        """How many passes the estimate near this point rests on."""
        return self._weight.get((_context_index(context), _nearest(nodes)), 0.0)

    def is_stale(self, nodes: int, context: int) -> bool:
        """Whether the estimate near this point has not been seen to hold for longer than it can be relied on."""
        cell = _context_index(context), _nearest(nodes)
        return self._passes - self._measured.get(cell, -_STALE) >= _STALE * self._weight.get(cell, 0.0)

    @property
    def largest(self) -> int:
        """The most nodes that were ever measured, at any context."""
        return max((NODES[at] for _, at in self._cells), default=0)

    @property
    def knows_single(self) -> bool:
        """Whether the cost of a pass over one node rests on any measurement."""
        return any(at == 0 for _, at in self._cells)

    def add(self, nodes: int, context: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes a sequence and ``context`` tokens in the KV cache, which took ``ms``."""
        if self.frozen or not ms > 0.0:
            return
        cell = _, at = _context_index(context), _nearest(nodes)
        weight = self._weight.get(cell, 0.0)
        if nodes != NODES[at]:
            form = self._forms.get(cell[0]) or self._knots(cell[0])
            ms *= form[at] / _at(form, nodes)
        self._passes += 1
        self._measured[cell] = self._passes
        if weight < _TRUSTED:
            self.news += 1
        if weight < _TRUSTED:
            self._forms.clear()
        tells = 1.0 if nodes in self._touched else _FIRST_TOUCH
        self._touched.add(nodes)
        if weight < _TRUSTED:  # first passes of a size may be slow, so the fastest of them is what is known
            self._mean[cell] = min(self._mean[cell] if weight else math.inf, ms / self._drift)
        elif weight < 2 * _TRUSTED and ms * OUTLIER < self._mean[cell] * self._drift:
            self._mean[cell] = ms / self._drift  # all of the first ones were
        else:
            expected = self._mean[cell] * self._drift
            ms = min(max(ms, expected / OUTLIER), expected * OUTLIER)
            if weight >= 2 * _TRUSTED:
                self._drift *= (ms / expected) ** _DRIFT
            weight = min(weight, _MEMORY)
            self._mean[cell] = (self._mean[cell] * weight + ms / self._drift) / (weight + 1.0)
        self._weight[cell] = weight + tells

    def put(self, nodes: int, context: int, ms: float) -> None:
        """Set the estimate near this point to a measured one, as sure as an estimate can be."""
        cell = (_context_index(context), _nearest(nodes))
        self._mean[cell], self._weight[cell] = ms, _MEMORY
        self._forms.clear()

    def ms(self, nodes: int, context: int) -> float:
        """Estimated milliseconds of a pass over ``nodes`` nodes a sequence; 0 while nothing is known."""
        return _at(self._knots(_context_index(context)), nodes) if self._cells else 0.0

    def curve(self, context: int, most: int) -> list[float]:
        """Estimated milliseconds of passes over 1, 2, ... ``most`` nodes; multiples of t(1) while nothing is known."""
        knots = self._knots(_context_index(context))
        return [_at(knots, nodes) for nodes in range(1, most + 1)]

    def _first(self) -> list[float]:
        """The curve by ``costs``, above what a pass over one node is known to take, up to a factor."""
        assert self._costs is not None
        known, (*_, before, last) = dict(self._costs), self._costs
        slope = (known[last] - known[before]) / (last - before)
        known[NODES[-1]] = known[last] + max(0.0, slope) * (NODES[-1] - last)
        costs: list[float] = np.interp(NODES, list(known), list(known.values())).tolist()
        least = max((mean for (_, at), mean in sorted(self._mean.items()) if not at), default=costs[0])
        return [least + max(0.0, cost - costs[0]) for cost in costs]

    def _knots(self, index: int) -> list[float]:
        base = [1.0 + _GUESS_SLOPE * (nodes - 1) for nodes in NODES] if self._costs is None else self._first()
        single = 0.0
        known = self._cells
        others = sorted({context for context, _ in known} - {index}, key=lambda other: abs(other - index))
        order = [*others[::-1], index]  # the context itself comes last and so counts most
        for cells, other in itertools.product((self._guess, self._mean), order):
            measured = {at: mean for (context, at), mean in cells.items() if context == other}
            if self.steps:
                single = measured.pop(0, single)
            if measured and cells is self._mean:
                trust = {at: self._weight[other, at] / _TRUSTED for at in measured}
                measured = _believed(base, measured, trust)
            base = _through(base, measured) if measured else base
        if self.steps:
            scale = 1.0 if any(at for _, at in known) else single or 1.0
            base = [value * scale for value in base]
            base[0] = single or base[0]
            base = [max(base[0], value) for value in base]  # such layers never do several tokens in less time than one
        self._forms[index] = base
        return [value * self._drift for value in base] if known else base

    def doubt(self) -> Self:
        """Believe what was measured no more than a few passes: the machine may have had other work to do then."""
        self._weight = {cell: min(weight, _TRUSTED) for cell, weight in self._weight.items()}
        return self

    def as_frozen(self) -> Self:
        """The same curve, that learns nothing more."""
        other = copy.deepcopy(self)
        other.frozen = True
        return other

    def as_guess(self) -> Self:
        """The same curve for passes that are run in another way. Measurements bend it, and it keeps its form: where one
        node takes half of what it took, several are taken to do so, too."""
        other = copy.deepcopy(self)
        other.about, other._weight, other._measured = {}, {}, {}
        other._guess, other._mean = self._guess | self._mean, {}
        return other

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        cells = [[*cell, self._mean[cell] * self._drift, self._weight[cell]] for cell in sorted(self._mean)]
        return {"format": FORMAT, "nodes": list(NODES), "cells": cells, "about": self.about}

    @classmethod
    def from_dict(cls, data: Any, *, frozen: bool = False) -> Self:
        """Read :meth:`to_dict`'s data back; a LookaheadError says if it is something else, or of another version."""
        try:
            nodes = list(data["nodes"])
            if data["format"] != FORMAT or not set(nodes) <= set(NODES):
                found = f"This step-time curve has format {data['format']!r} and sizes {nodes}"
                raise LookaheadError(f"{found}: expected {FORMAT} and some of {list(NODES)}. Measure it again.")
            times = cls(frozen=frozen, about=dict(data["about"]))
            for context, at, mean, weight in data["cells"]:
                if not (0 <= at < len(nodes) and context >= 0 and 0.0 < mean < math.inf and weight > 0.0):
                    cell = [context, at, mean, weight]
                    raise LookaheadError(f"This step-time curve holds an impossible entry: {cell}.")
                place = int(context), NODES.index(nodes[int(at)])
                times._mean[place], times._weight[place] = float(mean), float(weight)
        except LookaheadError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LookaheadError(f"This is not a saved step-time curve ({type(error).__name__}: {error}).") from error
        return times

    def save(self, path: str | Path) -> None:
        """Write the curve to a file: all of it or nothing, whatever other processes write there."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path, *, frozen: bool = True) -> Self:
        """Read a saved curve; a LookaheadError says if there is none in that file."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            message = f"{path} holds no step-time curve ({error}). Make one with `lookahead tune`."
            raise LookaheadError(message) from error
        return cls.from_dict(data, frozen=frozen)


def _at(knots: Sequence[float], nodes: int) -> float:
    """The curve through ``knots`` at NODES: linear in between, and past the last as steep as before it, or flat."""
    right = min(max(1, bisect_left(NODES, nodes)), len(NODES) - 1)
    slope = (knots[right] - knots[right - 1]) / (NODES[right] - NODES[right - 1])
    return knots[right] + (slope if nodes <= NODES[right] else max(0.0, slope)) * (nodes - NODES[right])


def _nearest(nodes: int) -> int:
    at = min(bisect_left(NODES, nodes), len(NODES) - 1)
    return at - 1 if at and nodes - NODES[at - 1] < NODES[at] - nodes else at


def _believed(base: Sequence[float], measured: dict[int, float], trust: dict[int, float]) -> dict[int, float]:
    """What to take for the times at the measured places. A size that was slow in its only pass or two is taken to be
    nearly as fast as its neighbours: else it would never be tried again."""
    sure = {at: ms for at, ms in measured.items() if trust[at] >= 1.0}
    if not sure:
        at = min(measured, key=lambda at: measured[at] / base[at])
        sure[at] = measured[at]
    bent = _through(base, sure)
    doubtful = measured.keys() - sure.keys()
    return sure | {at: min(measured[at], bent[at] * (measured[at] / bent[at]) ** trust[at]) for at in doubtful}


def _through(base: Sequence[float], measured: dict[int, float]) -> list[float]:
    """Bend ``base`` through the measured places; it keeps its form, and beyond the last rises at least half as fast."""
    places = sorted(measured)
    ratios = np.interp(range(len(base)), places, [measured[place] / base[place] for place in places])
    bent: list[float] = (np.asarray(base) * ratios).tolist()
    last = places[-1]
    if last:
        slope = _BEYOND * (bent[last] - bent[0]) / (NODES[last] - NODES[0])
        for place in range(last + 1, len(bent)):
            bent[place] = max(bent[place], bent[place - 1] + slope * (NODES[place] - NODES[place - 1]))
    return bent

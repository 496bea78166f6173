"""What a pass costs: the latency curve t(nodes, context), and how trees have to pay for it. The curve is not monotone
and differs by model, device, dtype and attention, so it is never assumed: it starts from an optimistic guess and
follows what passes take, or is measured, saved and read back."""

import copy
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.draft.replays import Cut, Replays

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes a sequence at which the curve is kept; linear in between
_CONTEXT_BASE = 256  # tokens in the KV cache at which the second context begins; each next one is twice as long
FORMAT = 1
_MEMORY = 32.0  # passes after which old ones fade
_OUTLIER = 1.6  # times the estimate, where one is known; a pass is counted as at most this slow (or fast)
_TRUSTED = 3.0  # passes after which an estimate is good enough to tell outliers by; twice as many, drift
_DRIFT = 0.15  # of a pass's deviation (as a power) is put down to the whole machine: other sizes are taken to share it
_BEYOND = 0.5  # past the largest measured size, as steep as so much of the curve up to it, at least
_GUESS_STEP = 1.3  # times t(1) for several nodes, where they take other kernels than one
_GUESS_SLOPE = 0.008  # of t(1) for each further node, before anything is measured: optimistic, so that sizes are tried
_REFRESH = 8  # passes that a computed curve serves
_LONGEST_REFRESH = 64  # the same, while nothing is drafted
_SINGLE_AFTER = (2, 8, 16)  # passes after which t(1) is measured, while it rests on none, one or two passes
_SINGLE_EVERY = 256  # and once it is known


def _context_index(context: int) -> int:
    return max(0, (max(1, context) // _CONTEXT_BASE).bit_length())


class StepTimes:
    """The latency curve of one model, device, dtype, attention and batch size.

    A ``frozen`` one never learns, so that choices made by it repeat. ``about`` says what it was measured on. It
    ``steps`` where a pass over several nodes takes other kernels than one over a single node, as recurrent layers do:
    then t(1) says nothing of how steep the rest is.
    """

    def __init__(self, *, frozen: bool = False, about: dict[str, Any] | None = None) -> None:
        self.frozen = frozen
        self.steps = False
        self.about = about or {}
        self._mean: dict[tuple[int, int], float] = {}  # by context index and index into NODES, milliseconds
        self._weight: dict[tuple[int, int], float] = {}
        self._drift = 1.0  # how much slower than ``_mean`` says the machine has become

    def weight(self, nodes: int, context: int) -> float:
        """How many passes the estimate near this point rests on."""
        return self._weight.get((_context_index(context), _nearest(nodes)), 0.0)

    @property
    def knows_single(self) -> bool:
        """Whether the cost of a pass over one node rests on any measurement."""
        return any(at == 0 for _, at in self._mean)

    def add(self, nodes: int, context: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes a sequence and ``context`` tokens in the KV cache, which took ``ms``."""
        if self.frozen or not ms > 0.0:
            return
        cell = _, at = _context_index(context), _nearest(nodes)
        weight = self._weight.get(cell, 0.0)
        if nodes != NODES[at]:
            there, here = _along(self._knots(cell[0]), (NODES[at], nodes))
            ms *= there / here
        if weight < _TRUSTED:  # first passes of a size may be slow, so the fastest of them is what is known
            self._mean[cell] = min(self._mean.get(cell, math.inf), ms / self._drift)
        else:
            expected = self._mean[cell] * self._drift
            ms = min(max(ms, expected / _OUTLIER), expected * _OUTLIER)
            if weight >= 2 * _TRUSTED:
                self._drift *= (ms / expected) ** _DRIFT
            weight = min(weight, _MEMORY)
            self._mean[cell] = (self._mean[cell] * weight + ms / self._drift) / (weight + 1.0)
        self._weight[cell] = weight + 1.0

    def put(self, nodes: int, context: int, ms: float) -> None:
        """Set the estimate near this point to a measured one, as sure as an estimate can be."""
        cell = (_context_index(context), _nearest(nodes))
        self._mean[cell], self._weight[cell] = ms, _MEMORY

    def ms(self, nodes: int, context: int) -> float:
        """Estimated milliseconds of a pass over ``nodes`` nodes a sequence; 0 while nothing is known."""
        return _along(self._knots(_context_index(context)), (nodes,))[0] if self._mean else 0.0

    def curve(self, context: int, most: int) -> list[float]:
        """Estimated milliseconds of passes over 1, 2, ... ``most`` nodes; multiples of t(1) while nothing is known."""
        return _along(self._knots(_context_index(context)), range(1, most + 1))

    def _knots(self, index: int) -> list[float]:
        base = [1.0 + _GUESS_SLOPE * (nodes - 1) for nodes in NODES]
        single = 0.0
        others = sorted({context for context, _ in self._mean} - {index}, key=lambda other: abs(other - index))
        for other in [*others[::-1], index]:  # the context itself comes last and so counts most
            measured = {at: mean for (context, at), mean in self._mean.items() if context == other}
            if self.steps:
                single = measured.pop(0, single)
            if measured:
                base = _through(base, measured)
        if self.steps:
            scale = 1.0 if any(at for _, at in self._mean) else (single or 1.0) * _GUESS_STEP
            base = [value * scale for value in base]
            base[0] = single or base[0] / _GUESS_STEP
        return [value * self._drift for value in base] if self._mean else base

    def as_frozen(self) -> Self:
        """The same curve, that learns nothing more."""
        other = copy.deepcopy(self)
        other.frozen = True
        return other

    def as_guess(self) -> Self:
        """The same curve for passes that are run in another way: believed until there is a measurement."""
        other = copy.deepcopy(self)
        other.about, other._weight = {}, dict.fromkeys(self._weight, 1.0)
        return other

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        cells = [[*cell, self._mean[cell] * self._drift, self._weight[cell]] for cell in sorted(self._mean)]
        return {"format": FORMAT, "nodes": list(NODES), "cells": cells, "about": self.about}

    @classmethod
    def from_dict(cls, data: Any, *, frozen: bool = False) -> Self:
        """Read :meth:`to_dict`'s data back; a LookaheadError says if it is something else, or of another version."""
        try:
            if data["format"] != FORMAT or tuple(data["nodes"]) != NODES:
                found = f"This step-time curve has format {data['format']!r}"
                raise LookaheadError(f"{found}: expected {FORMAT}. Measure it again.")
            times = cls(frozen=frozen, about=dict(data["about"]))
            for context, at, mean, weight in data["cells"]:
                if not (0 <= at < len(NODES) and context >= 0 and 0.0 < mean < math.inf and weight > 0.0):
                    cell = [context, at, mean, weight]
                    raise LookaheadError(f"This step-time curve holds an impossible entry: {cell}.")
                times._mean[int(context), int(at)] = float(mean)
                times._weight[int(context), int(at)] = float(weight)
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


def _along(knots: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """The curve through ``knots`` at NODES: linear in between, and past the last as steep as before it, or flat."""
    slope = max(0.0, (knots[-1] - knots[-2]) / (NODES[-1] - NODES[-2]))
    beyond = np.maximum(0, np.asarray(sizes) - NODES[-1])
    return list((np.interp(sizes, NODES, knots) + slope * beyond).tolist())


def _nearest(nodes: int) -> int:
    at = bisect_left(NODES, nodes)
    if at >= len(NODES):
        return len(NODES) - 1
    return at - 1 if at and nodes - NODES[at - 1] < NODES[at] - nodes else at


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


class ModelLimits(Protocol):
    """What drafts need to know of the model as this call runs it."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes really computes."""

    @property
    def again(self) -> int:
        """Tokens that the next pass replays before its tree, as `runtime.linear` does."""

    @property
    def replays(self) -> bool:
        """Whether the accepted tokens of a draft that is cut short are replayed."""

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of the model's own pass over one node, where this call's are faster; None = they are not."""


class PassCosts:
    """What the passes of a call cost, in milliseconds.

    A linear draft that is cut short has its accepted tokens replayed by the next pass, which may hold::

        | replayed ... | root | tree ... | window ... |

    The replay is charged to the drafts that cause it (``cut``), and not to the tree behind it. ``anew`` finds the curve
    again once passes are run in another way; a tree has at most ``most`` nodes with its root.
    """

    def __init__(self, times: StepTimes, limits: ModelLimits, anew: Callable[[], StepTimes] | None, most: int) -> None:
        self.times = times
        self.curve: list[float] = []  # cost of a pass over 1, 2, ... nodes; empty until it is read
        self.trees: list[float] = []  # the same of a tree, beside the window
        self.least: list[float] = []  # the least slopes of ``trees``
        self.cut: Cut | None = None  # what it costs that this pass's draft is cut short; None = nothing
        self.single_ms = 0.0  # what the passes so far would have taken as plain decoding, as far as is known
        self.timed_ms = 0.0  # what they took
        self._limits = limits
        self._anew = anew
        self._most = most
        self._context = 0
        self._served = 0  # passes since the curve was read
        self._since_single = 0  # passes since one had a single node
        self._replayed = 0  # tokens that this pass replays
        self._width = 1  # of the last pass
        self._replays = Replays()

    def open(self, context: int, resting: int) -> bool:
        """Prepare for a pass behind ``context`` tokens, after ``resting`` plain passes: is the curve to be read?"""
        self._context = context
        self._served += 1
        self._since_single += 1
        before, self._replayed = self._replayed, self._limits.again
        self._replays.observe(self._width, before, self._replayed)
        serves = max(_REFRESH, min(resting, _LONGEST_REFRESH))
        return not self.curve or self._served >= serves or self._replayed != before

    def read(self) -> None:
        self._served = 0
        sizes = [self._limits.bucket(count) for count in range(1, self._most + self._replayed + 1)]
        knots = self.times.curve(self._context, max(sizes))
        self.curve = [knots[size - 1] for size in sizes]

    def read_trees(self, window: int) -> None:
        """Work out what trees cost beside a window of so many nodes."""
        # The draft that was cut short has paid for the replay: without it, one node would take t(1).
        paid = self.curve[self._replayed] - self.curve[0]
        self.trees = [cost - paid for cost in self.curve[window + self._replayed :]]
        self.cut = self._replays.cut(self.curve, self._replayed) if self._limits.replays else None
        self.least = least_slopes(self.trees)

    @property
    def cut_ms(self) -> float:
        """What drafts that are cut short cost a draft, on the average of late."""
        return 0.0 if self.cut is None else self._replays.mean_ms(self.cut)

    @property
    def single_is_due(self) -> bool:
        known = int(self.times.weight(1, self._context))
        after = _SINGLE_AFTER[known] if known < len(_SINGLE_AFTER) else _SINGLE_EVERY
        return not self.times.frozen and self._since_single > after

    def renew(self, spent_ms: float) -> None:
        """Passes are run in another way from now on; the change itself took ``spent_ms``."""
        self.timed_ms += spent_ms
        if self._anew is not None:
            self.times, self.curve = self._anew(), []

    def observe(self, width: int, taken_ms: float, beside_ms: float) -> None:
        """Take in a pass over ``width`` nodes, of whose time the curve knows nothing of ``beside_ms``."""
        self.times.add(self._limits.bucket(width + self._replayed), self._context, taken_ms - beside_ms)
        if self.times.knows_single:
            self.timed_ms += taken_ms
            single_ms = self.curve[0] if self.curve else self.times.ms(1, self._context)
            self.single_ms += max(single_ms, self._limits.plain_ms or 0.0)
        self._width = width
        if width == 1 and not self._replayed:
            self._since_single = 0


def least_slopes(curve: Sequence[float]) -> list[float]:
    """For each size, the least cost per further node to any larger size: the lower convex hull's slope; inf at last."""
    slopes = [float("inf")] * len(curve)
    hull = [len(curve) - 1]  # of the sizes to the right, nearest last
    for size in range(len(curve) - 2, -1, -1):
        while len(hull) > 1:
            near, next_one = hull[-1], hull[-2]
            if (curve[near] - curve[size]) * (next_one - size) < (curve[next_one] - curve[size]) * (near - size):
                break
            hull.pop()
        slopes[size] = (curve[hull[-1]] - curve[size]) / (hull[-1] - size)
        hull.append(size)
    return slopes

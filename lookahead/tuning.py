"""What a pass costs on this machine: the step-time curve t(nodes, context), measured, learnt, saved.

The curve decides how large a draft may be. It is not monotone and differs by model, device, dtype and attention, so it
is never assumed: either a short sweep measures it (:func:`sweep`, ``lookahead tune``), or it is learnt from the passes
of a decode themselves, starting from an optimistic guess.
"""

import copy
import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from jacobi import LookaheadError, TokenTree
from jacobi import Path as KeptPath
from lookahead.attention import grouped_attention
from lookahead.cache import TreeCache
from lookahead.masks import mask_rules
from lookahead.model import FusedModel

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes a row at which the curve is kept; linear in between
_CONTEXT_BASE = 256  # tokens of history at which the second context begins; each next one is twice as long
_FORMAT = 1
_MEMORY = 12.0  # passes after which old ones fade
_OUTLIER = 1.6  # times the estimate, where one is known; a pass is counted as at most this slow (or fast)
_TRUSTED = 3.0  # passes after which an estimate is good enough to tell outliers by; twice as many, drift
_DRIFT = 0.15  # of a pass's deviation (as a power) is put down to the whole machine: other sizes are taken to share it
_GUESS_SLOPE = 0.008  # of t(1) for each further node, before anything is measured: optimistic, so that sizes are tried


def _context_index(context: int) -> int:
    return max(0, (max(1, context) // _CONTEXT_BASE).bit_length())


class StepTimes:
    """The step-time curve of one model, device, dtype, attention and batch size.

    Args:
        frozen: never learn, so that choices made by it repeat.

    Attributes:
        about: what it was measured on, as plain data.
    """

    def __init__(self, *, frozen: bool = False, about: dict[str, Any] | None = None) -> None:
        self.frozen = frozen
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
        """Take in one pass.

        Args:
            nodes: that it computed, for each row.
            context: tokens of history.
            ms: what it took.
        """
        if self.frozen or not ms > 0.0:
            return
        at = _nearest(nodes)
        cell = (_context_index(context), at)
        weight = self._weight.get(cell, 0.0)
        if nodes != NODES[at]:
            ms *= self._shape(cell[0], NODES[at]) / self._shape(cell[0], nodes)
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

    def ms(self, nodes: int, context: int) -> float:
        """Estimated milliseconds of a pass over ``nodes`` nodes a row; 0 while nothing is known."""
        if not self._mean:
            return 0.0
        return self._shape(_context_index(context), nodes)

    def curve(self, context: int, most: int) -> list[float]:
        """Estimated milliseconds of passes over 1, 2, ... ``most`` nodes; multiples of t(1) while nothing is known."""
        index = _context_index(context)
        knots = self._knots(index)
        times: list[float] = []
        for low, high, start, stop in zip(NODES, NODES[1:], knots, knots[1:], strict=False):
            step = (stop - start) / (high - low)
            times += [start + step * offset for offset in range(high - low)]
        times.append(knots[-1])
        slope = max(0.0, (knots[-1] - knots[-2]) / (NODES[-1] - NODES[-2]))
        while len(times) < most:
            times.append(times[-1] + slope)
        return times[:most]

    def _shape(self, index: int, nodes: int) -> float:
        knots = self._knots(index)
        at = bisect_left(NODES, nodes)
        if at >= len(NODES):
            slope = max(0.0, (knots[-1] - knots[-2]) / (NODES[-1] - NODES[-2]))
            return knots[-1] + slope * (nodes - NODES[-1])
        if NODES[at] == nodes or at == 0:
            return knots[at]
        low, high = NODES[at - 1], NODES[at]
        return knots[at - 1] + (knots[at] - knots[at - 1]) * (nodes - low) / (high - low)

    def _knots(self, index: int) -> list[float]:
        """The curve at NODES for one context: measured where it was, else scaled from the nearest that was."""
        base = [1.0 + _GUESS_SLOPE * (nodes - 1) for nodes in NODES]
        others = sorted({context for context, _ in self._mean} - {index}, key=lambda other: abs(other - index))
        for other in [*others[::-1], index]:  # the context itself comes last and so counts most
            measured = {at: mean for (context, at), mean in self._mean.items() if context == other}
            if measured:
                base = _through(base, measured)
        return [value * self._drift for value in base] if self._mean else base

    def as_frozen(self) -> Self:
        """The same curve, that learns nothing more."""
        other = copy.copy(self)
        other.frozen, other._mean, other._weight = True, dict(self._mean), dict(self._weight)
        return other

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain data."""
        cells = [[*cell, self._mean[cell] * self._drift, self._weight[cell]] for cell in sorted(self._mean)]
        return {"format": _FORMAT, "nodes": list(NODES), "cells": cells, "about": self.about}

    @classmethod
    def from_dict(cls, data: Any, *, frozen: bool = False) -> Self:
        """Read :meth:`to_dict`'s data back.

        Raises:
            LookaheadError: it is something else, or of another version.
        """
        try:
            if data["format"] != _FORMAT or tuple(data["nodes"]) != NODES:
                raise LookaheadError(
                    f"This step-time curve has format {data['format']!r}: expected {_FORMAT}. Measure it again."
                )
            times = cls(frozen=frozen, about=dict(data["about"]))
            for context, at, mean, weight in data["cells"]:
                if not (0 <= at < len(NODES) and context >= 0 and 0.0 < mean < math.inf and weight > 0.0):
                    raise LookaheadError(
                        f"This step-time curve holds an impossible entry: {[context, at, mean, weight]}."
                    )
                times._mean[int(context), int(at)] = float(mean)
                times._weight[int(context), int(at)] = float(weight)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, LookaheadError):
                raise
            raise LookaheadError(f"This is not a saved step-time curve ({type(error).__name__}: {error}).") from error
        return times

    def save(self, path: str | Path) -> None:
        """Write the curve to a file: all of it or nothing, whatever other processes write there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(self.to_dict(), file)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path, *, frozen: bool = True) -> Self:
        """Read a saved curve.

        Raises:
            LookaheadError: there is no readable curve in that file.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise LookaheadError(
                f"{path} holds no step-time curve ({error}). Make one with `lookahead tune`."
            ) from error
        return cls.from_dict(data, frozen=frozen)


def _nearest(nodes: int) -> int:
    at = bisect_left(NODES, nodes)
    if at >= len(NODES):
        return len(NODES) - 1
    return at - 1 if at and nodes - NODES[at - 1] < NODES[at] - nodes else at


def _through(base: Sequence[float], measured: dict[int, float]) -> list[float]:
    """Bend ``base`` so that it goes through the measured places, and keeps its form in between and beyond."""
    places = sorted(measured)
    ratios = [measured[place] / base[place] for place in places]
    bent = []
    for place, value in enumerate(base):
        right = bisect_left(places, place)
        if right == 0:
            ratio = ratios[0]
        elif right == len(places):
            ratio = ratios[-1]
        else:
            low, high = places[right - 1], places[right]
            share = (place - low) / (high - low)
            ratio = ratios[right - 1] * (1 - share) + ratios[right] * share
        bent.append(value * ratio)
    return bent


@lru_cache
def _processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(model: PreTrainedModel, batch: int = 1) -> dict[str, Any]:
    """All that the curve depends on: shape and dtypes of the model, attention, device, threads, versions, batch."""
    config = model.config.get_text_config()
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if (isinstance(value, int | float) or (isinstance(value, list) and name != "architectures"))
        and not name.endswith("token_id")
    }
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + parameter.numel()
    device = model.device
    return {
        "model": type(model).__name__,
        "shape": shape,
        "parameters": dtypes,
        "attention": str(config._attn_implementation),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {_processor()}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "batch": batch,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cache_folder() -> Path:
    """Where curves are kept: ``$LOOKAHEAD_CACHE``, else ``lookahead`` in the user's cache folder."""
    given = os.environ.get("LOOKAHEAD_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "lookahead"


def cache_file(about: dict[str, Any]) -> Path:
    """The file of a curve in the cache folder; another one when anything in ``about`` differs."""
    text = json.dumps([_FORMAT, about], sort_keys=True, default=str)
    return cache_folder() / f"step-times-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def cached(model: PreTrainedModel, batch: int = 1) -> StepTimes | None:
    """The saved curve of this model on this machine; None where there is none that can be read."""
    about = describe(model, batch)
    try:
        return StepTimes.load(cache_file(about), frozen=False)
    except (LookaheadError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def step_times(
    model: PreTrainedModel, batch: int, memory: dict[Hashable, StepTimes], given: StepTimes | None
) -> StepTimes:
    """The curve for a call: what the caller gave, what earlier calls learnt, what was saved, or one that is empty.

    Args:
        model: the model.
        batch: rows of a pass.
        memory: curves of earlier calls on the model; a new one is put there.
        given: the caller's.
    """
    if given is not None:
        return given
    config = model.config.get_text_config()
    key = (batch, model.dtype, model.device, str(config._attn_implementation), torch.get_num_threads())
    if key not in memory:
        memory[key] = cached(model, batch) or StepTimes()
    return memory[key]


@torch.no_grad()
def sweep(
    model: PreTrainedModel,
    *,
    batch: int = 1,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = (64, 512),
    seconds: float = 8.0,
    save: bool = True,
    report: Callable[[float], None] | None = None,
) -> StepTimes:
    """Measure the step-time curve of a model as it is loaded.

    All sizes are run in turn, again and again, so that a slow moment hits all of them; what counts is the median.

    Args:
        model: a causal model that lookahead supports.
        batch: rows of a pass.
        nodes: sizes to measure, nodes a row.
        contexts: histories to measure at, in tokens; those the model has no positions for are left out.
        seconds: about how long to measure, warm-up left out; every size is run three times at least.
        save: keep the curve in the cache folder, where later automatic decodes find it.
        report: told the share that is done, from 0 to 1.

    Returns:
        The curve.

    Raises:
        LookaheadError: the model cannot follow a tree.
    """
    from lookahead import support  # not at the top: support runs passes too

    support.check_model(model)
    support.self_test(model)
    about = describe(model, batch)
    times = StepTimes(about=about)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    usable = [context for context in contexts if context + max(nodes) < limit] or [max(1, (limit - max(nodes)) // 2)]
    done = 0.0
    for context in usable:
        samples = _measure(model, batch, list(nodes), context, seconds / len(usable), report, done, 1 / len(usable))
        done += 1 / len(usable)
        for count, taken in samples.items():
            cell = (_context_index(context), _nearest(count))
            times._mean[cell] = statistics.median(taken)
            times._weight[cell] = _MEMORY
    if report is not None:
        report(1.0)
    if save:
        times.save(cache_file(about))
    return times


def _measure(
    model: PreTrainedModel,
    batch: int,
    nodes: list[int],
    context: int,
    seconds: float,
    report: Callable[[float], None] | None,
    done: float,
    share: float,
) -> dict[int, list[float]]:
    vocab = model.get_input_embeddings().weight.shape[0]
    prompt = torch.tensor([[(17 + 13 * place) % vocab for place in range(context)]] * batch, device=model.device)
    cache = TreeCache(model.config.get_text_config().num_hidden_layers)
    positions = torch.arange(context, device=model.device)[None].expand(batch, -1)
    inputs = {"position_ids": positions, "logits_to_keep": 1}
    fused = FusedModel(
        model, mask_rules(model), cache, prompt, GenerationConfig(), inputs, max(nodes) + 1, None, lambda row: False
    )
    samples: dict[int, list[float]] = {count: [] for count in nodes}
    with grouped_attention():
        fused.prefill()
        fused.keep([KeptPath([0], [0])] * batch)
        trees = {count: [_bushy(count, vocab)] * batch for count in nodes}
        for count in nodes:  # kernels for a new shape are made at its first pass
            fused.forward(trees[count])
        start = perf_counter()
        rounds = 0
        while rounds < 3 or perf_counter() - start < seconds:
            for count in nodes if rounds % 2 else nodes[::-1]:
                begin = perf_counter()
                fused.forward(trees[count])
                samples[count].append(1e3 * (perf_counter() - begin))
            rounds += 1
            if report is not None:
                report(done + share * min(1.0, (perf_counter() - start) / seconds))
            if rounds >= 400:
                break
    return samples


def _bushy(count: int, vocab: int) -> TokenTree:
    """A tree of ``count`` nodes in which every node has up to two children, which is about what is drafted."""
    return TokenTree.from_parents(
        [node % vocab for node in range(count)], [-1] + [(node - 1) // 2 for node in range(1, count)]
    )

"""Linear layers over packed weights: what makes a pass over a few nodes cheap on a CPU.

A weight ``[out, in]`` lies in memory row by row. Kernels for a few rows of input read it badly so, and the time of a
pass rises steeply with its first nodes. oneDNN, which comes with torch, has layouts of its own and kernels that read
them, or ours does (`layer_trials`). Milliseconds of a linear layer with 4.4M weights (two cores of a Xeon, AVX-512)::

    nodes                   1      4      8     16     32     64
    bfloat16, as it lies   0.76   0.96   1.21   1.67   2.62   4.53
    bfloat16, packed       0.48   0.53   0.79   1.25   2.12   4.06
    float32, as it lies    0.83   1.66   1.88   1.99   2.46   3.52
    float32, packed        0.91   1.01   1.06   1.32   1.86   3.01

Packed weights are a copy, so they are made where memory is plenty, and where it is small beside the process or the
model large: then its weights come from memory in every pass, and much is gained. They are made once passes have cost so
much that packing would have saved its price (ski rental, as for traces), or where a call still promises that; if passes
are most of what calls take (:class:`.CallTimes`); and only of layers for which a trial on this machine shows a gain.
The model itself is left alone: passes run on a twin of its modules.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.models.code_safety import is_safe
from lookahead.models.fingerprint import weights_stamp
from lookahead.runtime.layer_trials import RowRange, chains_of, kind_of, linear_kinds, rows_for, tried_weight
from lookahead.runtime.machine import found_once
from lookahead.runtime.packed_layers import (
    Group,
    Invariance,
    Packed,
    Parts,
    Shapes,
    can_be_packed,
    groups_of,
    limited_linear,
    pack,
    pack_weight,
    packed_bytes,
    packed_linear,
    parts_of,
    shapes_of,
)

_FADE = 0.9  # of what is known, from one call to the next
_LEAST_SHARE = 2 / 3  # of calls, that passes have to take


@dataclass
class CallTimes:
    """Milliseconds of prompts and of passes, in which older calls count less and less.

    What makes passes faster takes memory, tens of megabytes for the smallest models. It is not made for calls that it
    would hardly shorten, as most of their time goes into long prompts::

        prompt 410 ms, passes 270 ms     neither traces nor packed weights
        prompt  20 ms, passes 300 ms     both, once they have paid
    """

    prompts_ms: float = 0.0
    passes_ms: float = 0.0

    def see(self, nodes: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes, 0 for a prompt's, with which a call begins."""
        if nodes:
            self.passes_ms += ms
        else:
            self.prompts_ms, self.passes_ms = _FADE * self.prompts_ms + ms, _FADE * self.passes_ms

    @property
    def passes_count(self) -> bool:
        """Whether calls are shorter for faster passes."""
        return self.passes_ms >= _LEAST_SHARE * (self.prompts_ms + self.passes_ms)


call_times = PerModel(CallTimes).of  # a model's

_SMALL_BYTES = range(1 << 20, 24 << 20)  # of all linear layers: a copy is hardly noticed in the process
_LARGE_BYTES = 128 << 20  # from here on they fill caches; between, much memory would bring little
_MOST_MEMORY = 0.5  # of the memory that is free
_TRIAL_AFTER_MS = 400.0  # of passes: a trial takes some 40, and memory that oneDNN keeps
_LARGE_AFTER_MS = 1000.0  # the same for large layers, whose trials take longer
_TRIAL_ROWS = (1, 8, 32)  # oneDNN keeps half a megabyte for each of them and each shape of weight
_TRIAL_ROUNDS = 4  # of a layer of a large model
_SMALL_ROUNDS = 16
_LEAST_GAIN = 0.08  # of the time of a linear layer
_TOLERANCE = 0.02  # of the spread of a layer's outputs


@dataclass
class Packing:
    """What is known of one model's packed weights.

    Attributes:
        spent_ms: of passes without them.
        single_ms: of such passes over one node, the fastest; None = there was none.
        gain: share of the linear layers' time that packing saves; None = not tried, 0 = they are not packed.
        singles: for the shapes of each group of layers that gains, whether a single row gains as well.
        cost_ms: of packing those layers.
        stamp: of the weights when they were packed.
    """

    spent_ms: float = 0.0
    single_ms: float | None = None
    gain: float | None = None
    singles: dict[Shapes, bool] = field(default_factory=dict)
    cost_ms: float = 0.0
    stamp: Hashable = None
    weights: Parts = field(default_factory=dict)

    def spend(self, nodes: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes in all, without packed weights."""
        self.spent_ms += ms
        if nodes == 1:
            self.single_ms = ms if self.single_ms is None else min(ms, self.single_ms)


packing_of = PerModel(Packing).of  # a model's
_making = threading.Lock()


def packs_alike(model: PreTrainedModel, limits: Invariance) -> bool:
    """Whether a model's packed weights, if made, would give the same numbers within limits as those that lie."""
    try:
        return _keep([module for module in model.modules() if can_be_packed(module)], limits)
    except (RuntimeError, AttributeError):  # none will be made
        return True


def _keep(layers: Sequence[nn.Linear], limits: Invariance | None) -> bool:
    """Whether packed ``layers`` keep to ``limits``; None = any will do."""
    if limits is None:
        return True
    for layer in linear_kinds(layers):
        own = limits.of(layer)
        if not found_once("packed", [*kind_of(layer), *own], partial(_equal, layer, own)):
            return False
    return True


def layers_of(model: PreTrainedModel, *, packs: bool, limits: Invariance | None = None) -> Packed | None:
    """How the linear layers of a model's passes are run: packed where ``packs`` and it has paid; None = as is."""
    parts = packed_weights(model, limits=limits) if packs else None
    return None if parts is None and limits is None else Packed(parts or {}, limits)


def packed_weights(
    model: PreTrainedModel, *, worth_ms: float | None = None, limits: Invariance | None = None
) -> Parts | None:
    """A model's packed weights; None = passes run without. Made here when they pay for ``worth_ms`` of passes; None =
    for as much as passes have taken so far, infinite = at once, to be measured. Within ``limits`` they are only used
    where outputs are the same to the last bit.

    Weights that have changed since are packed anew, once that has come to pay again.
    """
    packing = packing_of(model)
    worth_ms = packing.spent_ms if worth_ms is None else worth_ms
    pays = worth_ms >= _TRIAL_AFTER_MS and (worth_ms == inf or call_times(model).passes_count)
    if packing.gain == 0.0 or not (pays or packing.weights):
        return None
    layers = [module for module in model.modules() if can_be_packed(module)]
    size = _bytes(layers)
    is_large = size >= _LARGE_BYTES
    early = is_large and worth_ms < _LARGE_AFTER_MS and not packing.weights
    if not (size in _SMALL_BYTES or is_large) or early or not is_safe(model):
        return None
    stamp = weights_stamp(held for layer in layers for held in (layer.weight, layer.bias) if held is not None)
    if packing.weights and packing.stamp == stamp:
        return packing.weights if _keep(layers, limits) else None
    packing.weights = {}
    if not _making.acquire(blocking=False):
        return None
    try:
        with torch.no_grad():
            return _bought(packing, groups_of(model), stamp, worth_ms) if _keep(layers, limits) else None
    except (RuntimeError, AttributeError):  # this machine's torch has no such kernel
        packing.gain = 0.0
        return None
    finally:
        _making.release()


def _bought(packing: Packing, groups: list[Group], stamp: Hashable, worth_ms: float) -> Parts | None:
    if packing.gain is None:
        _try(packing, groups)
    gaining = [group for group in groups if shapes_of(group) in packing.singles]
    free = _free_bytes()
    fits = free is not None and sum(map(packed_bytes, gaining)) <= _MOST_MEMORY * free
    if not packing.gain or not fits or worth_ms * packing.gain < packing.cost_ms:
        return None
    packed: Parts = {}
    for group in gaining:
        packed |= parts_of(group, packing.singles[shapes_of(group)])
    packing.weights, packing.stamp, packing.spent_ms = packed, stamp, 0.0
    return packed


def _try(packing: Packing, groups: list[Group]) -> None:
    """Measure which groups of layers gain, and what packing those brings and costs. Of a large model, whose trials take
    long, the largest group but the output speaks for all."""
    counts = Counter(map(shapes_of, groups))
    samples = {shapes_of(group): group for group in groups}
    rounds, memory_s = _SMALL_ROUNDS, 0.0
    if sum(map(_bytes, groups)) >= _LARGE_BYTES:
        memory_s = _new_memory_s(sum(map(packed_bytes, groups)))
        largest = max(groups[:-1] or groups, key=_bytes)
        samples, rounds = {shapes_of(largest): largest}, _TRIAL_ROUNDS
    before_s = after_s = 0.0
    for shapes, group in samples.items():
        for layer in group:  # tried once a machine: no part of a model's price
            chains_of(layer)
        start = perf_counter()
        packed = pack(group)
        pack_s = perf_counter() - start
        times = _compared(group, packed, rounds)
        if times is None:
            packing.gain, packing.singles = 0.0, {}
            return
        before, after = times
        before_s += counts[shapes] * sum(before)
        gains = 1.0 - sum(now / then for now, then in zip(after, before, strict=True)) / len(before) >= _LEAST_GAIN
        after_s += counts[shapes] * sum(after if gains else before)
        if gains:
            every = counts.keys() if len(samples) < len(counts) else {shapes}
            packing.singles |= dict.fromkeys(every, after[0] < before[0])
            size = sum(_bytes(each) for each in groups if shapes_of(each) in every)
            packing.cost_ms += 1e3 * (memory_s + pack_s * size / _bytes(group))
    packing.gain = 1.0 - after_s / before_s


def _equal(layer: nn.Linear, limits: RowRange) -> bool:
    """Whether a layer's packed weight gives the same numbers as the one that lies, for as many rows as passes have."""
    weight = tried_weight(layer)
    packed = pack_weight(weight, chains_of(layer) is not None)
    if limits.chain and packed.ndim == 2:  # which is not used
        return True
    for rows in _TRIAL_ROWS:
        given = rows_for(weight, rows)
        if not torch.equal(limited_linear(given, weight, None, limits), packed_linear(given, packed, None, limits)):
            return False
    return True


def _new_memory_s(size: int) -> float:
    """Seconds that the system takes to give so much memory: a few layers fit into what the process holds, all of a
    large model do not. By a block that is larger than any that malloc keeps."""
    start, block = perf_counter(), 33 << 20
    torch.empty(block, dtype=torch.uint8).fill_(1)
    return (perf_counter() - start) * size / block


def _bytes(layers: Sequence[nn.Linear]) -> int:
    return sum(layer.weight.nbytes for layer in layers)


def _compared(group: Group, packed: Tensor, rounds: int) -> tuple[list[float], list[float]] | None:
    """Seconds of a group over each number of rows, as it lies and packed; None where its outputs are not the same."""
    weights, before, after = [layer.weight for layer in group], list[float](), list[float]()
    for rows in _TRIAL_ROWS:
        given = rows_for(weights[0], rows)

        def as_it_lies(given: Tensor = given) -> list[Tensor]:
            return [nn.functional.linear(given, weight) for weight in weights]

        plain, ours = torch.cat(as_it_lies(), -1), packed_linear(given, packed)
        if not bool((plain - ours).abs().max() <= _TOLERANCE * (plain.float().std() + 1e-9)):
            return None
        before.append(min(_seconds(as_it_lies) for _ in range(rounds)))
        after.append(min(_seconds(partial(packed_linear, given, packed)) for _ in range(rounds)))
    return before, after


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _free_bytes() -> int | None:
    """Memory that this process may still take; None = nobody says."""
    found = []
    with suppress(OSError, ValueError, KeyError):  # another system, or a group without a limit
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=None)

"""Linear layers over packed weights: what makes a pass over a few nodes cheap on a CPU.

A weight ``[out, in]`` lies in memory row by row. Kernels for a few rows of input read it badly so, and the time of a
pass rises steeply with its first nodes. oneDNN, which comes with torch, has layouts of its own and kernels that read
them. Milliseconds of a linear layer with 4.4M weights and so many nodes (two cores of a Xeon with AVX-512)::

    nodes                   1      4      8     16     32     64
    bfloat16, as it lies   0.76   0.96   1.21   1.67   2.62   4.53
    bfloat16, packed       0.48   0.53   0.79   1.25   2.12   4.06
    float32, as it lies    0.83   1.66   1.88   1.99   2.46   3.52
    float32, packed        0.91   1.01   1.06   1.32   1.86   3.01

Packed weights are a copy, so they are made where memory is plenty, and where it is small beside the process or the
model large: then its weights come from memory in every pass, and much is gained. They are made once passes have cost so
much that packing would have saved its price (ski rental, as for traces), or where a call still promises that, and only
of layers for which a trial on this machine shows a gain. The model itself is left alone: passes run on a twin of its
modules.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.models.code_safety import is_safe
from lookahead.models.fingerprint import weights_stamp
from lookahead.runtime.packed_layers import Packed, pack, packed_linear, twin_over

_DTYPES = (torch.float32, torch.bfloat16)
_SMALL_BYTES = range(1 << 20, 24 << 20)  # of all linear layers: a copy is hardly noticed in the process
_LARGE_BYTES = 128 << 20  # from here on they fill caches; between, much memory would bring little
_MOST_MEMORY = 0.5  # of the memory that is free
_TRIAL_AFTER_MS = 1000.0  # of passes: a trial takes some 30, and memory that oneDNN keeps
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
        singles: for each shape of weight that gains, whether a single row gains as well.
        cost_ms: of packing those layers.
        stamp: of the weights when they were packed.
    """

    spent_ms: float = 0.0
    single_ms: float | None = None
    gain: float | None = None
    singles: dict[torch.Size, bool] = field(default_factory=dict)
    cost_ms: float = 0.0
    stamp: Hashable = None
    weights: Packed = field(default_factory=dict)

    def spend(self, nodes: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes in all, without packed weights."""
        self.spent_ms += ms
        if nodes == 1:
            self.single_ms = ms if self.single_ms is None else min(ms, self.single_ms)


_packings: PerModel[Packing] = PerModel(Packing)
_making = threading.Lock()


def packing_of(model: PreTrainedModel) -> Packing:
    return _packings.of(model)


def packed_weights(model: PreTrainedModel, *, worth_ms: float | None = None) -> Packed | None:
    """A model's packed weights; None = passes run without. Made here when they pay for ``worth_ms`` of passes; None =
    for as much as passes have taken so far, infinite = at once, to be measured.

    Weights that have changed since are packed anew, once that has come to pay again.
    """
    packing = _packings.of(model)
    worth_ms = packing.spent_ms if worth_ms is None else worth_ms
    if packing.gain == 0.0 or (worth_ms < _TRIAL_AFTER_MS and not packing.weights):
        return None
    layers = list(_layers(model))
    size = sum(layer.weight.nbytes for layer in layers)
    if not (size in _SMALL_BYTES or size >= _LARGE_BYTES) or not is_safe(model):
        return None
    stamp = weights_stamp(layer.weight for layer in layers)
    if packing.weights and packing.stamp == stamp:
        return packing.weights
    packing.weights = {}
    if not _making.acquire(blocking=False):
        return None
    try:
        with torch.inference_mode():
            return _bought(packing, layers, stamp, worth_ms)
    except (RuntimeError, AttributeError):  # this machine's torch has no such kernel
        packing.gain = 0.0
        return None
    finally:
        _making.release()


def _bought(packing: Packing, layers: list[nn.Linear], stamp: Hashable, worth_ms: float) -> Packed | None:
    if packing.gain is None:
        _try(packing, layers)
    gaining = [layer.weight for layer in layers if layer.weight.shape in packing.singles]
    free = _free_bytes()
    fits = free is not None and sum(weight.nbytes for weight in gaining) <= _MOST_MEMORY * free
    if not packing.gain or not fits or worth_ms * packing.gain < packing.cost_ms:
        return None
    packed = {id(weight): pack(weight) for weight in gaining}
    packing.weights, packing.stamp, packing.spent_ms = packed, stamp, 0.0
    return packed


def _try(packing: Packing, layers: list[nn.Linear]) -> None:
    """Measure which shapes of weights gain, and what packing those brings and costs. Of a large model, whose trials
    take long, the largest layer but the output's speaks for all."""
    by_shape = Counter(layer.weight.shape for layer in layers)
    samples = {layer.weight.shape: layer.weight for layer in layers}
    rounds = _SMALL_ROUNDS
    if sum(layer.weight.nbytes for layer in layers) >= _LARGE_BYTES:
        largest = max((layer.weight for layer in layers[:-1] or layers), key=lambda weight: weight.numel())
        samples, rounds = {largest.shape: largest}, _TRIAL_ROUNDS
    before_s = after_s = 0.0
    for shape, weight in samples.items():
        start = perf_counter()
        packed = pack(weight)
        pack_s = perf_counter() - start
        times = _compared(weight, packed, rounds)
        if times is None:
            packing.gain, packing.singles = 0.0, {}
            return
        before, after = times
        before_s += by_shape[shape] * sum(before)
        gains = 1.0 - sum(now / then for now, then in zip(after, before, strict=True)) / len(before) >= _LEAST_GAIN
        after_s += by_shape[shape] * sum(after if gains else before)
        if gains:
            every = by_shape if len(samples) < len(by_shape) else {shape: by_shape[shape]}
            packing.singles |= dict.fromkeys(every, after[0] < before[0])
            numel = sum(count * each.numel() for each, count in every.items())
            packing.cost_ms += 1e3 * pack_s * numel / weight.numel()
    packing.gain = 1.0 - after_s / before_s


def _compared(weight: Tensor, packed: Tensor, rounds: int) -> tuple[list[float], list[float]] | None:
    """Seconds of a layer over each number of rows, as it lies and packed; None where its outputs are not the same."""
    before, after = [], []
    for rows in _TRIAL_ROWS:
        given = torch.arange(rows * weight.shape[1], dtype=weight.dtype).sin_().view(rows, -1)
        plain, ours = nn.functional.linear(given, weight), packed_linear(given, packed, None)
        if not bool((plain - ours).abs().max() <= _TOLERANCE * (plain.float().std() + 1e-9)):
            return None
        ways = partial(nn.functional.linear, given, weight), partial(packed_linear, given, packed, None)
        before.append(min(_seconds(ways[0]) for _ in range(rounds)))
        after.append(min(_seconds(ways[1]) for _ in range(rounds)))
    return before, after


def _seconds(run: Callable[[], Tensor]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _layers(model: PreTrainedModel) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.is_contiguous():
                yield module


def packed_twin(model: PreTrainedModel, packed: Packed) -> Any:
    """The model's modules, its linear layers over their ``packed`` weights."""
    return twin_over(model, packed, _packings.of(model).singles)


def _free_bytes() -> int | None:
    """Memory that this process may still take; None = nobody says."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, KeyError):  # another system, or a group without a limit
        pass
    return min(found, default=None)

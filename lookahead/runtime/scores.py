"""From the logits of a pass to what the host needs of them: the argmax of every node, and its best next tokens."""

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from jacobi import LookaheadError, Scores, Successors

_CHUNK = 128  # vocabulary entries whose maximum is taken first
_LARGE = 1 << 19  # passes with at least so many scores are searched by chunks
_FEW = 8  # best next tokens that are searched one by one
_GROUP = 16  # entries whose maximum is taken first, where more are wanted

_T = TypeVar("_T")


# From logits to what else is to be brought to the host, int32.
Look = Callable[[Tensor], tuple[Tensor, ...]]


def score(logits: Tensor, best: int = 0, look: Look | None = None) -> Scores:
    """Argmax of every node, NaN marked, and optionally the ``best`` highest tokens of each, in one transfer.
    ``logits`` are ``[batch, node, vocab]``; ``best`` = 0 gathers none."""
    return started(lambda: logits, on_host(logits.device), best, look)()


def started(run: Callable[[], Tensor], waits: bool, best: int = 0, look: Look | None = None) -> Callable[[], Scores]:
    """:func:`score` for the logits that ``run`` returns, in two parts: a device that works by itself is given all it
    has to do, and what is returned waits for it. With ``waits`` nothing is done before, and nothing looked for."""
    if waits:

        def whole() -> Scores:
            logits = run()
            lines = _lines(logits)
            return _scores(logits, *_on_cpu(lines, min(max(best, 1), lines.shape[1])), best)

        return whole
    logits = run()
    lines = _lines(logits)
    count = min(max(best, 1), lines.shape[1])
    parts = (_on_device(lines, count), *(look(logits) if look else ()))
    packed = torch.cat([part.flatten() for part in parts])

    def rest() -> Scores:
        brought = np.split(fetch(packed), np.cumsum([part.numel() for part in parts])[:-1])
        found, *beside = (line.reshape(part.shape) for line, part in zip(brought, parts, strict=True))
        return _scores(logits, *_unpacked(found, count), best, tuple(beside))

    return rest


def on_host(device: torch.device) -> bool:
    """Whether a device computes while the program waits, so that reading a result costs nothing."""
    return device.type == "cpu"


def fetch(tensor: Tensor) -> np.ndarray:
    """Bring a tensor to the host. Whatever is read of a pass comes through here, because it waits for the device."""
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found


def send(numbers: Any, device: torch.device) -> Tensor:
    """Bring int64 numbers to a device without waiting for it."""
    if isinstance(numbers, array):  # which takes half the time of NumPy's to fill
        tensor = torch.frombuffer(numbers, dtype=torch.int64)
    else:
        tensor = torch.from_numpy(np.asarray(numbers, np.int64))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _lines(logits: Tensor) -> Tensor:
    lines = logits.detach().flatten(0, 1)
    # Plain decoding compares float64 logits in float32, too, where near ties go to the lower id.
    return lines.float() if lines.dtype == torch.float64 else lines


def _scores(
    logits: Tensor, values: np.ndarray, order: np.ndarray, best: int, beside: tuple[np.ndarray, ...] = ()
) -> Scores:
    _, nodes, vocab = logits.shape
    greedy = _by_row(order[:, 0].tolist(), nodes)
    broken = frozenset(divmod(line, nodes) for line in np.nonzero(np.isnan(values[:, 0]))[0].tolist())
    if best <= 0 or vocab == 1:
        return Scores(logits, greedy, broken, beside=beside)
    ids, values = np.ascontiguousarray(order, np.int32), np.ascontiguousarray(values)
    rows = [slice(start, start + nodes) for start in range(0, len(ids), nodes)]
    return Scores(logits, greedy, broken, [Successors(ids[row], values[row]) for row in rows], beside)


def nan_error(step: int, row: int, token: int) -> LookaheadError:
    """What is raised for logits that are NaN: in which pass, and for which token (counted from 1) of which row."""
    return LookaheadError(
        f"The model's logits are NaN at step {step} (row {row}, token {token}): "
        "expected finite numbers. Check the weights and the dtype (float16 overflows where bfloat16 does not)."
    )


def _by_row(flat: list[_T], nodes: int) -> list[list[_T]]:
    return [flat[start : start + nodes] for start in range(0, len(flat), nodes)]


def _on_cpu(lines: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` highest entries of each line in float32, and their ids. Many scores are swept once, for the maxima
    of chunks, and only the best chunks again: several times faster than ``topk``, or ``max`` with indices, over the
    whole vocabulary."""
    total, vocab = lines.shape
    if count > _FEW or (count > 1 and lines.dtype != torch.float32 and lines.numel() >= _LARGE):
        return _top_on_cpu(lines, count)
    whole = vocab // _CHUNK
    if lines.numel() < _LARGE or whole <= count:
        return _take_highest(lines.to(torch.float32, copy=count > 1).numpy(), count)
    chunks, tail = lines[:, : whole * _CHUNK].unflatten(1, (whole, _CHUNK)), lines[:, whole * _CHUNK :]
    found, best = _take_highest(chunks.amax(-1).to(torch.float32).numpy(), count)
    near = chunks[torch.arange(total)[:, None], torch.from_numpy(best)].float()
    again = found == -np.inf  # one was found several times where few have finite scores
    if again.any():
        near[torch.from_numpy(again)] = -torch.inf
    values, at = _take_highest(torch.cat([near.flatten(1), tail.float()], dim=1).numpy(), count)
    chunk, at = np.divmod(at, _CHUNK)
    best = np.append(best, np.full((total, 1), whole), axis=1)  # the tail follows all chunks
    return values, best[np.arange(total)[:, None], chunk] * _CHUNK + at


def _top_on_cpu(lines: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for a larger ``count``, or a narrower dtype; equal entries after the first are in any order."""
    found, order = _topk(lines, count)
    values, ids = found.float().numpy(), order.numpy()
    for line in np.nonzero(values[:, 0] == values[:, 1])[0]:
        _lead(ids[line], int((lines[line] == found[line, 0]).nonzero()[0]))
    return values, ids


def _topk(lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``topk`` of ``lines`` ``[line, vocab]``, which sweeps them once and for all that follows looks at few of them: at
    the entries of the best groups, which it finds in the same way. A group has one entry of each of ``_GROUP`` parts of
    a line, so that maxima of whole parts are taken at once::

        line       3 1 4 1 | 5 9 2 6 | 5 3 5 8     three parts
        maxima     5 9 5 8                         of four groups
        the best two groups are 1 9 3 and 1 6 8
    """
    vocab = lines.shape[1]
    groups = vocab // _GROUP
    if groups < 8 * count:
        return lines.topk(count)
    parts, tail = lines[:, : groups * _GROUP].unflatten(1, (_GROUP, groups)), lines[:, groups * _GROUP :]
    _, best = _topk(parts.amax(1), count)
    near = parts.gather(2, best[:, None].expand(-1, _GROUP, -1)).flatten(1)
    found, at = torch.cat([near, tail], dim=1).topk(count)
    part, group = at // count, best.gather(1, at % count)
    return found, torch.where(part < _GROUP, part * groups + group, at + (vocab - tail.shape[1] - near.shape[1]))


def _lead(order: np.ndarray, first: int) -> None:
    """Put ``first`` before the other entries of a line, which are as good."""
    order[:] = [first, *(token for token in order if token != first)][: len(order)]


def _take_highest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` highest of each line and their places, by repeated argmax; ``values`` is used up if ``count > 1``.
    NaN counts as the highest, and of equal entries the first."""
    flat, starts = values.reshape(-1), np.arange(0, values.size, values.shape[1])
    highest, places = np.empty((count, len(values)), values.dtype), np.empty((count, len(values)), np.int64)
    for rank in range(count):
        at = values.argmax(1)
        places[rank] = at
        at += starts
        highest[rank] = flat[at]
        if count > 1:
            flat[at] = -np.inf
    return highest.T, places.T


def _on_device(lines: Tensor, count: int) -> Tensor:
    """The same packed to be brought in one transfer, int32 ``[line, 1 + 2 count]``: argmax, ids, values. Equal entries
    after the first are in any order."""
    highest, argmax = lines.max(-1, keepdim=True)
    values, ids = (highest, argmax) if count == 1 else lines.topk(count, dim=-1)
    return torch.cat([argmax.int(), ids.int(), values.float().view(torch.int32)], dim=1)


def _unpacked(packed: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    first, order = packed[:, 0], packed[:, 1 : 1 + count].copy()
    for line in np.nonzero(order[:, 0] != first)[0]:  # topk orders equal entries as it likes
        _lead(order[line], first[line])
    return np.ascontiguousarray(packed[:, 1 + count :]).view(np.float32), order


def highest(lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest entries of each of ``lines`` ``[line, vocab]``, best first, and their ids, on their
    device."""
    if not on_host(lines.device):
        values, ids = lines.topk(count)
        return values.float(), ids
    found, order = _on_cpu(lines, count)
    return torch.from_numpy(np.ascontiguousarray(found)), torch.from_numpy(np.ascontiguousarray(order, np.int64))


def prompt_scores(logits: Tensor, top_k: int) -> Scores:
    """Scores for the prompt's last token, with the best next tokens at all of ``logits`` ``[batch, token, vocab]``."""
    scores = score(logits[:, -1:], top_k)
    if scores.successors is not None and logits.shape[1] > 1:  # what the rest of the prompt said
        earlier = score(logits[:, :-1], top_k).successors or []
        scores.successors[:] = [
            Successors(np.concatenate([before.tokens, last.tokens]), np.concatenate([before.logits, last.logits]))
            for before, last in zip(earlier, scores.successors, strict=True)
        ]
    return scores

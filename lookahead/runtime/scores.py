"""From the logits of a pass to what the host needs of them: the argmax of every node, and its best next tokens."""

import math
from bisect import bisect_right
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from jacobi import LEVEL_STEPS, LookaheadError, Scores, Successors

_CHUNK = 128  # vocabulary entries whose maximum is taken first
_SMALL = 1 << 19  # passes with fewer scores than this are searched in one go
_FEW_LINES, _FEW = 32, 1 << 16  # lines, and scores in them, of which torch finds the best soonest
_SMALL_ARGMAX = 1 << 22  # the same, where only the highest is looked for

_T = TypeVar("_T")


def score(logits: Tensor, best: int = 0) -> Scores:
    """Argmax of every node, NaN marked, and optionally the ``best`` highest tokens of each, in one transfer.

    Args:
        logits: ``[batch, node, vocab]``.
        best: how many next tokens to gather for each node; 0 gathers none.
    """
    _, nodes, vocab = logits.shape
    lines = logits.reshape(-1, vocab)
    if lines.dtype == torch.float64:
        lines = lines.float()  # plain decoding compares in float32, where near ties go to the lower id
    if best <= 0 or vocab == 1:
        greedy, broken = _argmax(lines)
        return Scores(logits, _by_row(greedy, nodes), _pairs(broken, nodes))
    best = min(best, vocab)
    is_few = lines.device.type == "cpu" and len(lines) <= _FEW_LINES and lines.numel() <= _FEW
    few = _of_few(lines, best) if is_few else None
    if few is not None:
        tokens, levels = few
        return Scores(
            logits, _by_row([line[0] for line in tokens], nodes), frozenset(), _successors(tokens, levels, nodes)
        )
    values, order = (_highest_by_chunks if _large(lines, _SMALL) else _highest)(lines, best)
    with np.errstate(invalid="ignore"):  # between infinities; what comes of it is the last level
        gaps = values[:, :1] - values
    gaps[:, 0] = gaps[:, 1] if values.shape[1] > 1 else 0.0
    levels = np.searchsorted(LEVEL_STEPS, gaps, side="right").tolist()
    ids = order.tolist()
    if np.isneginf(values[:, -1]).any():  # excluded tokens are no successors
        counts = np.maximum(1, (values != -np.inf).sum(1)).tolist()
        ids = [line[:count] for line, count in zip(ids, counts, strict=True)]
        levels = [line[:count] for line, count in zip(levels, counts, strict=True)]
    greedy = [line[0] for line in ids]
    broken = np.nonzero(np.isnan(values[:, 0]))[0].tolist()
    return Scores(logits, _by_row(greedy, nodes), _pairs(broken, nodes), _successors(ids, levels, nodes))


def nan_error(step: int, row: int, token: int) -> LookaheadError:
    """What is raised for logits that are NaN: in which pass, and for which token (counted from 1) of which row."""
    return LookaheadError(
        f"The model's logits are NaN at step {step} (row {row}, token {token}): "
        "expected finite numbers. Check the weights and the dtype (float16 overflows where bfloat16 does not)."
    )


def _successors(ids: list[list[int]], levels: list[list[int]], nodes: int) -> list[Successors]:
    return list(map(Successors, _by_row(ids, nodes), _by_row(levels, nodes)))


def _of_few(lines: Tensor, best: int) -> tuple[list[list[int]], list[list[int]]] | None:
    """Ids and levels of the ``best`` highest entries of each of a few lines; None where ties, NaN or -inf need care.

    Between passes a call of NumPy costs more than one of torch, and NumPy needs many; its sweeps win with more scores.
    """
    values, ids = lines.detach().float().topk(best, dim=-1)
    levels = []
    for line in values.tolist():
        second = line[1] if best > 1 else line[0]
        if not line[0] > second or line[-1] == -math.inf:
            return None
        levels.append([bisect_right(LEVEL_STEPS, line[0] - value) for value in [second, *line[1:]]])
    return ids.tolist(), levels


def _large(lines: Tensor, small: int) -> bool:
    """Whether searching by chunks pays."""
    return lines.device.type == "cpu" and lines.numel() >= small and lines.shape[-1] > 2 * _CHUNK


def _by_row(flat: list[_T], nodes: int) -> list[list[_T]]:
    return [flat[start : start + nodes] for start in range(0, len(flat), nodes)]


def _pairs(lines: list[int], nodes: int) -> frozenset[tuple[int, int]]:
    return frozenset(divmod(line, nodes) for line in lines)


def _argmax(lines: Tensor) -> tuple[list[int], list[int]]:
    """Argmax of each line, the lower id of equal ones, and the lines that hold NaN."""
    if _large(lines, _SMALL_ARGMAX):
        values, tokens = _highest_by_chunks(lines, 1)
        return tokens[:, 0].tolist(), np.nonzero(np.isnan(values[:, 0]))[0].tolist()
    if lines.device.type == "cpu":  # NumPy's argmax is several times faster than torch's here
        numbers = lines.detach().float().numpy()
        if len(numbers) == 1:
            token = int(numbers[0].argmax())
            return [token], [0] if math.isnan(numbers[0, token]) else []
        order = numbers.argmax(1)
        return order.tolist(), np.nonzero(np.isnan(numbers[np.arange(len(order)), order]))[0].tolist()
    vocab = lines.shape[-1]
    highest, first = lines.max(-1)  # NaN counts as the highest
    marked = torch.where(highest.isnan(), first + vocab, first).tolist()
    if max(marked) < vocab:
        return marked, []
    return [token % vocab for token in marked], [line for line, token in enumerate(marked) if token >= vocab]


def _highest(lines: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` highest entries of each line and their ids, in one transfer; the first is the argmax."""
    if lines.device.type == "cpu":
        return _take_highest(lines.detach().to(torch.float32, copy=True).numpy(), count)
    values, ids = lines.float().topk(count, dim=-1)
    argmax_there = lines.max(-1).indices
    # Integers and floats of 32 bits travel in one tensor.
    packed = torch.cat([argmax_there[:, None].int(), ids.int(), values.view(torch.int32)], dim=1).cpu().numpy()
    argmax, order = packed[:, 0], packed[:, 1 : 1 + count].copy()
    numbers = np.ascontiguousarray(packed[:, 1 + count :]).view(np.float32)
    for line in np.nonzero(order[:, 0] != argmax)[0]:  # topk orders equal entries as it likes
        rest = [token for token in order[line] if token != argmax[line]]
        order[line] = [argmax[line], *rest][:count]
    return numbers, order


def _highest_by_chunks(lines: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on a CPU for many scores: the maxima of chunks in one vectorised sweep, then only the best chunks.

    Several times faster than ``topk``, or ``max`` with indices, over the whole vocabulary.
    """
    total, vocab = lines.shape
    lines = lines.detach()
    whole = vocab // _CHUNK
    chunks = lines[:, : whole * _CHUNK].view(total, whole, _CHUNK)
    tail = lines[:, whole * _CHUNK :]
    maxima = chunks.amax(-1)
    if tail.shape[1]:
        maxima = torch.cat([maxima, tail.amax(-1, keepdim=True)], dim=1)
    found, best = _take_highest(maxima.float().numpy().copy(), min(count, maxima.shape[1]))
    near = chunks[torch.arange(total)[:, None], torch.from_numpy(np.minimum(best, whole - 1))].float().numpy()
    if tail.shape[1]:
        line, place = np.nonzero(best == whole)
        near[line, place] = -np.inf
        near[line, place, : tail.shape[1]] = tail.float().numpy()[line]
    near[np.isneginf(found)] = -np.inf  # where fewer chunks have a finite score, one was found several times
    values, at = _take_highest(near.reshape(total, -1), count)
    ids = np.take_along_axis(best, at // _CHUNK, axis=1) * _CHUNK + at % _CHUNK
    return values, np.minimum(ids, vocab - 1)  # only a line with too few finite entries points past the tail


def _take_highest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` highest of each line and their places, by repeated argmax; ``values`` is used up.

    NaN counts as the highest, and of equal entries the first.
    """
    flat, starts = values.reshape(-1), np.arange(0, values.size, values.shape[1])
    highest = np.empty((count, len(values)), values.dtype)
    places = np.empty((count, len(values)), np.int64)
    for rank in range(count):
        at = values.argmax(1)
        places[rank] = at
        at += starts
        highest[rank] = flat[at]
        flat[at] = -np.inf
    return highest.T, places.T


def prompt_scores(logits: Tensor, harvest: int) -> Scores:
    """Scores for the prompt's last token, with the best next tokens at all of ``logits`` ``[batch, token, vocab]``."""
    scores = score(logits[:, -1:], harvest)
    if scores.successors is not None and logits.shape[1] > 1:  # what the rest of the prompt said
        earlier = score(logits[:, :-1], harvest).successors or []
        for row, before in zip(scores.successors, earlier, strict=True):
            row.tokens[:0], row.levels[:0] = before.tokens, before.levels
    return scores

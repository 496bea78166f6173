"""From the logits of a pass to what the host needs of them: the argmax of every node, and its best next tokens."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jacobi import LookaheadError, Scores, Successors
from lookahead import _native

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


def scores_of_all(scores: Scores, rows: Sequence[int], batch: int) -> Scores:
    """What a pass over some ``rows`` of a ``batch`` says, in the places of all; nobody reads those of the others."""
    at = {row: place for place, row in enumerate(rows)}
    places = [at.get(row, 0) for row in range(batch)]
    scores.logits = spread(scores.logits, rows, batch)
    scores.greedy = [scores.greedy[place] for place in places]
    scores.broken = frozenset((rows[place], node) for place, node in scores.broken)
    scores.successors = scores.successors and [scores.successors[place] for place in places]
    return scores


def spread(logits: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """Logits ``[row, node, vocab]`` of some ``rows`` in the places of all of a ``batch``; nobody reads the others."""
    if len(rows) == 1:
        return logits.expand(batch, -1, -1)
    whole = logits.new_empty((batch, *logits.shape[1:]))
    whole[list(rows)] = logits
    return whole


def on_host(device: torch.device) -> bool:
    """Whether a device computes while the program waits, so that reading a result costs nothing."""
    return device.type == "cpu"


def fetch(tensor: Tensor) -> np.ndarray:
    """Bring a tensor to the host. Whatever is read of a pass comes through here, because it waits for the device."""
    return tensor.detach().cpu().numpy()


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
    greedy = order[:, 0].reshape(-1, nodes).tolist()
    broken = frozenset(divmod(line, nodes) for line in np.nonzero(np.isnan(values[:, 0]))[0].tolist())
    if best <= 0 or vocab == 1:
        return Scores(logits, greedy, broken, beside=beside)
    rows = [slice(start, start + nodes) for start in range(0, len(order), nodes)]
    return Scores(logits, greedy, broken, [Successors(order[row], values[row]) for row in rows], beside)


def nan_error(step: int, row: int, token: int) -> LookaheadError:
    """What is raised for logits that are NaN: in which pass, and for which token (counted from 1) of which row."""
    return LookaheadError(
        f"The model's logits are NaN at step {step} (row {row}, token {token}): "
        "expected finite numbers. Check the weights and the dtype (float16 overflows where bfloat16 does not)."
    )


def _on_cpu(lines: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` highest entries of each line in float32, best first, and their ids. NaN counts as the highest."""
    if _native.speedups is None:
        return _unpacked(fetch(_on_device(lines, count)), count)
    if lines.dtype not in (torch.float32, torch.bfloat16):
        lines = lines.float()
    lines = lines if lines.stride(-1) == 1 else lines.contiguous()
    values, ids = np.empty((len(lines), count), np.float32), np.empty((len(lines), count), np.int32)
    given = lines if lines.dtype == torch.float32 else lines.view(torch.int16)
    _native.speedups.best_of(given.numpy().data, values.data, ids.data)
    return values, ids


def _on_device(lines: Tensor, count: int) -> Tensor:
    """The same packed, int32 ``[line, 1 + 2 count]``: argmax, ids, values, of which equal ones are in any order."""
    argmax = lines.argmax(-1, keepdim=True)
    values, ids = (lines.gather(-1, argmax), argmax) if count == 1 else lines.topk(count, dim=-1)
    return torch.cat([argmax.int(), ids.int(), values.float().view(torch.int32)], dim=1)


def _unpacked(packed: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    first, order = packed[:, 0], packed[:, 1 : 1 + count].copy()
    for line in np.nonzero(order[:, 0] != first)[0]:  # topk orders equal entries as it likes
        order[line] = [first[line], *(token for token in order[line] if token != first[line])][:count]
    return np.ascontiguousarray(packed[:, 1 + count :]).view(np.float32), order


def highest(lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest entries of each of ``lines`` ``[line, vocab]``, best first, and ids, where they are."""
    if not on_host(lines.device):
        values, ids = lines.topk(count)
        return values.float(), ids
    found, order = _on_cpu(lines, count)
    return torch.from_numpy(found), torch.from_numpy(order.astype(np.int64))


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

"""The random numbers of a sampled batch, which each sequence reads at its own pace."""

import torch
from torch import Tensor

from lookahead.verify.sequences import Sequences

# Indices that a sequence may lead the slowest by: each keeps a [batch, vocab] noise alive, so bytes are limited too.
_MOST_LEAD = 32
_MOST_BYTES = 64 << 20


class Noise:
    """Exponential noise ``[batch, vocab]`` for each written index, as plain decoding draws it.

    torch draws ``multinomial(p, 1)`` as ``argmax(p / noise)``, for a whole batch at once. Each sequence reads its own
    line of the same noise, so texts and the generator's final state are plain decoding's::

        index         0    1    2    3
        sequence 0    read read read next       noise 0 is forgotten, 1 and 2 wait for sequence 1
        sequence 1    read next
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._kept: dict[int, Tensor] = {}
        self._drawn = 0

    def lines(self, rows: list[int], like: Tensor) -> Tensor:
        """The noise ``[row, vocab]`` for the next token of each row, in the dtype and on the device of ``like``."""
        indices = [len(self._sequences.written[row]) for row in rows]
        while self._drawn <= max(indices):
            shape = (self._sequences.batch, like.shape[-1])
            self._kept[self._drawn] = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_()
            self._drawn += 1
        return torch.stack([self._kept[index][row] for row, index in zip(rows, indices, strict=True)])

    def limit(self) -> int:
        """How many tokens a sequence may have written before it waits for the slowest."""
        largest = max((noise.nbytes for noise in self._kept.values()), default=1)
        return min(self._going(), default=0) + max(1, min(_MOST_LEAD, _MOST_BYTES // largest))

    def forget(self) -> None:
        """Drop the noise that every unfinished sequence has read."""
        slowest = min(self._going(), default=self._drawn)
        for index in [index for index in self._kept if index < slowest]:
            del self._kept[index]

    def _going(self) -> list[int]:
        pairs = zip(self._sequences.written, self._sequences.finished, strict=True)
        return [len(written) for written, finished in pairs if not finished]

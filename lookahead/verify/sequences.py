"""The tokens of a batch as they are written: lists for the loop, tensors for whoever asks for a prefix."""

import torch
from torch import Tensor


class Text:
    """Prompt and new tokens of every row; rows may have different lengths.

    Args:
        input_ids: ``[batch, prompt]``; never written into.
        pad: fills what a shorter row lacks.

    Attributes:
        written: new tokens of each row, appended to by the caller.
    """

    def __init__(self, input_ids: Tensor, pad: int) -> None:
        self.batch, self.prompt_length = input_ids.shape
        self.written: list[list[int]] = [[] for _ in range(self.batch)]
        self.device = input_ids.device
        self._pad = pad
        self._ids = input_ids.long()
        self._filled = [0] * self.batch  # tokens of ``written`` that ``_ids`` holds already

    @property
    def longest(self) -> int:
        """New tokens of the longest row."""
        return max(map(len, self.written))

    def prefix(self, row: int) -> Tensor:
        """One row's text so far, ``[1, token]``."""
        self._sync()
        return self._ids[row : row + 1, : self.prompt_length + len(self.written[row])]

    def prefixes(self) -> Tensor:
        """The text so far of rows that have the same length, ``[batch, token]``."""
        self._sync()
        return self._ids[:, : self.prompt_length + len(self.written[0])].contiguous()

    def padded(self) -> Tensor:
        """All of it, ``[batch, token]``, shorter rows padded at the end."""
        self._sync()
        ids = self._ids[:, : self.prompt_length + self.longest].clone()
        for row, written in enumerate(self.written):
            ids[row, self.prompt_length + len(written) :] = self._pad
        return ids

    def _sync(self) -> None:
        """Bring ``_ids`` up to date with ``written``; its first growth parts it from the caller's tensor."""
        need = self.prompt_length + self.longest
        if self._ids.shape[1] < need:
            self._ids = torch.nn.functional.pad(self._ids, (0, max(64, need)), value=self._pad)
        for row, written in enumerate(self.written):
            filled = self._filled[row]
            if filled < len(written):
                start, new = self.prompt_length + filled, written[filled:]
                self._ids[row, start : start + len(new)] = torch.tensor(new, device=self.device)
                self._filled[row] = len(written)

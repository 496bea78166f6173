"""The sequences of a batch: prompt, written tokens, and which have ended. Lists for the loop, tensors for prefixes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lookahead.models.compat import pad_token

_MOST_NEW = 1 << 16  # tokens to write where no criterion limits the length


class Sequences:
    """Prompt and new tokens of every sequence of a batch; each may have got further than the others.

    Two prompts of three tokens, the second padded on the left and already ended by 2, which 0 pads::

        prompt       written        finished   lengths()   padded()
        17 41  5     [8, 8, 31]     False      3           17 41  5  8  8 31
         0  9 23     [6, 2]         True       2            0  9 23  6  2  0

    ``input_ids`` ``[batch, prompt]`` are never written into. With ``keep_up`` finished sequences write pad tokens until
    all have the same length, so that scores and the KV cache are what plain decoding leaves.
    """

    def __init__(
        self, input_ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, *, keep_up: bool
    ) -> None:
        self.batch, self.prompt_length = input_ids.shape
        self.device = input_ids.device
        self.written: list[list[int]] = [[] for _ in range(self.batch)]  # new tokens, which the verifier appends
        self.finished = [False] * self.batch
        self.keep_up = keep_up and self.batch > 1
        self.pad = pad_token(config)
        self.pads = any(hasattr(rule, "eos_token_id") for rule in criteria)  # after an end token
        ends = [rule.eos_token_id.flatten().tolist() for rule in criteria if isinstance(rule, EosTokenCriteria)]
        self.end_tokens = frozenset(token for tokens in ends for token in tokens)
        lengths = [rule.max_length for rule in criteria if isinstance(rule, MaxLengthCriteria)]
        self.max_length = min(lengths, default=self.prompt_length + _MOST_NEW)
        self._ended_at: dict[int, int] = {}  # new tokens of a sequence when it ended; what follows is padding
        self._ids = input_ids.long()
        self._filled = [0] * self.batch  # tokens of ``written`` that ``_ids`` holds already

    @property
    def longest(self) -> int:
        """New tokens of the longest sequence."""
        return max(map(len, self.written))

    @property
    def most_new(self) -> int:
        """New tokens that a sequence can have."""
        return max(0, self.max_length - self.prompt_length)

    def lengths(self) -> list[int]:
        """New tokens of each sequence, padding left out."""
        return [self._ended_at.get(row, len(written)) for row, written in enumerate(self.written)]

    def finish(self, row: int) -> None:
        self.finished[row] = True
        if self.pads:
            self._ended_at[row] = len(self.written[row])

    def behind(self, row: int) -> int:
        """Tokens of padding that a finished sequence still has to write."""
        return self.longest - len(self.written[row]) if self.keep_up else 0

    def idle(self, row: int) -> bool:
        """Whether a sequence has nothing more to write, not even padding."""
        return self.finished[row] and not self.behind(row)

    def prefix(self, row: int) -> Tensor:
        """One sequence so far, ``[1, token]``."""
        self._sync()
        return self._ids[row : row + 1, : self.prompt_length + len(self.written[row])]

    def prefixes(self) -> Tensor:
        """All sequences so far, which have the same length, ``[batch, token]``."""
        self._sync()
        return self._ids[:, : self.prompt_length + len(self.written[0])].contiguous()

    def texts(self, rows: Sequence[int]) -> tuple[Tensor, bool]:
        """Some sequences so far, ``[row, token]``, and whether any of them was shorter than others: those are padded
        with their own last token."""
        self._sync()
        lengths = [self.prompt_length + len(self.written[row]) for row in rows]
        most, least = max(lengths), min(lengths)
        ids = self._ids[:, :most] if len(rows) == self.batch else self._ids[list(rows), :most]
        if least < most:
            ends = torch.tensor(lengths, device=self.device)[:, None]
            beyond = torch.arange(most, device=self.device) >= ends
            ids = torch.where(beyond, ids.gather(1, ends - 1), ids)
        return ids, least < most

    def padded(self) -> Tensor:
        """All sequences so far, ``[batch, token]``, shorter ones padded at the end."""
        self._sync()
        ids = self._ids[:, : self.prompt_length + self.longest].clone()
        for row, written in enumerate(self.written):
            ids[row, self.prompt_length + len(written) :] = self.pad
        return ids

    def _sync(self) -> None:
        """Bring ``_ids`` up to date with ``written``; its first growth parts it from the caller's tensor."""
        need = self.prompt_length + self.longest
        if self._ids.shape[1] < need:
            self._ids = torch.nn.functional.pad(self._ids, (0, max(64, need)), value=self.pad)
        for row, written in enumerate(self.written):
            filled = self._filled[row]
            if filled < len(written):
                start, new = self.prompt_length + filled, written[filled:]
                self._ids[row, start : start + len(new)] = torch.tensor(new, device=self.device)
                self._filled[row] = len(written)

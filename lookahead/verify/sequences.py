"""The sequences of a batch: prompt, written tokens, and which have ended; and what is noted of tokens on request."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from jacobi import Path
from lookahead.models.compat import pad_token
from lookahead.runtime.scores import send

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
        self.stay = self.keep_up  # those that have ended are fed on
        self.in_step = False  # those that are ahead wait for the others
        self.pad = pad_token(config)
        self.pads = any(hasattr(rule, "eos_token_id") for rule in criteria)  # after an end token
        ends = [rule.eos_token_id.flatten().tolist() for rule in criteria if isinstance(rule, EosTokenCriteria)]
        self.end_tokens = frozenset[int]().union(*ends)
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

    def slowest(self, default: int = 0) -> int:
        """New tokens of the shortest sequence that has not ended; ``default`` if all have."""
        pairs = zip(self.written, self.finished, strict=True)
        return min((len(written) for written, done in pairs if not done), default=default)

    def lengths(self) -> list[int]:
        """New tokens of each sequence, padding left out."""
        return [self._ended_at.get(row, len(written)) for row, written in enumerate(self.written)]

    def finish(self, row: int) -> None:
        self.finished[row] = True
        if self.pads:
            self._ended_at[row] = len(self.written[row])

    def cut(self, paths: Sequence[Path]) -> None:
        """Time is up: end all sequences where the slowest stands that had not ended, ``paths`` of the last pass, too::

        written            finished          written      finished
        [8, 8, 31, 4]      False             [8, 8]       True
        [6, 2]             True              [6, 2]       True
        [7, 5]             False             [7, 5]       True
        """
        length = self.slowest(self.longest)
        for row, (written, path) in enumerate(zip(self.written, paths, strict=True)):
            kept = max(0, len(path.tokens) - max(0, len(written) - length))
            del written[length:], path.tokens[kept:], path.nodes[kept:]
            self._filled[row] = min(self._filled[row], length)
            self._ended_at[row] = min(self._ended_at.get(row, length), length)
            self.finished[row] = True

    def behind(self, row: int) -> int:
        """Tokens of padding that a finished sequence still has to write."""
        return self.longest - len(self.written[row]) if self.keep_up else 0

    def idle(self, row: int) -> bool:
        """True if a sequence has nothing more to write, not even padding."""
        return self.finished[row] and not self.behind(row)

    def leaves(self, row: int) -> bool:
        """True if a sequence need not even be fed any more."""
        return self.finished[row] and not self.stay

    def prefixes(self) -> Tensor:
        """All sequences so far, which have the same length, ``[batch, token]``."""
        self._sync()
        return self._ids[:, : self.prompt_length + len(self.written[0])].contiguous()

    def texts(self, rows: Sequence[int], branches: Sequence[Sequence[int]] = ()) -> Tensor:
        """Some sequences so far, ``[place, token]``, each followed by the tokens of its branch, if there are any. Those
        that are shorter than others are padded with their own last token."""
        self._sync()
        lengths, depths = [self.prompt_length + len(self.written[row]) for row in rows], list(map(len, branches))
        most, deepest = max(lengths), max(depths, default=0)
        if len(rows) == 1:
            ids = self._ids[rows[0] : rows[0] + 1, :most]
        else:
            all_rows = list(rows) == list(range(self.batch))
            ids = self._ids[:, :most] if all_rows else self._ids[send(rows, self.device), :most]
        if not deepest and min(lengths) == most:
            return ids
        ends = send(lengths, self.device)[:, None]
        totals = [length + depth for length, depth in zip(lengths, depths or [0] * len(rows), strict=True)]
        at = torch.minimum(torch.arange(max(totals), device=self.device), send(totals, self.device)[:, None] - 1)
        if deepest:
            behind = send([[*branch, *[self.pad] * (deepest - len(branch))] for branch in branches], self.device)
            ids, at = torch.cat([ids, behind], dim=1), torch.where(at < ends, at, at - ends + most)
        return ids.gather(1, at)

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
            if new := written[self._filled[row] :]:
                start = self.prompt_length + self._filled[row]
                self._ids[row, start : start + len(new)] = send(new, self.device)
                self._filled[row] = len(written)


class Records:
    """Scores and logits noted for each written token; false if nothing is asked for."""

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        kinds = [kind for kind, asked in wanted.items() if asked and config.return_dict_in_generate]
        self._lines: dict[str, list[dict[int, Tensor]]] = {kind: [{} for _ in range(batch)] for kind in kinds}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def note(self, row: int, index: int, scores: Tensor, logits: Tensor) -> None:
        """Note processed scores and logits ``[vocab]`` of a row's token ``index``."""
        for kind, line in (("scores", scores), ("logits", logits)):
            if kind in self._lines:
                self._lines[kind][row][index] = line

    def scores_of(self, row: int) -> tuple[Tensor, ...] | None:
        """The scores of one row so far, ``[1, vocab]`` each; None if not asked for."""
        scores = self._lines.get("scores")
        return None if scores is None else tuple(line[None] for line in scores[row].values())

    def of(self, kind: Literal["scores", "logits"], *, take: bool = False) -> tuple[Tensor, ...] | None:
        """One ``[batch, vocab]`` for each index that all rows have; None if not asked for. With ``take`` they are then
        noted no longer: what rows hold of an index goes as its batch is put together."""
        rows = self._lines.pop(kind, None) if take else self._lines.get(kind)
        if rows is None:
            return None
        lines = [(row.pop if take else row.__getitem__) for row in rows]
        return tuple(torch.stack([line(index) for line in lines]) for index in range(min(map(len, rows))))

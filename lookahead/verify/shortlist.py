"""Draws among the best few tokens, where ``top_k`` leaves no others."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from jacobi import Successors
from lookahead.runtime.scores import highest

_TIES = 8  # logits beyond ``top_k`` that are listed, because some may equal its last
_LEAST_VOCAB = 1 << 13  # of smaller vocabularies, all tokens are compared as fast
UNSURE = 2  # where a token may be another one
_ROUNDING = 1e-6  # of a score, for each unit of what it is computed from: ten times float32's
_CLOSE = 1e-5  # the same for sums of chances
_LARGEST = 1024  # top_k that is worth a list
_NAMES = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Finds the token that plain decoding draws from the best logits alone, where that is certain.

    ``generate`` sorts the whole vocabulary for ``top_p``, and again for every token. Where ``top_k`` comes before, all
    that matters is in a list of a few tokens more, and a draw is the argmax of log p - log e, with the noise e of
    :class:`.Noise`. With ``top_k=3``, ``top_p=0.9`` and T = 1::

        token      logit      p      e    log p - log e
        sat          9.0   0.73   0.80            -0.10   <- drawn
        ran          7.9   0.24   0.90            -1.32
        slept        5.9   0.03   0.02                    cut: 0.97 of p come before it, no less than 0.9
        ate          5.1                                  the fourth shows that the list ends here, and not in a tie

    Sums and quotients are not rounded as plain decoding rounds them, so nothing is certain where two scores are as
    close as that, or where the best is of a token that may be cut or not. Then the whole vocabulary has to decide.
    """

    top_k: int
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "Shortlist | None":
        """For what ``processors`` do to logits; None where a list cannot tell what that is."""
        names = [_NAMES.get(type(each), "") for each in processors]
        if "top_k" not in names or names != [name for name in _NAMES.values() if name in names]:
            return None
        usual = all(getattr(each, "min_tokens_to_keep", 1) == 1 for each in processors)
        usual &= all(getattr(each, "filter_value", -torch.inf) == -torch.inf for each in processors)
        found = cls(**{name: getattr(each, name) for name, each in zip(names, processors, strict=True)})
        return found if usual and found.top_k <= _LARGEST else None

    def pays(self, vocab: int) -> bool:
        """Whether a list takes less time than the whole of so many tokens."""
        return vocab >= _LEAST_VOCAB

    def found(self, raw: Tensor, noise: Callable[[Tensor], Tensor], said: Successors | None = None) -> np.ndarray:
        """The choices of logits ``[place, vocab]`` on a host, in float32, of which the best may be ``said`` already;
        ``noise`` gives that of tokens ``[place, rank]``."""
        if said is None or said.tokens.shape[1] <= min(self.top_k, raw.shape[1] - 1):
            logits, ids = highest(raw, min(self.top_k + _TIES, raw.shape[1]))
            said = Successors(ids.numpy(), logits.numpy())
        ids = torch.from_numpy(said.tokens).long()
        return self.choices(said.tokens, said.logits, noise(ids).numpy(), raw.shape[1])

    def listed(self, raw: Tensor, noise: Callable[[Tensor], Tensor]) -> Tensor:
        """What :meth:`choices` needs of logits ``[place, vocab]``, made on their device: int32 ``[place, 3 count]``."""
        logits, ids = highest(raw, min(self.top_k + _TIES, raw.shape[1]))
        return torch.cat([ids.int(), logits.view(torch.int32), noise(ids).view(torch.int32)], dim=1)

    def unpacked(self, listed: np.ndarray, vocab: int) -> np.ndarray:
        """The choices of such lists."""
        ids, logits, noise = np.split(listed, 3, axis=1)
        return self.choices(ids, logits.view(np.float32), noise.view(np.float32), vocab)

    def choices(self, ids: np.ndarray, logits: np.ndarray, noise: np.ndarray, vocab: int) -> np.ndarray:
        """The tokens that are drawn, packed, int32 ``[place, 2]``: each with 1, or :data:`UNSURE`; by the best ids and
        logits ``[place, rank]``, best first, and their noise."""
        with np.errstate(invalid="ignore"):
            ranks, sure = self._drawn(logits, noise, whole=ids.shape[1] == vocab)
        return np.stack([np.take_along_axis(ids, ranks[:, None], 1)[:, 0], np.where(sure, 1, UNSURE)], axis=1)

    def _drawn(self, logits: np.ndarray, noise: np.ndarray, whole: bool) -> tuple[np.ndarray, np.ndarray]:
        """The ranks ``[place]`` of what is drawn, and for each whether that is certain; ``whole``: no token is left
        out of the lists."""
        best, last = logits[:, :1], logits[:, min(self.top_k, logits.shape[1]) - 1, None]
        near = _ROUNDING * (32.0 + 2.0 * (abs(best) + abs(last)) / self.temperature)
        listed = np.count_nonzero(logits >= last, 1)[:, None]  # top_k keeps those that equal the last
        sure = listed == np.count_nonzero(logits > last - near * self.temperature, 1)[:, None]
        if not whole:
            sure &= listed < logits.shape[1]
        most = int(listed.max())
        scaled = (logits[:, :most] - best) / np.float32(self.temperature)
        ranks = np.arange(most)
        if most > listed.min():
            scaled[ranks >= listed] = -np.inf
        scores, kept, likely = scaled - np.log(noise[:, :most]), listed, listed  # kept for certain, and at most
        if self.top_p < 1.0 or self.min_p:
            chances = np.exp(scaled)
            if self.top_p < 1.0:
                kept, likely = self._cut(scaled, chances, near)
            if self.min_p:
                kept = np.minimum(kept, np.count_nonzero(chances > self.min_p * (1.0 + _CLOSE), 1)[:, None])
                likely = np.minimum(likely, np.count_nonzero(chances > self.min_p * (1.0 - _CLOSE), 1)[:, None])
            scores[ranks >= likely] = -np.inf
        drawn = scores.argmax(1)[:, None]
        highest_score = np.take_along_axis(scores, drawn, 1)
        alone = np.count_nonzero(scores > highest_score - near, 1)[:, None] == 1  # not so of what is not finite
        return drawn[:, 0], (sure & alone & (drawn < kept))[:, 0]

    def _cut(self, scaled: np.ndarray, chances: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many ``top_p`` keeps for certain ``[place, 1]``, and at most: of equal ones it may cut any."""
        before = (chances.cumsum(1) - chances) / chances.sum(1, keepdims=True)
        surely = np.count_nonzero(before < self.top_p - _CLOSE, 1)
        maybe = np.count_nonzero(before < self.top_p + _CLOSE, 1)
        ends = np.append(scaled, np.full((len(scaled), 1), -np.inf), axis=1)
        lines = np.arange(len(scaled))
        first_cut, last_kept = ends[lines, surely][:, None], ends[lines, maybe - 1][:, None]
        return (
            np.count_nonzero(scaled > first_cut + near, 1)[:, None],
            np.count_nonzero(scaled > last_kept - near, 1)[:, None],
        )

"""Draws that the best few logits decide, without the whole vocabulary's probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from jacobi import Successors, TokenTree
from lookahead import _native
from lookahead.runtime.scores import highest
from lookahead.verify.noise import NoiseAt

_TIES = 8  # logits beyond ``top_k`` that are listed, because some may equal its last
_LISTED = 64  # logits that are listed where there is no ``top_k``
SURE, UNSURE = 1, 2  # where a token may be another one
Pick = tuple[int, int]  # a token, and one of these
_ROUNDING = 1e-6  # of a score, for each unit of what it is computed from: ten times float32's
_TOO_NEAR = 1.0  # where logits are as large as that, plain decoding may find no probabilities
_CLOSE = 10 * _ROUNDING  # the same for sums of chances
_LARGEST = 1024  # top_k that is worth a list
_NAMES = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
_count: Callable[[np.ndarray], int] = np.count_nonzero


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Finds the token that plain decoding draws from the best logits, where that is certain.

    ``generate`` makes probabilities of the whole vocabulary, and sorts it for ``top_k`` and for ``top_p``, for every
    token. But a draw is the argmax of log p - log e, with the noise e of :class:`.Noise`, and with ``top_k`` all that
    matters is in a list of a few tokens more. With ``top_k=3``, ``top_p=0.9`` and T = 1::

        token      logit      p      e    log p - log e
        sat          9.0   0.73   0.80            -0.10   <- drawn
        ran          7.9   0.24   0.90            -1.32
        slept        5.9   0.03   0.02                    cut: 0.97 of p come before it, no less than 0.9
        ate          5.1                                  the fourth shows that the list ends here, and not in a tie

    Without ``top_k`` a token that is not listed may be drawn, too, if its noise is small enough, for which C looks
    through all of the noise; ``top_p`` needs the sum of all chances.

    Sums and quotients are not rounded as plain decoding rounds them, so nothing is certain where two scores are as
    close as that, or where the best is of a token that may be cut or not. Then the whole vocabulary has to decide.
    """

    top_k: int = 0  # all tokens
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "Shortlist | None":
        """For what ``processors`` do to logits; None where a list cannot tell what that is."""
        names = [_NAMES.get(type(each), "") for each in processors]
        if names != [name for name in _NAMES.values() if name in names]:
            return None
        usual = all(getattr(each, "min_tokens_to_keep", 1) == 1 for each in processors)
        usual &= all(getattr(each, "filter_value", -torch.inf) == -torch.inf for each in processors)
        found = cls(**{name: getattr(each, name) for name, each in zip(names, processors, strict=True)})
        return found if usual and found.top_k <= _LARGEST else None

    def decides(self, waits: bool) -> bool:
        """True if it is of use, on a device that ``waits`` or not."""
        return bool(self.top_k) or (waits and _native.speedups is not None)

    def path(
        self,
        raw: Tensor,
        node: int,
        tree: TokenTree,
        lines: Sequence[memoryview | None],
        row: int = 0,
        said: Successors | None = None,
    ) -> list[Pick]:
        """The choice of logits ``[node, vocab]`` at one node, in C on the host, and those at its children that are
        drawn, as far as they are certain and ``lines`` go; of each line the noise of a ``row`` counts. Where what is
        ``said`` does not list enough, C finds the best of each node that it comes to."""
        raw = raw.cpu() if raw.dtype == torch.bfloat16 else raw.to("cpu", torch.float32)
        least = min(raw.shape[1], self.top_k + 1 if self.top_k else _LISTED)
        ids: Any = None
        best: Any = None
        if said is not None and said.tokens.shape[1] >= least:
            ids, best = np.ascontiguousarray(said.tokens, np.int32).data, said.logits.data
        view = (raw.view(torch.int16) if raw.dtype == torch.bfloat16 else raw).numpy().data
        warped = (self.temperature, self.top_k, self.top_p, self.min_p)
        margins, path = (_ROUNDING, _CLOSE, self._most()), list[Pick]()
        for line in lines:
            if path:
                token, sure = path[-1]
                node = tree.children[node].get(token, -1) if sure == SURE else -1
                if node < 0:
                    break
            path.append(_native.speedups.drawn(view, ids, best, line, (node, row, warped, margins)))
        return path

    def _most(self) -> int:
        """How many logits a list should have."""
        return self.top_k + _TIES if self.top_k else _LISTED

    def listed(self, raw: Tensor, noise: NoiseAt) -> Tensor:
        """Lists for :meth:`unpacked`, of logits ``[place, vocab]``, where these are: int32 ``[place, 3 count]``."""
        logits, ids = highest(raw, min(raw.shape[1], self._most()))
        return torch.cat([ids.int(), logits.view(torch.int32), noise.of(ids).view(torch.int32)], dim=1)

    def unpacked(self, listed: np.ndarray, vocab: int) -> list[Pick]:
        """The tokens that are drawn, by such lists."""
        ids, logits, noise = np.split(listed, 3, axis=1)
        lists = zip(ids, logits.view(np.float32), noise.view(np.float32), strict=True)
        with np.errstate(all="ignore"):
            return [self._choice(*each, vocab) for each in lists]

    def _choice(self, ids: np.ndarray, logits: np.ndarray, noise: np.ndarray, vocab: int) -> Pick:
        """The token drawn at one place, by the best ids and logits ``[rank]``, best first, and their noise."""
        best, last = float(logits[0]), float(logits[min(self.top_k, len(ids)) - 1])
        near = _ROUNDING * (32.0 + 2.0 * (abs(best) + abs(last)) / self.temperature)  # of scores whose order is open
        if not near < _TOO_NEAR:
            return int(ids[0]), UNSURE
        count = _count(logits >= last)  # top_k keeps those that equal the last
        sure = count == _count(logits > last - near * self.temperature) and (count < len(ids) or len(ids) == vocab)
        scaled = (logits[:count] - best) / self.temperature
        kept, likely = self._kept(scaled, near)
        scores = (scaled - np.log(noise[:count]))[: max(1, likely)]
        drawn = int(scores.argmax())
        sure = sure and drawn < kept and _count(scores > float(scores[drawn]) - near) == 1  # not so if not finite
        return int(ids[drawn]), SURE if sure else UNSURE

    def _kept(self, scaled: np.ndarray, near: float) -> tuple[int, int]:
        """Numbers of tokens ``[rank]``, scaled and less the best, that ``top_p`` and ``min_p`` keep for certain, and
        at most: of equal ones ``top_p`` may cut any."""
        chances, kept, likely = np.exp(scaled), len(scaled), len(scaled)
        close = _CLOSE + near  # plain decoding rounds logits that are not less the best yet
        if self.top_p < 1.0:
            before = (chances.cumsum() - chances) / chances.sum()
            surely = _count(before < self.top_p - close)
            maybe = _count(before < self.top_p + close)
            first_cut, last_kept = scaled[surely] if surely < kept else -np.inf, scaled[maybe - 1]
            kept, likely = _count(scaled > first_cut + near), _count(scaled > last_kept - near)
        if self.min_p:
            kept = min(kept, _count(chances > self.min_p * (1.0 + close)))
            likely = min(likely, _count(chances > self.min_p * (1.0 - close)))
        return kept, likely

"""Scores and logits of written tokens, for those who ask for them."""

from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig


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

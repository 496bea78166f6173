"""The head, its files, and what it says at the nodes of a draft."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jacobi import LookaheadError, Path
from lookahead.heads.base import best_next
from lookahead.heads.storage import fill, read_head, write_head
from lookahead.models.output_layer import output_sizes
from lookahead.sources.draft_model import Branch, Said


class BigramHead(nn.Module):
    def __init__(self, vocab_size: int, size: int = 16) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(vocab_size, size), nn.Linear(size, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embed(tokens))  # [..., vocab]

    @classmethod
    def from_pretrained(cls, source: str, **hub: Any) -> "BigramHead":
        tensors, _ = read_head(source, hub, "bigram head")
        with torch.device("meta"):  # draws nothing
            head = cls(*tensors["embed.weight"].shape)
        return fill(head, tensors, source, "bigram head")

    def save_pretrained(self, folder: str) -> None:
        write_head(folder, self.state_dict(), {})

    def check(self, model: Any) -> None:
        if self.embed.num_embeddings != (vocab := output_sizes(model)[1]):
            raise LookaheadError(f"This head scores {self.embed.num_embeddings} tokens, and the model has {vocab}.")


class BigramPasses:
    def __init__(self, head: BigramHead, vocab_size: int) -> None:
        self._head, self._vocab_size, self._root = head, vocab_size, 0

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing: only the last token matters."""

    def write(self, path: Path) -> None:
        self._root = path.tokens[-1]

    @torch.no_grad()
    def after(self, branches: Sequence[Branch]) -> list[Said]:
        last = [branch[-1] if branch else self._root for branch in branches]
        return best_next(self._head(torch.tensor(last)), self._vocab_size)

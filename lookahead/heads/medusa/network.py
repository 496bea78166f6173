"""Medusa's heads: each guesses one token further ahead from the model's last hidden state.

Cai et al., arXiv 2401.10774, section 2.1.1. A head is a few residual blocks and an output layer, its own or the
model's. Head k (from 0) reads the hidden state of a token and predicts the token k + 2 positions after it; the model
itself predicts the next one::

    text      The  cat  sat   on  the  mat
    reads           ^
    predicts            [ ]                   the model
                             [0]              head 0
                                  [1]         head 1
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead.heads.base import ResBlock

OutputLayer = Callable[[Tensor], Tensor]


class HeadsNetwork(nn.Module):
    """The heads as a module: hidden states in, logits of every head out; a LookaheadError if a size is out of range."""

    def __init__(
        self,
        hidden_size: int,  # channels of what the model's output layer reads
        vocab_size: int | None,  # tokens that it scores; None where heads without an output layer fit any
        num_heads: int = 4,
        num_layers: int = 1,  # residual blocks of a head
        own_output: bool = False,  # each head has an output layer, without a bias; else the heads use the model's
        base_model: str | None = None,  # name or folder of the model that the heads belong to
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("hidden_size", hidden_size, 1),
            ("vocab_size", 1 if vocab_size is None and not own_output else vocab_size, 1),
            ("num_heads", num_heads, 1),
            ("num_layers", num_layers, 0 if own_output else 1),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise LookaheadError(f"MedusaHeads cannot have {name}={size!r}: expected an integer from {least} on.")
        self.hidden_size, self.vocab_size, self.base_model = hidden_size, vocab_size, base_model
        self.stored: dict[str, Any] = {}  # format and files that they were read from
        self.num_heads, self.num_layers, self.own_output = num_heads, num_layers, own_output
        blocks = (nn.ModuleList(ResBlock(hidden_size) for _ in range(num_layers)) for _ in range(num_heads))
        self.blocks = nn.ModuleList(blocks)  # [head][layer]
        outputs = (nn.Linear(hidden_size, vocab_size or 0, bias=False) for _ in range(num_heads if own_output else 0))
        self.outputs = nn.ModuleList(outputs)  # the heads' own output layers

    def states(self, hidden: Tensor) -> Tensor:
        """What the heads' output layers read, ``[head, ..., hidden]``, with the device and dtype of ``hidden``."""
        states = torch.stack([self.state(head, hidden) for head in range(self.num_heads)])
        return states.to(hidden.device, hidden.dtype)

    def state(self, head: int, hidden: Tensor) -> Tensor:
        """What one head's output layer reads, ``[..., hidden]``, with the head's device and dtype."""
        first = next(self.parameters())
        state = hidden.to(first.device, first.dtype)
        for layer in self.blocks[head].children():
            state = layer(state)
        return state

    def forward(self, hidden: Tensor, output: OutputLayer | None = None) -> Tensor:
        """The logits of all heads, ``[head, ..., vocab]``.

        ``hidden`` is what the model's output layer reads, ``[..., hidden]``, and ``output`` that layer (see
        :func:`lookahead.medusa.output_layer`); heads without their own need it, or raise a LookaheadError.
        """
        return self.logits(self.states(hidden), output)

    def logits(self, states: Tensor, output: OutputLayer | None = None) -> Tensor:
        """The logits ``[head, ..., vocab]`` of :meth:`states`."""
        if self.own_output:
            first = next(self.outputs.parameters())
            states = states.to(first.device, first.dtype)
            return torch.stack([layer(state) for layer, state in zip(self.outputs, states, strict=True)])
        if output is None:
            told = "These heads use the model's output layer: expected it as the second argument, got none."
            raise LookaheadError(f"{told} Pass output_layer(model).")
        return output(states)  # one product for all heads

    def top(self, hidden: Tensor, output: OutputLayer | None, count: int) -> tuple[Tensor, Tensor]:
        """Every head's candidates as :func:`best_of` gives them; ``hidden`` and ``output`` as in :meth:`forward`."""
        return best_of(self(hidden, output), count)


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Every head's ``count`` best candidates of ``logits`` ``[head, ..., vocab]``, best first.

    Given are their log-probabilities, float32, and their token ids, int64, both ``[head, ..., count]``; a
    LookaheadError if ``count`` is not between 1 and the vocabulary.
    """
    logits, most = logits.float(), logits.shape[-1]
    if not 1 <= count <= most:
        raise LookaheadError(f"{count} candidates are asked of each head: expected 1 to {most}, all of the vocabulary.")
    best, ids = logits.topk(count, dim=-1)
    return best - logits.logsumexp(-1, keepdim=True), ids

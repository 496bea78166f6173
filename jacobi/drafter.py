"""Drafters: what grows the tree. The protocol, and the drafter that drafts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jacobi.tree import TokenTree
from jacobi.verify import Path


@dataclass(slots=True)
class Successors:
    """The model's best next tokens at the nodes of one tree, best first: ids int32 ``[node, rank]``, and their logits
    float32 ``[node, rank]``, which are -inf for tokens that the model excludes.
    """

    tokens: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class Wants:
    """What drafters want to be told by the model, known before it is opened.

    The ``top_k`` best next tokens (0 = none) at every node and at ``prompt_top_k`` of the prompt's last tokens; by the
    names of ``taps`` the hidden states of every pass; ``"last"``, what the output layer reads, is of the prompt's last
    token only, others of all its tokens. With ``choices`` they learn at every node the token that would be chosen
    there, where tokens are drawn by noise that depends on the place alone; else the argmax.
    """

    top_k: int = 0
    prompt_top_k: int = 1
    taps: tuple[str, ...] = ()
    choices: bool = False


class Drafter(Protocol):
    """Grows one sequence's tree, and learns from what the pass made of it.

    Called in turn: ``learn`` for the prefill, whose tree is the root alone, then ``draft`` and ``learn`` a pass.
    """

    def draft(self, room: int) -> TokenTree:
        """Return the next tree. Its root is the last decided token, and no node is deeper than ``room``."""

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Take in a pass: the model's argmax (or choice) at every node, the path kept, the best next tokens."""


class PlainDrafter:
    """Drafts nothing: one token a pass, the baseline of every comparison."""

    def __init__(self) -> None:
        self._root = 0

    def draft(self, room: int) -> TokenTree:
        """The root alone."""
        return TokenTree(self._root)

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Remember the last decided token."""
        self._root = path.tokens[-1]

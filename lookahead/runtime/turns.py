"""Attention of one node after the other, by the kernel that plain decoding gives a single token, and so with its bits.

That kernel is given no mask, but what a token sees, in order. So the keys and values of a node's ancestors are written
behind the text for the moment, in place of the nodes that lie there; the history is neither copied nor moved::

    text a b c, tree d(e, f(g)): slots   a b c d e f g
                e in its turn            a b c d e          as they lie
                f                        a b c d f          f over e
                g                        a b c d f g        g behind it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jacobi import TokenTree

_GROUPED = 256  # channels up to which transformers lets the kernel group heads


@dataclass(frozen=True, slots=True)
class Turn:
    """One node's turn: it and its ancestors stand behind the text once the nodes ``tail`` are written from place
    ``start`` of them on; None = they do."""

    node: int
    depth: int
    start: int
    tail: Tensor | None


@dataclass(frozen=True, slots=True)
class Turns:
    """One sequence's nodes in their turns.

    Attributes:
        length: slots of its text.
        stop: slots of the whole pass.
        shown: bool ``[1, 1, 1, slot]``, False for padding, as plain decoding's mask has it; None = it has none.
        steps: of nodes; those of others are left as they are.
        whole: whether all nodes of the tree have one.
    """

    length: int
    stop: int
    shown: Tensor | None
    steps: tuple[Turn, ...]
    whole: bool


def steps_of(tree: TokenTree, most: int, in_place: bool) -> tuple[Turn, ...]:
    """The turns of a tree's nodes down to a depth, subtree after subtree; whether they lie behind the text at first."""
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    placed, steps = list(range(len(tree))) if in_place else [], []
    for path in sorted(paths):
        if len(path) > most + 1:
            continue
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, placed, strict=False)))
        tail = torch.tensor(path[start:]) if start < len(path) else None
        steps.append(Turn(path[-1], len(path) - 1, start, tail))
        if tail is not None:
            placed = path
    return tuple(steps)


def attend_in_turn(
    query: Tensor, key: Tensor, value: Tensor, turns: Sequence[Turns], scale: float | None, output: Tensor
) -> None:
    """Write the attention of nodes into ``output`` ``[batch, node, head, channel]``; the arguments are those of
    :func:`.ordered_attention.attend`."""
    nodes = query.shape[2]
    layer: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    for row, turn in enumerate(turns):
        at = turn.length - (turn.stop - key.shape[2])  # where the text ends in a layer that has dropped slots
        mine = slice(row, row + 1)
        states = [(held[row], held[row, :, -nodes:].clone()) for held in (key, value)]
        for step in turn.steps:
            stop = at + step.depth + 1
            if step.tail is not None:
                for held, before in states:
                    held[:, at + step.start : stop] = before.index_select(1, step.tail)
            shown = None if turn.shown is None else turn.shown[..., turn.length - at : turn.length + step.depth + 1]
            one, keys, values = query[mine, :, step.node : step.node + 1], key[mine, :, :stop], value[mine, :, :stop]
            if shown is None and key.shape[-1] <= _GROUPED:  # transformers' call, without what leads to it
                found = scaled_dot_product_attention(one, keys, values, scale=scale, enable_gqa=True)[0, :, 0]
            else:
                found = sdpa_attention_forward(layer, one, keys, values, shown, scaling=scale)[0][0, 0]
            output[row, step.node] = found
        for held, before in states:
            held[:, -nodes:] = before

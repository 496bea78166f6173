"""Traversal verification: one decision about a whole drawn tree, from its leaves up (:func:`jacobi.traverse`)."""

from torch import Tensor

from jacobi import traverse
from lookahead.verify.sampler import Pass, Sampler
from lookahead.verify.typical import Decided


def traversed(now: Pass, row: int, sampler: Sampler) -> list[Decided]:
    """What is written of one row's tree, node by node. Processors are asked at every node that is looked at, along its
    own prefix."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # processed scores and logits [vocab]

    def probabilities(node: int) -> Tensor:
        place = [(row, node)]
        raw = sampler.logits(now, place)
        processed = sampler.process(place, raw, now.trees)
        chances = processed.softmax(-1)
        sampler.check_probabilities(chances, [row])
        seen[node] = processed[0], raw[0]
        return chances[0]

    path = traverse(now.trees[row], probabilities)
    return [(node, token, *seen[node]) for node, token in zip(path.nodes, path.tokens, strict=True)]

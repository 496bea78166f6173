"""EAGLE-3's training-time test (Li et al., arXiv 2503.01840, section 3.2): a head is unrolled over all places of a text
at once, each fed its own outputs as it will be when it drafts."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class UnrolledPairs:
    """What pairs see in an unrolled pass. Step 0 is the text's pairs, as decoding feeds them. In step s, row i is the
    draft that began behind pair i, s tokens deep: it sees the text's pairs up to i, its own rows of the steps 1 to s,
    and of no other draft anything::

                    step 0        step 1      step 2
        row         0 1 2 3       0 1 2 3     0 1 2 3
        2, step 0   x x x .
        2, step 1   x x x .       . . x .
        2, step 2   x x x .       . . x .     . . x .
    """

    def __init__(self, layers: int) -> None:
        self._held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.length = 0

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """``queries``, ``keys`` and ``values`` ``[batch, head, pair, channel]`` of one more step."""
        held = self._held[layer]
        held.append((keys, values))
        if len(held) == 1:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        count = keys.shape[-2]
        grouped = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[-1] ** -0.5  # [batch, key head, group, ...]
        (text, said), drafts = held[0], held[1:]
        seen = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril()
        scores = (grouped @ text[:, :, None].transpose(-1, -2)).masked_fill(~seen, float("-inf"))
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in drafts]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(queries.dtype)
        total = weights[..., :count] @ said[:, :, None]
        for step, (_, value) in enumerate(drafts):
            total = total + weights[..., count + step, None] * value[:, :, None]
        return total.flatten(1, 2)

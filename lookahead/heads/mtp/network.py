"""An MTP layer: a decoder layer of the model's own kind, over pairs of a hidden state and the token after it;
and what it keeps of one sequence's pairs, in caches of transformers' own."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lookahead.models.mask_rules import MaskRule, mask_rules
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.snapshots import Snapshot, recurrent_layers
from lookahead.runtime.masks import map_rules

Decode = Callable[[DynamicCache, Tensor, Tensor, Any], Tensor]  # of states [pair, hidden], positions [pair], masks

_INDEXED = "indexed_attention"


class TreeCache:
    """Keys and values of a layer of attention, one entry a pair, and the pairs' positions."""

    def __init__(self, config: Any) -> None:
        # Without a config nothing is dropped that a window does not see any more; indexers need one.
        self.states = (
            DynamicCache(config=config) if _INDEXED in (getattr(config, "layer_types", None) or ()) else DynamicCache()
        )
        self.positions = torch.empty(0, dtype=torch.long)

    @property
    def length(self) -> int:
        return len(self.positions)

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``."""
        if length < self.length:
            self.states.crop(length - self.length)
            self.positions = self.positions[:length]


class LinearCache:
    """The cache of a layer that also has convolution or recurrent states, which follow one branch at a time. They are
    copied where the text ends. A node on another branch than the last one is reached from there::

        text   a b c | copied      fed d, e: the states are at c-d-e
        node f below c-d           back to c; d is fed again, then f
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._text = 0  # pairs of it
        self._nodes: list[tuple[Tensor, Tensor]] = []  # state and position of every pair behind the text
        self._branch: list[int] = []  # the nodes that the states have seen
        self._states = DynamicCache(config=config)
        self._snapshot = Snapshot(self._states)  # of the end of the text

    @property
    def length(self) -> int:
        return self._text + len(self._nodes)

    def _back(self) -> None:
        """To the end of the text."""
        if self._text:
            self._snapshot.restore()
        else:
            self._states = DynamicCache(config=self._config)
            self._snapshot = Snapshot(self._states)
        self._branch = []

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``: those of the text, or all that are held, which then are it."""
        if self._nodes and length == self.length and self._branch == list(range(len(self._nodes))):
            self._text, self._branch = length, []
            self._snapshot.take()
        elif self._branch:
            self._back()
        self._nodes = []

    def run(self, decode: Decode, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What comes out for pairs ``[pair, hidden]``, each of which sees the text, and what bool ``mask`` ``[pair,
        pairs]`` shows of the nodes."""
        first = len(self._nodes)
        self._nodes += zip(states.split(1), positions.split(1), strict=True)
        seen = mask[:, self._text :]
        if self._branch == list(range(first)) and bool((seen == torch.ones_like(seen).tril(first)).all()):
            self._branch = list(range(len(self._nodes)))  # the text, or one branch, goes on
            return decode(self._states, states, positions, None)
        reached = []  # what comes out at the last node of each branch
        for branch in (line.nonzero()[:, 0].tolist() for line in seen):
            if self._branch != branch[:-1]:
                self._back()
            new = [self._nodes[node] for node in branch[len(self._branch) :]]
            self._branch = branch
            states, positions = (torch.cat(each) for each in zip(*new, strict=True))
            reached.append(decode(self._states, states, positions, None)[-1:])
        return torch.cat(reached)


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class MtpLayer(nn.Module):
    """One layer, as DeepSeek-V3's (arXiv 2412.19437, section 2.2)::

        hidden state at token i ------- hidden_norm --+
                                                      +-- fc -- decoder layer -- norm -- z    scored by the model's
        token i+1 -- the model's embed -- embed_norm -+                                       output layer, fed back

    Args:
        decoder: the decoder layer with ``norm`` behind it, as a decoder of one layer.
        parts: the other parts' tensors, by name; ``embed`` and ``head`` only where they are not the model's.
        hidden_first: whether ``fc`` reads the hidden state before the embedding.
    """

    d2t: Tensor | None = None  # it scores all tokens

    def __init__(self, decoder: PreTrainedModel, parts: Mapping[str, Tensor], hidden_first: bool) -> None:
        super().__init__()
        norm, self.decoder = decoder.norm, decoder
        self.fc = _linear(parts["fc"])
        self.head = _linear(parts["head"]) if "head" in parts else None
        self.embed = nn.Embedding.from_pretrained(parts["embed"]) if "embed" in parts else None
        self.embed_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        for own in ("embed_norm", "hidden_norm"):
            getattr(self, own).weight = nn.Parameter(parts[own], requires_grad=False)
        if "norm" not in parts:
            decoder.norm = nn.Identity()
        self._hidden_first = hidden_first
        self.is_linear = bool(recurrent_layers(DynamicCache(config=decoder.config)))  # and follows no tree
        self._rules = mask_rules(decoder, ModelTraits.of(decoder))
        self._scale = float(getattr(decoder.config, "logits_mup_width_multiplier", None) or 1.0)

    def joined(self, features: Tensor, embedded: Tensor, fed_back: bool = False) -> Tensor:
        """What the decoder layer reads ``[pair, hidden]``, of hidden states and embeddings ``[pair, hidden]``."""
        parts = [self.embed_norm(embedded), self.hidden_norm(features)]
        return self.fc(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))

    def cache(self) -> TreeCache | LinearCache:
        return LinearCache(self.decoder.config) if self.is_linear else TreeCache(self.decoder.config)

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, cache: TreeCache | LinearCache, mask: Tensor
    ) -> Tensor:
        """What comes out ``[pair, hidden]``, by bool ``mask`` ``[pair, pairs in the cache and these]``."""
        if isinstance(cache, LinearCache):
            return cache.run(self._decoded, states, positions, mask)
        cache.positions = torch.cat([cache.positions.to(positions), positions])
        masks = self._masks(mask, positions, cache.positions, states.dtype)
        return self._decoded(cache.states, states, positions, masks)

    def _decoded(self, cache: DynamicCache, states: Tensor, positions: Tensor, masks: Any) -> Tensor:
        outputs = self.decoder(
            inputs_embeds=states[None],
            position_ids=positions[None],
            attention_mask=masks,
            use_cache=True,
            **{CACHE: cache},
        )
        return outputs.last_hidden_state[0]

    def _masks(self, mask: Tensor, positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Any:
        """What attention adds ``[1, 1, pair, key]``, by the layer's own rule as well, in the form that it takes."""
        first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=mask.device)

        def build(rule: MaskRule) -> Tensor:
            seen = mask[None, None]
            if rule.function is not None:
                seen = seen & rule.function(first, first, positions[None, None, :, None], keys[None, None, None, :])
            return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

        return map_rules(self._rules, build)

    def logits(self, states: Tensor, output: nn.Module) -> Tensor:
        """Scores ``[pair, token]`` by the model's ``output`` layer, or the layer's own."""
        output = self.head or output
        weight = getattr(output, "weight", None)
        states = states.to(weight.dtype if isinstance(weight, Tensor) else states.dtype)
        return output(states / self._scale)

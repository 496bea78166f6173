"""EAGLE's draft head: one small decoder over pairs of a feature of the model and the token that followed it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from lookahead.heads.base import Scoring

Angles = tuple[Tensor, Tensor]  # of RoPE: cosines and sines, [pair, channel]


@dataclass(frozen=True)
class EagleSizes:
    """What a head looks like.

    Attributes:
        version: 1 for EAGLE-1 and -2, whose weights are alike; 3 for EAGLE-3.
        hidden_size: of the head; ``target_size`` of one feature of the model, of which it reads ``features``.
        draft_vocab_size: tokens that the head scores; None = all of the model's.
        own_output: whether it scores by an output layer of its own; otherwise by the model's.
        vocab_size: tokens of the model, if the file says so.
        own_embeddings: the size of the head's own table of embeddings; None = it takes the model's.
        query_key_norm: whether each head of queries and keys is normed before it is turned, as Qwen3's are.
        norm_before_residual: (version 3) the residual starts from the normed feature.
        feature_norms: (version 3) ``"each"`` feature is normed before they are joined, ``"all"`` after, or None are.
        norm_output: (version 3) what is fed back is normed.
        rope: as transformers' ``rope_parameters``.
        feature_layers: which states of the model they are, as its ``hidden_states`` count; empty = the last, normed.
    """

    version: int
    hidden_size: int
    target_size: int
    features: int
    heads: int
    key_heads: int
    head_size: int
    feed_forward: int
    layers: int = 1
    draft_vocab_size: int | None = None
    own_output: bool = False
    vocab_size: int | None = None
    own_embeddings: int | None = None
    final_norm: bool = False
    fusion_bias: bool = False
    attention_bias: bool = False
    query_key_norm: bool = False
    norm_before_residual: bool = False
    feature_norms: str | None = None
    norm_output: bool = False
    eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    feature_layers: tuple[int, ...] = ()
    base_model: str | None = None


class PairCache:
    """What pairs see of each other in each layer: keys and values ``[key head, pair, channel]``, stable pairs first."""

    def __init__(self, layers: int) -> None:
        self._held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.length = 0

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """What ``queries`` ``[query head, pair, channel]`` see of all keys so far, by a ``mask`` ``[pair, seen]``."""
        for held in self._held[layer]:
            keys, values = torch.cat([held[0], keys], dim=1), torch.cat([held[1], values], dim=1)
        self._held[layer] = [(keys, values)]
        return scaled_dot_product_attention(queries[None], keys[None], values[None], mask, enable_gqa=True)[0]

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``."""
        self._held = [[(keys[:, :length], values[:, :length]) for keys, values in held] for held in self._held]
        self.length = length


class EagleAttention(nn.Module):
    """Grouped attention of pairs to pairs; its inputs are twice as wide in EAGLE-3's first layer."""

    def __init__(self, sizes: EagleSizes, width: int, layer: int) -> None:
        super().__init__()
        self._head_size, self._layer = sizes.head_size, layer
        count, bias = sizes.key_heads * sizes.head_size, sizes.attention_bias
        self.q_proj = nn.Linear(width, sizes.heads * sizes.head_size, bias=bias)
        self.k_proj = nn.Linear(width, count, bias=bias)
        self.v_proj = nn.Linear(width, count, bias=bias)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_size, sizes.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(sizes.head_size, sizes.eps) if sizes.query_key_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, inputs: Tensor, turns: Angles, cache: PairCache, mask: Tensor | None) -> Tensor:
        """What ``inputs`` ``[..., pair, width]`` see of each other; ``mask`` as the cache has it."""
        queries, keys, values = (
            projection(inputs).unflatten(-1, (-1, self._head_size)).transpose(-2, -3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(self.q_norm(queries), self.k_norm(keys), *turns, unsqueeze_dim=0)
        seen = cache.attend(self._layer, queries, keys, values, mask)
        return self.o_proj(seen.transpose(-2, -3).flatten(-2))


class EagleLayer(nn.Module):
    """A decoder layer. EAGLE-1's first does not norm what attention reads; EAGLE-3's norms embedding and feature."""

    def __init__(self, sizes: EagleSizes, config: LlamaConfig, index: int) -> None:
        super().__init__()
        size, eps = sizes.hidden_size, sizes.eps
        self._joins = sizes.version == 3 and index == 0
        self._keeps_normed = sizes.norm_before_residual
        self.self_attn = EagleAttention(sizes, 2 * size if self._joins else size, index)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.input_layernorm = LlamaRMSNorm(size, eps) if self._joins or index > 0 else nn.Identity()
        if self._joins:
            self.hidden_norm = LlamaRMSNorm(size, eps)

    def forward(self, states: Tensor, embedded: Tensor, turns: Angles, cache: PairCache, mask: Tensor | None) -> Tensor:
        if self._joins:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            states = normed if self._keeps_normed else states
        else:
            inputs = self.input_layernorm(states)
        states = states + self.self_attn(inputs, turns, cache, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleNetwork(Scoring):
    """The weights of a head, named as in the published files."""

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.sizes = sizes
        size, three = sizes.hidden_size, sizes.version == 3
        config = LlamaConfig(
            hidden_size=size,
            intermediate_size=sizes.feed_forward,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_heads,
            head_dim=sizes.head_size,
            rope_parameters=dict(sizes.rope),
            max_position_embeddings=sizes.max_positions,
        )
        self.fc = nn.Linear(sizes.features * sizes.target_size if three else 2 * size, size, bias=sizes.fusion_bias)
        self.layers = nn.ModuleList(EagleLayer(sizes, config, index) for index in range(sizes.layers))
        self.norm = LlamaRMSNorm(size, sizes.eps) if sizes.final_norm else None
        scored = sizes.draft_vocab_size if sizes.own_output else None
        self.lm_head = nn.Linear(size, scored, bias=False) if scored else None
        self.embed_tokens = nn.Embedding(sizes.own_embeddings, size) if sizes.own_embeddings else None
        norms = {"each": sizes.features, "all": 1}.get(sizes.feature_norms or "", 0)
        width = sizes.target_size * (sizes.features if sizes.feature_norms == "all" else 1)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, sizes.eps) for _ in range(norms)) if norms else None
        self.register_buffer("d2t", None)
        self.rotary = LlamaRotaryEmbedding(config)  # its own: the model's may turn in another way

    def joined(self, features: Tensor, embedded: Tensor, fed_back: bool = False) -> Tensor:
        """What the first layer starts from, ``[..., pair, hidden]``, of the model's features ``[..., pair, features *
        target]``, or of the head's own outputs ``[..., pair, hidden]``, which are ``fed_back``."""
        if self.sizes.version != 3:
            return self.fc(torch.cat([embedded, features], dim=-1))
        if fed_back:
            return features
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, cache: PairCache, mask: Tensor | None
    ) -> Tensor:
        """One pass over pairs: joined ``states`` and embeddings ``[..., pair, hidden]``, ``positions`` ``[pair]``, and
        bool ``mask`` ``[pair, pairs in the cache and these]``; what comes out is fed back."""
        cos, sin = self.rotary(states, positions[None])
        for layer in self.layers:
            states = layer(states, embedded, (cos[0], sin[0]), cache, mask)
        cache.length += states.shape[-2]
        return self.norm(states) if self.sizes.norm_output and self.norm is not None else states

    def logits(self, states: Tensor, output: nn.Module) -> Tensor:
        """Scores ``[..., pair, draft token]`` of what came out, by the head's own output layer or else ``output``."""
        if self.norm is not None and not self.sizes.norm_output:
            states = self.norm(states)
        return self.lent(states, output) if self.lm_head is None else self.lm_head(states)

"""A block drafter's network: masked places behind the last token look at the text's features, and at each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from lookahead.heads.base import Scoring

Rotations = tuple[Tensor, Tensor]  # of RoPE: cosines and sines, [row, place, channel]
Pairs = tuple[Tensor, Tensor]  # keys and values, [row, place, key head, channel]
Sight = tuple[int | None, bool]  # of a layer: its window, and whether a slot sees no later ones

NOWHERE = 1 << 40  # the position of a place that holds nothing: behind every block


@dataclass(frozen=True)
class BlockSizes:
    """What a drafter looks like.

    Attributes:
        hidden_size: of the drafter; ``target_size`` of one feature of the model.
        feature_layers: which states of the model it reads, as ``hidden_states`` count: i is what layer i reads.
        block_size: places of a pass, the last token's included; ``mask_token`` is embedded at the others.
        anchor_first: whether a place says what follows it, the last token's too; else masked ones say their own token.
        sights: of each layer, its window, and whether a place is blind to later ones of its block.
        own_embeddings: tokens of its own table; None = it is the model's. So with ``own_output``.
        draft_vocab_size: tokens that it scores; None = all of the model's.
        markov: ``"vanilla"``, ``"gated"`` or ``"rnn"``: how vectors of ``rank`` tell scores of the token before.
        confidence: channels that its confidence head reads; 0 = there is none.
        input_scale: what rows of the table are multiplied by; None = they are as the model embeds them.
        output_multiplier, softcap: what scores are multiplied by, and bounded to.
        rope: as transformers' ``rope_parameters``.
    """

    hidden_size: int
    target_size: int
    feature_layers: tuple[int, ...]
    block_size: int
    anchor_first: bool
    mask_token: int
    heads: int
    key_heads: int
    head_size: int
    feed_forward: int
    sights: tuple[Sight, ...]
    own_embeddings: int | None = None
    own_output: bool = False
    draft_vocab_size: int | None = None
    vocab_size: int | None = None
    markov: str | None = None
    rank: int = 0
    confidence: int = 0
    attention_bias: bool = False
    input_scale: float | None = None
    output_multiplier: float = 1.0
    softcap: float | None = None
    eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    base_model: str | None = None


class BlockAttention(nn.Module):
    """Grouped attention with normed queries and keys. The text's places have keys and values only."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self._size, bias = sizes.head_size, sizes.attention_bias
        count, size = sizes.key_heads * sizes.head_size, sizes.hidden_size
        self.q_proj = nn.Linear(size, sizes.heads * sizes.head_size, bias=bias)
        self.k_proj = nn.Linear(size, count, bias=bias)
        self.v_proj = nn.Linear(size, count, bias=bias)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_size, size, bias=bias)
        self.q_norm, self.k_norm = (LlamaRMSNorm(sizes.head_size, sizes.eps) for _ in range(2))

    def pairs(self, states: Tensor, turns: Rotations) -> Pairs:
        keys, values = (each(states).unflatten(-1, (-1, self._size)) for each in (self.k_proj, self.v_proj))
        return _turned(self.k_norm(keys), turns), values

    def forward(self, states: Tensor, turns: Rotations, text: Pairs, mask: Tensor) -> Tensor:
        """What ``states`` ``[row, place, hidden]`` see of the ``text`` and of each other, by a bool ``mask`` ``[row,
        place, text and places]``."""
        queries = _turned(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self._size))), turns)
        both = zip(text, self.pairs(states, turns), strict=True)
        keys, values = (torch.cat(parts, dim=1).transpose(1, 2) for parts in both)
        seen = scaled_dot_product_attention(queries.transpose(1, 2), keys, values, mask[:, None], enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


def _turned(states: Tensor, turns: Rotations) -> Tensor:
    cos, sin = (each[:, :, None] for each in turns)
    return states * cos + rotate_half(states) * sin


class BlockLayer(nn.Module):
    """A decoder layer over a block."""

    def __init__(self, sizes: BlockSizes, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(sizes.hidden_size, sizes.eps)
        self.post_attention_layernorm = LlamaRMSNorm(sizes.hidden_size, sizes.eps)
        self.self_attn, self.mlp = BlockAttention(sizes), LlamaMLP(config)

    def forward(self, states: Tensor, turns: Rotations, text: Pairs, mask: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), turns, text, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class MarkovHead(nn.Module):
    """What the token before a place adds to the place's scores: a vector ``[..., rank]`` that ``markov_w2`` scores.
    A gate or a recurrent state looks at the place as well."""

    def __init__(self, sizes: BlockSizes, tokens: int, scored: int) -> None:
        super().__init__()
        hidden, rank = sizes.hidden_size, sizes.rank
        self.markov_w1, self.markov_w2 = nn.Embedding(tokens, rank), nn.Linear(rank, scored, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if sizes.markov == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if sizes.markov == "rnn" else None

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The vectors behind tokens ``before`` ``[...]`` at places ``hidden`` ``[..., hidden]``, and the next state."""
        given = self.markov_w1(before)
        if self.gate_proj is not None:
            return self.gate_proj(torch.cat([hidden, given], -1)).sigmoid() * given, None
        if self.joint_proj is None:
            return given, None
        state = torch.zeros_like(given) if state is None else state
        keep, new, out = self.joint_proj(torch.cat([state, given, hidden], -1)).chunk(3, -1)
        return out.tanh(), keep.sigmoid() * state + (1.0 - keep.sigmoid()) * new.tanh()


class BlockNetwork(Scoring):
    """The weights of a drafter, named as in DeepSpec's files."""

    def __init__(self, sizes: BlockSizes, model_tokens: int) -> None:
        super().__init__()
        self.sizes, size = sizes, sizes.hidden_size
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, rope_parameters=dict(sizes.rope))
        config.head_dim, config.intermediate_size = sizes.head_size, sizes.feed_forward
        self.fc = nn.Linear(len(sizes.feature_layers) * sizes.target_size, size, bias=False)
        self.layers = nn.ModuleList(BlockLayer(sizes, config) for _ in sizes.sights)
        self.hidden_norm, self.norm = (LlamaRMSNorm(size, sizes.eps) for _ in range(2))
        self.embed_tokens = nn.Embedding(sizes.own_embeddings, size) if sizes.own_embeddings else None
        scored = sizes.draft_vocab_size or model_tokens
        self.lm_head = nn.Linear(size, scored, bias=False) if sizes.own_output else None
        self.markov_head = MarkovHead(sizes, model_tokens, scored) if sizes.markov else None
        given = sizes.confidence
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(given, 1)}) if given else None
        self.register_buffer("d2t", None)
        self.rotary = LlamaRotaryEmbedding(config)  # its own: the model's may turn in another way

    def remember(self, features: Tensor, positions: Tensor) -> list[Pairs]:
        """Each layer's keys and values of the text, by ``features`` ``[row, place, channel]`` at their positions."""
        states = self.hidden_norm(self.fc(features.to(self.fc.weight)))
        turns = self.rotary(states, positions)
        layers: Any = self.layers
        return [layer.self_attn.pairs(states, turns) for layer in layers]

    def forward(self, anchors: Tensor, at: Tensor, text: Sequence[Pairs], places: Tensor, embed: nn.Module) -> Tensor:
        """What comes out of blocks, ``[row, block, slot, hidden]``, that begin with tokens ``anchors`` ``at`` different
        positions ``[row, block]``. A block sees of the ``text`` what was at ``places`` ``[row, place]`` before it."""
        size = self.sizes.block_size
        tokens = anchors.new_full((*anchors.shape, size), self.sizes.mask_token)
        tokens[:, :, 0] = anchors
        slots = torch.arange(size, device=at.device)
        positions, owners = (at[:, :, None] + slots).flatten(1), at.repeat_interleave(size, dim=1)
        apart = positions[:, :, None] - torch.cat([places, positions], dim=1)[:, None]
        seen, own = places[:, None] < owners[:, :, None], owners[:, :, None] == owners[:, None]
        masks = {sight: _mask(sight, apart, seen, own) for sight in set(self.sizes.sights)}
        table: Any = self.embed_tokens or embed
        scale = self.sizes.input_scale
        states = (table(tokens) if scale is None else scale * table.weight[tokens]).to(self.fc.weight).flatten(1, 2)
        turns = self.rotary(states, positions)
        for layer, pairs, sight in zip(self.layers, text, self.sizes.sights, strict=True):
            states = layer(states, turns, pairs, masks[sight])
        return self.norm(states).unflatten(1, (-1, size))

    def logits(self, states: Tensor, output: nn.Module) -> Tensor:
        """Scores ``[..., draft token]`` whatever stands before, by its own output layer or else the model's."""
        scores: Tensor = self.lent(states, output) if self.lm_head is None else self.lm_head(states)
        scores = scores.float() * self.sizes.output_multiplier
        return scores if (cap := self.sizes.softcap) is None else cap * (scores / cap).tanh()

    def after(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """Vectors ``[..., slot, rank]`` of the Markov head at slots ``hidden`` behind the tokens ``before``."""
        if self.markov_head is None:
            return None
        said = [(hidden[..., :0, :], None)]
        for slot in range(hidden.shape[-2]):
            said.append(self.markov_head(before[..., slot], hidden[..., slot, :], said[-1][1]))
        return torch.stack([vector for vector, _ in said[1:]], dim=-2)

    def added(self, scores: Tensor, vectors: Tensor | None) -> Tensor:
        """Scores with what the token before adds to them."""
        return scores if vectors is None or self.markov_head is None else scores + self.markov_head.markov_w2(vectors)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """How sure it is of slots ``hidden`` ``[..., hidden]`` behind tokens ``before`` ``[...]``, as log-odds."""
        if self.confidence_head is None:
            return None
        if self.markov_head is not None and self.sizes.confidence > hidden.shape[-1]:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before)], dim=-1)
        return self.confidence_head["proj"](hidden)[..., 0].float()


def _mask(sight: Sight, apart: Tensor, text: Tensor, own: Tensor) -> Tensor:
    """Which keys ``[row, place, key]`` a layer of this sight sees, ``apart`` from the query: ``text`` before, ``own``
    block."""
    window, causal = sight
    mask = torch.cat([text, own & (apart[:, :, text.shape[-1] :] >= 0) if causal else own], dim=-1)
    return mask if window is None else mask & (apart < window) & (apart > -window)

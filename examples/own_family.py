"""Teach lookahead a family of models that counts cache slots: a made-up one with ALiBi biases.

    python examples/own_family.py

Most models need none of this: they are given positions and a mask, and a self-test checks that they heed both. ALiBi
counts keys by their cache slots instead, and siblings of a tree lie in different slots at the same position:

    text so far  drafted tree       slot         0  1  2  3  4
    0  1  2      3 and 4 follow 2   position     0  1  2  3  3
"""

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead import Lookahead, augment_all, restore_all
from lookahead.models.families import registry
from lookahead.models.families.overrides import current_positions
from lookahead.models.names import CACHE
from lookahead.support.route import route

HIDDEN, HEADS, VOCABULARY = 32, 4, 50


class TinyConfig(PreTrainedConfig):
    model_type = "tiny-alibi"
    alibi = True
    num_hidden_layers = 2
    num_attention_heads = HEADS
    hidden_size = HIDDEN
    vocab_size = VOCABULARY


class TinyAttention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.inner = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.outer = nn.Linear(HIDDEN, HIDDEN)

    def key_bias(self, slots: int) -> torch.Tensor:
        """ALiBi for keys, ``[1, head, 1, slot]``: a slope for each head times the number of the slot."""
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return (slopes[:, None] * torch.arange(slots))[None, :, None]

    def forward(self, hidden, mask, cache):
        query, key, value = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.inner(hidden).chunk(3, dim=-1))
        key, value = cache.update(key, value, self.layer)
        scores = query @ key.mT / query.shape[-1] ** 0.5 + self.key_bias(key.shape[-2]).to(query.dtype)
        scores = scores if mask is None else scores + mask[..., : key.shape[-2]]
        return self.outer((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([TinyAttention(layer) for layer in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=True, **kwargs):
        cache = DynamicCache(config=self.config) if kwargs.get(CACHE) is None else kwargs[CACHE]  # as versions name it
        hidden = self.embed_tokens(input_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, position_ids=position_ids, **{CACHE: cache})
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), **{CACHE: cache if use_cache else None})


def key_bias_by_position(attention, original):
    """The stand-in for ``key_bias``: in a pass over a tree, each slot takes the bias of its logical position."""

    def key_bias(slots):
        positions = current_positions()
        if positions is None:  # plain decoding
            return original(slots)
        of_a_text = original(positions.high + 1)[0, :, 0]  # [head, position]: the model's own numbers
        return of_a_text[:, positions.slots.clamp(min=0)].transpose(0, 1)[:, :, None]  # [batch, head, 1, slot]

    return key_bias


# In the library this is one more row of the table in lookahead/models/families/registry.py.
FAMILY = registry.Family(
    models="made-up",
    attribute="key_bias",
    stand_in=key_bias_by_position,
    matches=lambda name, module: isinstance(module, TinyAttention),
)


def main() -> None:
    """The route and the passes before the family is known and afterwards; the text is the same."""
    augment_all()
    prompt = torch.randint(1, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    known = registry.FAMILIES
    try:
        for when, families in (("before", known), ("after", (*known, FAMILY))):
            registry.FAMILIES = families
            torch.manual_seed(0)
            model = TinyForCausalLM(TinyConfig(attn_implementation="eager")).double().eval()
            for weights in model.parameters():
                nn.init.normal_(weights, std=0.4)
            plain = model.generate(prompt, **settings)
            ours = model.generate(prompt, lookahead_strategy=Lookahead(nodes=16, seed=0), **settings)
            way, why = route(model)
            print(f"{when}: {way}, {ours.stats.steps} passes" + (f" ({why})" if why else ""))
            print(f"identical: {torch.equal(plain.sequences, ours.sequences)}")
    finally:
        registry.FAMILIES = known
        restore_all()


if __name__ == "__main__":
    main()

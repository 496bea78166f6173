#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0): a model of one's own whose forward takes past_key_values and **kwargs, as models
# written for earlier versions do, is given its KV cache as `cache`, finds it in **kwargs, and writes each token without
# what came before it. Plain generate() says nothing and returns another text. 5.23.0 writes the same text either way.
#
# Seen: 5.23.0 same text with and without a cache: True
#       5.24.0 same text with and without a cache: False
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/model.py" <<'PYTHON'
import torch
import transformers
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast


class Config(PreTrainedConfig):
    model_type = "made-up"
    num_hidden_layers, num_attention_heads, hidden_size, vocab_size = 1, 2, 16, 40


class Model(PreTrainedModel, GenerationMixin):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(40, 16)
        self.inner, self.lm_head = nn.Linear(16, 48), nn.Linear(16, 40)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True, **kwargs):
        cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        hidden = self.embed_tokens(input_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, cache)
        query, key, value = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.inner(hidden).chunk(3, dim=-1))
        key, value = cache.update(key, value, 0)
        scores = query @ key.mT if mask is None else query @ key.mT + mask
        hidden = hidden + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), past_key_values=cache if use_cache else None)


torch.manual_seed(0)
model = Model(Config(attn_implementation="eager")).double().eval()
for weights in model.parameters():
    nn.init.normal_(weights, std=0.5)
settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
prompt = torch.tensor([[3, 14, 15, 9, 26]])
texts = [model.generate(prompt, use_cache=use, **settings).tolist() for use in (True, False)]
print(transformers.__version__, "same text with and without a cache:", texts[0] == texts[1])
PYTHON
python3 -m venv "$room/venv"
for version in 5.23.0 5.24.0; do
  "$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 "transformers==$version" 2> /dev/null
  "$room/venv/bin/python" -W ignore "$room/model.py" | tee -a "$room/seen"
done
diff "$room/seen" - <<'SEEN'
5.23.0 same text with and without a cache: True
5.24.0 same text with and without a cache: False
SEEN

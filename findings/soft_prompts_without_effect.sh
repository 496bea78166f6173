#!/usr/bin/env bash
# PEFT 0.21.2 (torch 2.13.0): soft prompts, and the KV cache by its new name in transformers 5.24.0. PEFT hands prefixes on
# as past_key_values, which transformers drops beside the `cache` that generate() has made. The text of a model with a
# tuned prefix is then that of the model without it, and prompt tuning's is another than its own forward says.
# With transformers 5.23.0 both are what forward says.
#
# Seen: 5.23.0 PrefixTuningConfig: text of the base model False, of its own forward True
#       5.23.0 PromptTuningConfig: text of the base model False, of its own forward True
#       5.24.0 PrefixTuningConfig: text of the base model True, of its own forward False
#       5.24.0 PromptTuningConfig: text of the base model False, of its own forward False
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/soft.py" <<'PYTHON'
import peft
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None)).eval()


ids = torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(0))
settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
plain = base().generate(input_ids=ids, **settings)
for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig):
    model = peft.get_peft_model(base(), kind(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    for weights in model.parameters():
        if weights.requires_grad:
            weights.data.normal_(generator=torch.Generator().manual_seed(1))
    text = model.generate(input_ids=ids, **settings)
    said = ids
    with torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=said, attention_mask=torch.ones_like(said)).logits[:, -1]
            said = torch.cat([said, logits.argmax(-1, keepdim=True)], dim=1)
    same = f"text of the base model {torch.equal(text, plain)}, of its own forward {torch.equal(text, said)}"
    print(transformers.__version__, f"{kind.__name__}: {same}")
PYTHON
python3 -m venv "$room/venv"
for version in 5.23.0 5.24.0; do
  "$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 "transformers==$version" peft==0.21.2 \
    2> /dev/null
  "$room/venv/bin/python" -W ignore "$room/soft.py" 2> /dev/null | tee -a "$room/seen"
done
diff "$room/seen" - <<'SEEN'
5.23.0 PrefixTuningConfig: text of the base model False, of its own forward True
5.23.0 PromptTuningConfig: text of the base model False, of its own forward True
5.24.0 PrefixTuningConfig: text of the base model True, of its own forward False
5.24.0 PromptTuningConfig: text of the base model False, of its own forward False
SEEN

#!/usr/bin/env bash
# transformers 5.24.0: Mamba-2's layers keep time steps within the config's bounds (`time_step_limit`; Nemotron-H takes
# `time_step_min` from below) where several tokens are read in a pass, and not where one token continues a cache. So the
# same text has other scores when it was read as a prompt than when it was written token by token.
#
# Seen
#       mamba2, time_step_limit (0.0, inf): a prompt in one pass and token by token agree
#       mamba2, time_step_limit (0.1, 0.2): a prompt in one pass and token by token differ
#       nemotron_h, time_step_min 1e-09: a prompt in one pass and token by token agree
#       nemotron_h, time_step_min 0.1: a prompt in one pass and token by token differ
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/steps.py" <<'PYTHON'
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, NemotronHConfig, NemotronHForCausalLM, set_seed

mamba2 = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
mamba2 |= {"state_size": 8, "n_groups": 1}
nemotron = {"vocab_size": 64, "hidden_size": 32, "layers_block_type": ["mamba", "attention"], "num_attention_heads": 4}
nemotron |= {"num_key_value_heads": 2, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16}
nemotron |= {"n_groups": 1}


def told(what, kind, config):
    set_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.fill_(-3.0)  # steps that the bounds would move
            elif weight.ndim > 1:
                weight.normal_(0.0, 0.2)
        text = torch.randint(3, 64, (1, 12))
        whole = model(text).logits
        cache, alone = None, []
        for place in range(12):
            output = model(text[:, place : place + 1], cache=cache, use_cache=True)
            cache = output.cache
            alone.append(output.logits)
    far = (torch.cat(alone, 1) - whole).abs().max() / whole.std()
    print(f"{what}: a prompt in one pass and token by token", "differ" if far > 1e-3 else "agree")


for limit in ((0.0, float("inf")), (0.1, 0.2)):
    told(f"mamba2, time_step_limit {limit}", Mamba2ForCausalLM, Mamba2Config(**mamba2, time_step_limit=limit))
for least in (1e-9, 0.1):
    config = NemotronHConfig(**nemotron)
    config.time_step_min = least
    told(f"nemotron_h, time_step_min {least}", NemotronHForCausalLM, config)
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 2> /dev/null
"$room/venv/bin/python" -W ignore "$room/steps.py" 2> "$room/errors" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
mamba2, time_step_limit (0.0, inf): a prompt in one pass and token by token agree
mamba2, time_step_limit (0.1, 0.2): a prompt in one pass and token by token differ
nemotron_h, time_step_min 1e-09: a prompt in one pass and token by token agree
nemotron_h, time_step_min 0.1: a prompt in one pass and token by token differ
SEEN

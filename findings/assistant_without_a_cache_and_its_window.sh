#!/usr/bin/env bash
# transformers 5.24.0: MuseGlimmerAssistantModel takes its cache as an option, and where no layer slides the states of a
# block are the same with an empty DFlashCache and without one. Where layers slide they are not, although nothing is in
# either: a pass without a cache looks whether the block alone fits into the window, and if so, every key of the text is
# seen, however far away.
#
# Seen: window 64: the same with a cache and without
#       window 5: others without a cache, which are those of window 64
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/window.py" <<'PYTHON'
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

for window in (64, 5):
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": window}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 4, "target_layer_ids": [0, 2]}
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(**sizes, mask_token_id=47)
    model = MuseGlimmerAssistantModel(config).double().eval()
    features, block = torch.randn(1, 9, 64).double(), torch.randn(1, 4, 32).double()
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(9)
    given = {"noise_embeds": block, "context_hidden_states": features, "position_ids": torch.arange(13)[None]}
    with torch.no_grad():
        states = [model(**given, **more).last_hidden_state for more in ({"cache": cache}, {})]
    if torch.allclose(*states, atol=1e-9):
        print(f"window {window}: the same with a cache and without")
        wide = states[0]
    elif torch.allclose(states[1], wide, atol=1e-9):
        print(f"window {window}: others without a cache, which are those of window 64")
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 2> /dev/null
"$room/venv/bin/python" "$room/window.py" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
window 64: the same with a cache and without
window 5: others without a cache, which are those of window 64
SEEN

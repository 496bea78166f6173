#!/usr/bin/env bash
# torch 2.13.0 on a CPU with AVX2 or AVX-512: what an elementwise function gives for a number depends on where the
# number lies. The tail of a line, which fills no vector, takes another path than the rest, and rounds otherwise: silu,
# sigmoid and the tanh gelu in float32, rsqrt in bfloat16. gelu by erf, in float32, has one kernel for what is contiguous
# and another for rows of a wider tensor. exp, tanh and cos give the same everywhere. So an activation over a few rows is
# not bit by bit that over many.
#
# Seen, of 64 rows of 21 numbers: whether any differs if rows stand alone, and if they lie in a wider tensor
#       silu float32: alone True, in a wider tensor True
#       sigmoid float32: alone True, in a wider tensor True
#       gelu_tanh float32: alone True, in a wider tensor True
#       gelu float32: alone False, in a wider tensor True
#       rsqrt bfloat16: alone True, in a wider tensor True
#       exp float32: alone False, in a wider tensor False
#       tanh float32: alone False, in a wider tensor False
#       cos float32: alone False, in a wider tensor False
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/places.py" <<'PYTHON'
import torch
from torch.nn import functional as F

functions = {"silu": F.silu, "sigmoid": torch.sigmoid, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}
functions |= {"rsqrt": torch.rsqrt, "exp": torch.exp, "tanh": torch.tanh, "cos": torch.cos}
torch.set_num_threads(1)
for name, function in functions.items():
    dtype = torch.bfloat16 if name == "rsqrt" else torch.float32
    whole = torch.rand(64, 42, generator=torch.Generator().manual_seed(0)).mul(4).sub(0 if name == "rsqrt" else 2)
    rows = whole.to(dtype)[:, :21]
    together = function(rows.contiguous())
    alone = torch.cat([function(row[None].contiguous()) for row in rows])
    wider = function(rows)
    differ = not torch.equal(alone, together), not torch.equal(wider, together)
    print(f"{name} {str(dtype).removeprefix('torch.')}: alone {differ[0]}, in a wider tensor {differ[1]}")
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2> /dev/null
"$room/venv/bin/python" -W ignore "$room/places.py" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
silu float32: alone True, in a wider tensor True
sigmoid float32: alone True, in a wider tensor True
gelu_tanh float32: alone True, in a wider tensor True
gelu float32: alone False, in a wider tensor True
rsqrt bfloat16: alone True, in a wider tensor True
exp float32: alone False, in a wider tensor False
tanh float32: alone False, in a wider tensor False
cos float32: alone False, in a wider tensor False
SEEN

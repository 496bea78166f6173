#!/usr/bin/env bash
# torch 2.13.0 on a CPU with AVX-512: `torch.backends.cpu.get_cpu_capability()` says AVX512, whose vectors hold sixteen
# numbers of float32, but a sum over a line is added as if they held eight: eight lanes, four such vectors side by side,
# then the vectors that are left, then the lanes one after the other. Sixteen lanes give another last bit in about every
# second line. With AVX2 the order is the same, so a norm's mean does not part the two.
#
# Seen, of 1,000 lines of 448 numbers: how many sums are torch's to the last bit
#       8 lanes: 1000
#       16 lanes: 392
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/sums.py" <<'PYTHON'
import numpy as np
import torch


def sums(lines: np.ndarray, lanes: int) -> np.ndarray:
    """Of lines that are shorter than what torch adds up in levels."""
    wide = 4 * lanes
    whole = lines.shape[1] // wide * wide
    total = np.zeros((len(lines), wide), np.float32)
    for start in range(0, whole, wide):
        total += lines[:, start : start + wide]
    first = total[:, :lanes]
    for start in range(whole, lines.shape[1], lanes):
        first = first + lines[:, start : start + lanes]
    for each in (1, 2, 3):
        first = first + total[:, each * lanes : (each + 1) * lanes]
    added = np.zeros(len(lines), np.float32)
    for lane in range(lanes):
        added = added + first[:, lane]
    return added


lines = torch.rand(1000, 448, generator=torch.Generator().manual_seed(0))
for lanes in (8, 16):
    print(f"{lanes} lanes:", int((sums(lines.numpy(), lanes) == lines.sum(1).numpy()).sum()))
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2> /dev/null
"$room/venv/bin/python" -W ignore "$room/sums.py" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
8 lanes: 1000
16 lanes: 392
SEEN

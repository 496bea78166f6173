"""The example that runs under torchrun, on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel.py"


@pytest.mark.parametrize("options", [[], ["--shard"], ["--window", "5", "4", "5", "--temperature", "0.8"]])
def test_the_example_runs(options: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [*launcher, str(EXAMPLE), "--new-tokens", "24", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = re.search(r"2 ranks: S = ([\d.]+), ([\d.]+) nodes a pass, ([\d.]+) of them on the busiest", ran.stdout)
    assert found and float(found[1]) >= 1
    nodes, busiest = float(found[2]), float(found[3])
    if "--window" in options:  # always a tree of many nodes
        assert busiest < nodes
    else:  # the automatic mode may find, on a loaded machine, that drafts do not pay
        assert busiest == nodes if "--shard" in options else busiest <= nodes

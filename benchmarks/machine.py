"""What a benchmark ran on, for the JSON that it leaves."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Machine, versions, commit and argv of this run."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run(
        [*git[:3], "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": {
            "cpu": cpu,
            "cores": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "lookahead": version("lookahead-decoding"),
        },
        "commit": commit + ("+changes" if dirty else ""),
        "argv": sys.orig_argv[1:],
    }

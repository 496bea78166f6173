"""This machine, and where what is known of it is kept."""

import os
import platform
from functools import lru_cache
from pathlib import Path


@lru_cache
def processor_name() -> str:
    """That of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where files about this machine are kept: ``$LOOKAHEAD_CACHE``, else ``lookahead`` in the user's cache folder."""
    given = os.environ.get("LOOKAHEAD_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "lookahead"

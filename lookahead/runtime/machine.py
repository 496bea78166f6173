"""This machine, and what is found out about it once for all processes: kept in the user's cache folder."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lookahead import _files, _version


@lru_cache
def processor_name() -> str:
    """That of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where files about this machine are kept: ``$LOOKAHEAD_CACHE``, else ``lookahead`` in the user's cache folder."""
    given = os.environ.get("LOOKAHEAD_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "lookahead"


def cache_file(kind: str, key: str) -> Path:
    """The file there for a ``key`` of any length; another one as soon as anything in it differs."""
    return cache_folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def kernels() -> list[Any]:
    """All that decides which of torch's kernels for a CPU run, and in which order they add."""
    chosen = {
        name: value for name, value in os.environ.items() if name.startswith(("ONEDNN_", "DNNL_", "ATEN_", "MKL_"))
    }
    cpu = [processor_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return [_version.__version__, torch.__version__, *cpu, sorted(chosen.items())]


_found: dict[str, Any] = {}  # in this process


def found_once(kind: str, about: list[Any], find: Callable[[], Any]) -> Any:
    """What ``find`` finds out about :func:`kernels` and ``about``, JSON both: read where a process has found it before,
    else found and written. A file that cannot be read or written costs no more than finding it again."""
    key = json.dumps([kind, kernels(), about], default=str)
    if key not in _found:
        _found[key] = _read_or_find(kind, key, find)
    return _found[key]


def _read_or_find(kind: str, key: str, find: Callable[[], Any]) -> Any:
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):  # RuntimeError: there is no home folder
        return json.loads(cache_file(kind, key).read_text())["found"]
    found = find()
    with suppress(OSError, RuntimeError):
        file = cache_file(kind, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        _files.write_text(file, json.dumps({"about": json.loads(key), "found": found}))
    return found

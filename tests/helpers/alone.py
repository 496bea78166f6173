"""Tests that run in a network of their own, where a program that listens on all addresses is heard by nobody."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_INSIDE = "LOOKAHEAD_TEST_ALONE"


def _can() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


def alone(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test in a network that has only a loopback device; skipped where this user cannot make one."""

    @functools.wraps(test)
    def wrapped(request: pytest.FixtureRequest, *given: Any, **named: Any) -> None:
        if os.environ.get(_INSIDE):
            test(request, *given, **named)
            return
        if not _can():
            pytest.skip("needs a network namespace: unshare and ip, and the right to use them")
        root = Path(__file__).parents[2]
        name = f"{request.path.relative_to(root)}::{request.node.name}"
        inner = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", name]
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inner]
        ran = subprocess.run(command, cwd=root, env=os.environ | {_INSIDE: "1"}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]

    return wrapped

"""``lookahead serve`` in a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(says: str, *arguments: str, seconds: float = 120) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and the first group of ``says`` in what it tells; it is killed in the end.

    What it tells goes to a file, not through a pipe: processes that it has started may hold their end of a pipe after
    it has gone, and a reader would wait for them.
    """
    command = [sys.executable, "-m", "lookahead", "serve", "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "stderr")
        with told.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            deadline = time.monotonic() + seconds
            while not (found := re.search(says, told.read_text(errors="replace"))):
                assert process.poll() is None and time.monotonic() < deadline, told.read_text(errors="replace")
                time.sleep(0.05)
            yield process, found[1]
        finally:
            process.kill()
            process.wait()

"""Writing files so that nobody ever reads half of one."""

import os
import secrets
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Write a file: all of it or nothing, whatever other processes write there.

    Raises:
        OSError: the folder is missing or cannot be written to.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

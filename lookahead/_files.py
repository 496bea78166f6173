"""Files and folders that are written whole or not at all."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jacobi import LookaheadError

_FAR = (1 << 31) - 2  # a byte that hardly any file of text reaches, and the C library's ints do


def write_text(path: str | Path, text: str) -> None:
    """Write a file of text as :func:`write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file: all of it or nothing, whatever other processes write there. A link stays one, and what is no file,
    a device or a pipe, is written to."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def lock(file: BinaryIO) -> None:
    """Take an open file for this process alone, until closed or the process ends; an ``OSError`` if another has it."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_FAR)  # of a locked byte Windows keeps readers away, too
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_free(path: str | Path, replace: bool = False) -> Path:
    """The real path behind ``path``, unless it is a file, a full folder, or, with ``replace``, holds folders."""
    path = Path(path).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise LookaheadError(f"{path} is a file: expected a folder, or a name that is free.")
    inside = list(path.iterdir()) if path.exists() else []
    if inside and not replace:
        remedy = "Name another, or allow replacing this one (--force on the command line)."
        raise LookaheadError(f"{path} is not empty: expected a new folder. {remedy}")
    if any(child.is_dir() for child in inside):
        raise LookaheadError(f"{path} holds folders, and only files are replaced. Empty it first, or name another.")
    return path


@contextmanager
def whole_folder(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` when the block ends, and leaves nothing if the block fails. ``path`` is
    checked by :func:`check_free`; with ``replace``, the files in it are deleted."""
    path = check_free(path, replace)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    part, old = (path.with_name(f".{path.name}.{mark}.{what}") for what in ("part", "old"))
    part.mkdir()
    try:
        yield part
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def on_hub(source: str) -> bool:
    """Whether ``source`` reads like a repository's name, ``owner/name``, and not like a path."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))

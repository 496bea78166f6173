"""Files are written as a whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest

from lookahead.files import write_text


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for text in ("one", "zwei ü"):
        write_text(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "a.json", "new")
    assert os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none" / "a.json", "x")

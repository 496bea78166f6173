"""Files and folders are written wholly or not at all."""

import multiprocessing
import os
import pathlib
import sys
import threading
import types
from typing import Any

import pytest
from helpers.refusals import refuses

from jacobi import LookaheadError
from lookahead._files import check_free, lock, whole_folder, write_text
from lookahead.cli.options import check_file


def names(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_folder_appears_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "a" / "b"
    with whole_folder(target) as part:
        (part / "file").write_text("x")
        assert not target.exists()
    assert names(tmp_path) == ["a", "a/b", "a/b/file"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_failure_leaves_nothing(replace: bool, tmp_path: pathlib.Path) -> None:
    if replace:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "old").write_text("x")
    before = names(tmp_path)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "b", replace) as part:
        (part / "file").write_text("x")
        raise KeyboardInterrupt
    assert names(tmp_path) == before


def test_a_folder_of_files_is_replaced_if_allowed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").write_text("x")
    with pytest.raises(LookaheadError, match="b is not empty: expected a new folder"), whole_folder(tmp_path / "b"):
        pass
    assert names(tmp_path) == ["b", "b/old"]
    with whole_folder(tmp_path / "b", replace=True) as part:
        (part / "new").write_text("x")
        assert (tmp_path / "b" / "old").exists()
    assert names(tmp_path) == ["b", "b/new"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").write_text("x")
    real = os.replace

    def replace(source: pathlib.Path, target: pathlib.Path) -> None:
        if source.name.endswith(".part"):
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no"), whole_folder(tmp_path / "b", replace=True) as part:
        (part / "new").write_text("x")
    assert names(tmp_path) == ["b", "b/old"]


def test_files_and_nested_folders_are_never_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    refuses("file is a file: expected a folder", check_free, tmp_path / "file", replace=True)
    refuses("outer holds folders, and only files are replaced", check_free, tmp_path / "outer", replace=True)
    assert names(tmp_path) == ["file", "outer", "outer/inner"]


def test_a_link_is_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with whole_folder(tmp_path / "link") as part:
        (part / "file").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "x"


def test_a_file_is_written_and_replaced(tmp_path: pathlib.Path) -> None:
    for text in ("one", "zwei ü"):
        write_text(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["a.json"]
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none" / "a.json", "x")


def test_a_file_that_cannot_be_replaced_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def broken(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "a.json", "new")
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def write_often(path: pathlib.Path, number: int) -> None:
    for _ in range(40):
        write_text(path, f"{number}" * 20_000)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.skipif(os.name == "nt", reason="processes are forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_whoever_writes_at_once_a_reader_sees_a_whole_file(kind: str, tmp_path: pathlib.Path) -> None:
    file, seen = tmp_path / "a.json", set[str]()
    write_text(file, "1" * 20_000)
    make: Any = threading.Thread if kind == "threads" else multiprocessing.get_context("fork").Process
    writers = [make(target=write_often, args=(file, number)) for number in (1, 2, 3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(file.read_text())
    for writer in writers:
        writer.join()
        assert kind == "threads" or writer.exitcode == 0
    assert seen <= {f"{number}" * 20_000 for number in (1, 2, 3)}
    assert names(tmp_path) == ["a.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither")
def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.json").write_text("old")
    (tmp_path / "link").symlink_to("a.json")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.json").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert names(tmp_path) == ["a.json", "link", "pipe"]


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="needs a folder in which nobody may write")
def test_a_file_that_cannot_be_written_is_refused_before_any_work() -> None:
    with pytest.raises(LookaheadError, match=r"--out /proc/x.json: the folder cannot be written to \(.+\)"):
        check_file("--out", pathlib.Path("/proc/x.json"))
    check_file("--out", pathlib.Path("/dev/null"))


def test_a_lock_excludes_others_until_the_file_is_closed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    with path.open("ab") as one, path.open("ab") as other:
        lock(one)
        with pytest.raises(OSError):
            lock(other)
    with path.open("ab") as other:
        lock(other)


def test_on_windows_a_far_byte_is_locked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    windows = types.SimpleNamespace(LK_NBLCK=2, locking=lambda fd, mode, size: asked.append((mode, os.lseek(fd, 0, 1))))
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    monkeypatch.setattr(sys, "platform", "win32")
    with (tmp_path / "file").open("a+b") as file:
        file.write(b"text")
        lock(file)
        assert asked == [(2, 2**31 - 2)]
        file.write(b" more")
    assert (tmp_path / "file").read_bytes() == b"text more"

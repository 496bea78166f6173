"""What is found out about a machine: once for all processes, and anew where its kernels may be others."""

from pathlib import Path

import pytest
import torch

from lookahead.runtime import machine
from lookahead.runtime.machine import found_once


@pytest.fixture(autouse=True)
def looked_at_nothing(monkeypatch: pytest.MonkeyPatch, curves: Path) -> None:
    next_process(monkeypatch)


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_found", {})


def never() -> None:
    raise AssertionError("looked again")


def test_what_one_process_finds_the_next_one_knows(monkeypatch: pytest.MonkeyPatch, curves: Path) -> None:
    for found in ([1, 64], None, True):
        assert found_once("rows", [str(found)], lambda found=found: found) == found
        assert found_once("rows", [str(found)], never) == found
    next_process(monkeypatch)
    assert found_once("rows", ["[1, 64]"], never) == [1, 64]
    assert found_once("rows", ["None"], never) is None
    assert len(list(curves.iterdir())) == 3


def test_other_kernels_are_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_once("rows", [8], lambda: "first") == "first"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert found_once("rows", [8], lambda: "other instructions") == "other instructions"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert found_once("rows", [8], lambda: "other threads") == "other threads"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert found_once("packed", [8], lambda: "another question") == "another question"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"about": 1}', "\0"])
def test_a_broken_file_costs_a_look(monkeypatch: pytest.MonkeyPatch, curves: Path, content: str) -> None:
    assert found_once("rows", [8], lambda: 1) == 1
    for file in curves.iterdir():
        file.write_text(content)
    next_process(monkeypatch)
    assert found_once("rows", [8], lambda: 2) == 2


def test_a_folder_that_cannot_be_written_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "file" / "cache"))
    assert found_once("rows", [8], lambda: 3) == 3

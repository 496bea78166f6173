"""Two checkouts in two processes; here both are this one."""

import json
from pathlib import Path

import pytest
from helpers.cli import invoked

from benchmarks import compare


def _answer(tokens: list[int], cpu_ms: float, passes: int) -> dict[str, object]:
    return {"tokens": tokens, "cpu_ms": cpu_ms, "wall_ms": 2 * cpu_ms, "passes": passes, "fallback": {}}


def test_figures() -> None:
    """Ratios are the other's times over this checkout's, of the fastest round; a text differs if any round's does."""
    found = {
        "this": [[_answer([1, 2], 9.0, 1), _answer([1, 2], 2.0, 1)], [_answer([3, 4], 4.0, 2)] * 2],
        "other": [[_answer([1, 2], 4.0, 2)] * 2, [_answer([3, 5], 8.0, 2)] * 2],
    }
    row = compare.figures(found)
    assert row["cpu_ratio"] == row["wall_ratio"] == 2.0
    assert row["pass_ratio"] == 1.5  # 2.0 over 2.0, and 4.0 over 2.0
    assert (row["this_S"], row["other_S"]) == (8 / 6, 1.0)
    assert (row["texts"], row["texts_that_differ"]) == (2, 1)


@pytest.mark.slow
def test_the_same_checkout_twice(tmp_path: Path) -> None:
    """From the command line to JSON: whatever one checkout writes, the other does."""
    options = "--prompts 1 --warm 1 --new-tokens 6 --methods nodes16,plain --modes t0.8"
    folders = ("--other", compare.ROOT, "--out", tmp_path / "compare.json")
    done = invoked(compare.main, *options.split(), *folders)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["nodes16", "plain"]
    assert all(row["texts_that_differ"] == 0 and row["cpu_ratio"] > 0 for row in rows)
    assert rows[0]["this_S"] == rows[0]["other_S"] >= 1.0
    assert rows[1]["this_S"] == 1.0


def test_another_packages_process_is_refused(tmp_path: Path) -> None:
    """A folder without the library would import the installed one unnoticed."""
    with (
        compare.Side(tmp_path, str(tmp_path / "curves")) as side,
        pytest.raises(RuntimeError, match=r"The process of .*(expected that checkout's package|ended with code)"),
    ):
        side.ask({"load": None, "dtype": "float32", "device": "cpu", "threads": 1})

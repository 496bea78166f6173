"""The report, of small documents of every kind."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.cli import invoked

from benchmarks import harness, report

RUN = {
    "machine": {"cpu": "a processor", "cores": 2, "cpu_capability": "AVX2", "gpu": None, "system": "Linux"},
    "versions": {"python": "3.11", "torch": "2", "transformers": "5", "lookahead": "0"},
    "commit": "abc123",
    "argv": ["-m", "benchmarks.race", "--modes", "greedy"],
}


def _row(method: str, speedup: float, group: str = "all") -> dict[str, Any]:
    return {
        "method": method,
        "label": {"plain": "generate", "auto": "lookahead"}.get(method, method),
        "group": group,
        "set": "code",
        "mode": "greedy",
        "dtype": "float32",
        "batch": 1,
        "new_tokens": 64,
        "speedup_median": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "speedup_quartiles": [speedup, speedup],
        "tokens_per_s_median": 100.0,
        "S": 2.0,
        "passes": 32,
        "nodes": 8.0,
        "share_of_ceiling": 0.9,
        "texts": 4,
        "texts_that_differ": 0,
        "same_draws": True,
    }


def _write(folder: Path, name: str, document: dict[str, Any], **stamp: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"device": "cpu", "model": "bundled", **document, **RUN, **stamp}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with one small document of every kind, and one that the report does not know."""
    card = {
        "parameters": 5_000_000,
        "weight_bytes_per_pass": 20_000_000,
        "bandwidth_gb_per_s": {"memory": {"sum": 10.0, "copy": 9.0}},
        "context": 256,
        "floor_ms": {"1": 2.0},
        "pass_ms": {"1": {"1": 3.0, "8": 4.5}},
    }
    rows = [_row("plain", 1.0), _row("auto", 1.5), _row("auto", 0.8, "not looping"), _row("jacobi", 0.998)]
    skipped = [{"method": "static", "dtype": "float32", "reason": "no CUDA"}]
    _write(tmp_path, "race", {"benchmark": "race", "theory": {"float32": card}, "rows": rows, "skipped": skipped})
    real = {"length": 50, "calls": 4, "drafts": 1.25, "passes_gain": 0.8, "first_token_ms": 20.0, "token_ms": 9.0}
    real |= {"after_median": 1.1, "after_interval": [1.0, 1.2]}
    seen = [
        {"source": "all", "nodes": n, "memory": "cold", "mode": "greedy", "category": c, "texts": 2, "S": n / 4}
        for c, n in (("writing", 24), ("few", 4), ("few", 24))
    ]
    call = {"mode": "greedy", "call": "first", "plain_median_ms": 100.0, "ours_median_ms": 200.0, "speedup_median": 0.5}
    measured = {
        "exact": [{"mode": "greedy", "texts": 8, "tokens": 384, "S": 2.0, "texts_that_differ": 0}],
        "acceptance": seen,
        "rows": [{**row, **real} for row in rows if row["group"] == "all"],
        "first": [{**call, "speedup_interval": [0.4, 0.6], "cpu_ratio": 0.6, "texts": 3, "texts_that_differ": 0}],
        "skipped": [{"part": "race", "length": 4000, "reason": "no time was left"}],
    }
    _write(tmp_path, "real-tiny", {"benchmark": "real", **measured}, model="tiny")
    curve = {"preset": "bundled", "dtype": "float32", "context": 128, "batch": 1, "pass_ms": {"1": 2.0, "8": 3.0}}
    _write(tmp_path, "step", {"benchmark": "step time", "rows": [curve]})
    parts = {
        "races 1.3B": [{**row, "model": "1.3B", "race": "greedy"} for row in rows if row["group"] == "all"],
        "attention": [
            {"history": 8192, "nodes": 8, "way": way, "ms": ms, "off_by": 1e-4}
            for way, ms in (("sdpa", 0.17), ("split", 0.04), ("split, chunks of 512", 0.05))
        ],
        "curves": [{**curve, "what": "curve", "shape": "8B", "context": 256, "eager_ms": 18.0, "floor_ms": 3.5}],
    }
    parts["races smollm2-135m"] = [{**_row("auto", 1.4), "model": "smollm2-135m", "race": "greedy"}]
    parts["curves"][0]["pass_ms"] = {"1": 7.0, "8": 10.5}
    claims = [("none fails", 0, True), ("all pass", None, None), ("fast enough", 2.5, False)]
    made = {"claims": [dict(zip(("claim", "worst", "held"), claim, strict=True)) for claim in claims]}
    made["parts"] = {name: {"rows": part} for name, part in parts.items()}
    machine = RUN["machine"] | {"gpu": "H200"}
    _write(tmp_path, "gpu", {"benchmark": "gpu", **made}, device="cuda", machine=machine)
    _write(tmp_path, "other", {"benchmark": "something else"})
    return tmp_path


def test_report(results: Path) -> None:
    """The summary and every page, from the same figures."""
    text = report.build(results, results / "BENCHMARKS.md")
    assert text.startswith("# Benchmarks\n\nWritten by `python -m benchmarks.report` from")
    assert "- [Pretrained models](real.md)\n" in text and "- [Every way to decode, raced](race.md)" in text
    assert (
        "a processor, 2 threads, model tiny:\n\n| prompt tokens | batch | mode | dtype | tokens | lookahead |" in text
    )
    assert "| 50 | 1 | greedy | float32 | 64 | 1.50x | 1.00x |" in text
    assert "- Pretrained models: 0 of 2 medians." in text
    assert "| smollm2-135m | greedy | 1.40x |" in text and "| 1.3B |" not in text
    real = (results / "real.md").read_text()
    assert "| greedy | 384 | 2.00 | 0 of 8 |" in real
    assert "| category | texts | greedy, cold |\n| --- | --- | --- |\n| writing | 2 | 6.00 |" in real
    assert "| mode | source | 4 nodes | 24 nodes |\n| --- | --- | --- | --- |\n| greedy | all | 1.00 | 6.00 |" in real
    assert "| lookahead | 50 | 1 | greedy | float32 | 64 | 4 | 1.50x | 1.40-1.60 | 1.25x | 0.80x | 2.00 | 8.0 |" in real
    assert "| lookahead | 50 | greedy | 20 | 9.00 | 1.10x | 1.00-1.20 |" in real
    assert "| greedy | first | 100 | 200 | **0.50x** | 0.40-0.60 | 0.600 | 0 of 3 |" in real
    assert "Not run:\n\n- race, no time was left: length 4000\n" in real
    race = (results / "race.md").read_text()
    assert "| code | greedy | float32 | 1 | 64 | 1.50x | 1.00x |" in race
    assert "| code, not looping | greedy | float32 | 1 | 64 | **0.80x** |" in race
    assert "- Not run: static, no CUDA" in race
    assert "| float32 | 1 | 20.0 MB | 10.0 GB/s | 2.00 | 3.00 | 1.50 |" in race
    assert "`python -m benchmarks.race --modes greedy`" in race
    assert "abc123" in race
    gpu = (results / "gpu.md").read_text()
    assert "## gpu.json, H200, model bundled" in gpu
    assert "| none fails | 0 | yes |\n| all pass |  | not measured |\n| fast enough | 2.5 | **no** |" in gpu
    assert "| 8B | 256 | 18.00 | 3.50 | 7.00 | 1.50 |" in gpu
    assert "| 8192 | 8 | 170 | 40 |" in gpu
    assert "something else" not in text


def test_dirty_results_are_refused(results: Path) -> None:
    """What nobody can repeat is reported only when that is asked for, and then it is marked."""
    _write(results, "dirty", {"benchmark": "step time", "rows": []}, commit="abc123+changes")
    _write(results, "unknown", {"benchmark": "step time", "rows": []}, commit="unknown")
    with pytest.raises(typer.BadParameter, match=r"2 of the results in .* got dirty.json \(abc123\+changes\), unknown"):
        report.build(results, results / "BENCHMARKS.md")
    done = invoked(report.main, "--results", results, "--out", results / "BENCHMARKS.md")
    assert done.exit_code == 2 and "--allow-dirty" in done.output
    assert not (results / "race.md").exists() and not (results / "BENCHMARKS.md").exists()
    text = report.build(results, results / "BENCHMARKS.md", allow_dirty=True)
    assert "`python -m benchmarks.report --allow-dirty`" in text
    page = (results / "step_time.md").read_text()
    assert "## dirty.json, a processor, 2 threads, model bundled (dirty)" in page
    assert "## step.json, a processor, 2 threads, model bundled\n" in page


def test_a_dirty_tree_writes_no_published_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "commit_of", lambda _: "abc123+changes")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    with pytest.raises(typer.BadParameter, match=r"the code is at abc123\+changes: expected a commit without changes"):
        harness.Run("race", tmp_path / "results" / "race.json")
    harness.Run("race", tmp_path / "race.json", rows=[]).add("rows", [{"S": 1.0}])
    document = json.loads((tmp_path / "race.json").read_text())
    assert document["commit"] == "abc123+changes"
    assert document["rows"] == [{"S": 1.0}]
    monkeypatch.setattr(harness, "commit_of", lambda _: "abc123")
    harness.Run("race", tmp_path / "results" / "race.json").save()
    assert (tmp_path / "results" / "race.json").exists()


def test_results_do_not_make_a_tree_dirty(tmp_path: Path) -> None:
    """Files are measured one after the other; only changed code tells that a commit is not what was run."""

    def git(*command: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True, capture_output=True)

    assert harness.commit_of(tmp_path) == "unknown"
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "race.json"
    code.write_text("a = 1\n")
    result.write_text("{}\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = harness.commit_of(tmp_path)
    result.write_text("[]\n")
    assert harness.commit_of(tmp_path) == commit
    assert not harness.is_dirty(commit)
    code.write_text("a = 2\n")
    assert harness.commit_of(tmp_path) == f"{commit}+changes"


def test_the_published_report_is_of_the_published_results(tmp_path: Path) -> None:
    """BENCHMARKS.md and the pages say what the JSON files say."""
    for file in harness.RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    text = report.build(tmp_path, tmp_path.parents[1] / "B.md", allow_dirty=True)
    published = (harness.ROOT / "BENCHMARKS.md").read_text()
    assert [line for line in text.splitlines() if "](" not in line] == [
        line for line in published.splitlines() if "](" not in line
    ]
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (harness.RESULTS / page.name).read_text()

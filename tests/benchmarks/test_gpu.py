"""``make gpu``: every part at tiny shapes on a CPU, and what is made of their rows."""

import json
import sys
from typing import Any

import pytest
import torch
from helpers.cli import invoked

from benchmarks import contest, embedding, gpu, gpu_parts
from benchmarks.gpu_parts import Bench

QUICK = Bench("cpu", quick=True)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of all parts but the tests leaves, in this process; one part fails."""
    out = tmp_path_factory.mktemp("gpu")
    names = [name for name in gpu_parts.PARTS if name not in ("tests", "races 8B", "races smollm2-135m")]

    def broken(bench: Bench) -> Any:
        yield {"what": "bandwidth"}
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu_parts.PARTS, "broken", (5, broken))
        options = ["--device", "cpu", "--quick", "--no-isolated"]
        done = invoked(gpu.main, *options, "--parts", ",".join(["broken", *names]), "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "gpu.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    return dict(found)


def test_every_part_runs_and_a_broken_one_is_recorded(document: dict[str, Any]) -> None:
    parts = document["parts"]
    broken = parts.pop("broken")
    assert broken["rows"] == [{"what": "bandwidth"}]
    assert broken["error"] == "RuntimeError: an illegal memory access was encountered"
    assert all(part["rows"] and part["error"] is None for part in parts.values())
    assert all(row["off_by"] < 0.02 for row in parts["attention"]["rows"])
    assert {row["way"] for row in parts["attention"]["rows"]} >= {
        "sdpa",
        "packed",
        "split",
        "split, chunks of 32",
        "unmasked",
    }
    assert {row["method"] for row in parts["races 1.3B"]["rows"]} == {"plain", "lookup2", "auto", "w7", "static"}
    assert {row["dtype"] for row in parts["exactness"]["rows"]} == {"float32", "bfloat16"}
    assert {row["route"] for row in parts["curves"]["rows"] if row["what"] == "capture"} == {"static"}


def test_claims(document: dict[str, Any]) -> None:
    held = {row["claim"]: row["held"] for row in document["claims"]}
    assert held["float32: no text differs"] is True
    assert held["every size of pass is a CUDA graph"] is False
    assert held["every part ran to its end"] is False
    assert held["tests: none fails"] is None


def test_a_claim_tells_its_worst_value() -> None:
    claim = gpu.Claim("below", [1.0, 3.0, 2.0], most=2.0)
    assert claim.to_dict() == {"claim": "below", "worst": 3.0, "held": False}
    claim = gpu.Claim("above", [1.0, 3.0], least=1.0)
    assert claim.to_dict() == {"claim": "above", "worst": 1.0, "held": True}
    assert gpu.Claim("unknown", []).to_dict() == {"claim": "unknown", "worst": None, "held": None}


@pytest.mark.usefixtures("augmented")
def test_a_pretrained_model_is_taken_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its folder its part has no rows, and exactness is that of the others."""
    part = f"races {gpu_parts.PRETRAINED}"
    assert list(gpu_parts.measure(part, QUICK)) == []
    monkeypatch.setattr(Bench, "pretrained", lambda self, dtype: self.small())
    rows = list(gpu_parts.measure(part, QUICK))
    assert {row["race"] for row in rows} == {"greedy", "T 0.7", "T 1.0", "compiled"}
    assert {row["model"] for row in rows} == {gpu_parts.PRETRAINED}
    models = {row["model"] for row in gpu_parts.measure("exactness", QUICK)}
    assert models == {"0.36B", "bundled", gpu_parts.PRETRAINED}


@pytest.mark.usefixtures("augmented")
def test_a_text_that_differs_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding does not explain what another setting of ``generate`` writes."""
    model, _ = QUICK.small()
    other = contest.Method("other", "plain", {"repetition_penalty": 5.0})
    monkeypatch.setitem(contest.METHODS, "other", lambda: other)
    given, _ = QUICK.texts(model, None, "code", 2, 1, 8)
    found = gpu_parts._differences(model, given, "greedy", "other", 8)
    assert found["texts"] == 2
    assert found["differ"] == found["judged"] == found["bugs"] > 0


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoked(gpu.main)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("No CUDA device: ") and done.stderr.count("\n") == 1


def test_what_the_process_of_a_part_tells() -> None:
    """A row a line, and at the end how it went."""
    lines = invoked(gpu.main, "--only", "attention", "--device", "cpu", "--quick").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows.pop() == {"error": None}
    places = [(row["nodes"], row["way"]) for row in rows]
    assert len(places) == len(set(places)) >= 4


def test_a_part_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "import json, sys; print(json.dumps({'argv': sys.argv[1:]})); print('{\"error\": null}')"
    monkeypatch.setattr(gpu, "_COMMAND", [sys.executable, "-c", told])
    rows: list[Any] = []
    assert gpu.alone("attention", QUICK, 60.0, rows.append) is None
    assert rows == [{"argv": ["--only", "attention", "--device", "cpu", "--quick"]}]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import time; time.sleep(60)", "stopped after 1 s"),
        ("import os; os.abort()", "the process ended with -6"),
        ("pass", "it did not say how it ended"),
    ],
)
def test_a_process_that_hangs_or_dies(code: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has told before is kept."""
    told = f"print('{{\"nodes\": 1}}', flush=True); print('noise', flush=True); {code}"
    monkeypatch.setattr(gpu, "_COMMAND", [sys.executable, "-c", told])
    rows: list[Any] = []
    assert gpu.alone("attention", QUICK, 1.0, rows.append) == error
    assert rows == [{"nodes": 1}]


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ("....\n4 passed in 1.2s", (4, 0)),
        ("F.s\n== 1 failed, 1 passed, 1 skipped in 3s ==", (1, 1)),
        ("E\n2 errors in 0.1s", (0, 2)),
        ("", (0, 0)),
    ],
)
def test_what_pytest_says(told: str, counts: tuple[int, int]) -> None:
    found = gpu_parts.counted(told)
    assert (found["passed"], found["failed"]) == counts


def test_files_with_tests_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Ran:
        returncode, stdout = 0, "3 passed in 1s"

    monkeypatch.setattr(gpu_parts.subprocess, "run", lambda command, **_: commands.append(command) or Ran)
    rows = list(gpu_parts.measure("tests", QUICK))
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    assert "tests/exactness/test_gpu.py" in [row["file"] for row in rows]
    assert all(row["passed"] == 3 and row["status"] == 0 for row in rows)
    assert all(command[3:7] == ["-p", "no:benchmark", "-m", "gpu"] for command in commands)


def test_the_parts_fit_into_nine_minutes() -> None:
    assert gpu._SECONDS < 540
    assert sum(limit for name, (limit, _) in gpu_parts.PARTS.items() if name != "tests") + 40 <= gpu._SECONDS
    assert {name.removeprefix("races ") for name in gpu_parts.PARTS if name.startswith("races")} <= {
        *embedding.SHAPES,
        gpu_parts.PRETRAINED,
    }

"""``lookahead batch``: every request once, whatever happens to the process."""

import json
from pathlib import Path

import pytest
from helpers.batches import killed_and_resumed, request, written
from helpers.cli import run


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 12, 1)


@pytest.mark.slow
def test_500_requests_killed_twice(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 500, 2)


@pytest.mark.usefixtures("augmented")
def test_bad_lines_stand_aside(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = request(2)
    lines = [json.dumps(good), "{", '"text"', json.dumps(good), json.dumps(request(4) | {"url": "/v2"})]
    lines += [json.dumps({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "", "max_tokens": 3}})]
    lines += [json.dumps({"prompt": "import os\n", "max_tokens": 4, "temperature": 0})]
    source.write_text("\n".join(lines))
    ran = run("batch", source, out)
    assert ran.status == 1
    bad = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [each["line"] for each in bad] == [2, 3, 4, 5, 6]
    assert "not JSON" in bad[0]["error"] and "earlier line" in bad[2]["error"] and "prompt is empty" in bad[4]["error"]
    assert {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} == {"r2", "line-7"}
    before = out.read_bytes()
    assert run("batch", source, out).status == 1
    assert out.read_bytes() == before


def test_refusals(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    ran = run("batch", source, tmp_path / "out.jsonl")
    assert ran.status == 2 and "cannot be read" in ran.err
    source.write_text("\n")
    assert "holds no request" in run("batch", source, tmp_path / "out.jsonl").err
    written(source, [request(0)])
    other = tmp_path / "other.jsonl"
    other.write_text("a text\n")
    assert "is no answer of a batch" in " ".join(run("batch", source, other).err.split())
    assert other.read_text() == "a text\n"

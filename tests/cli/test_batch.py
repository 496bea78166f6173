"""``lookahead batch``: every request once, whatever happens to the process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.serving import plain

PROMPTS = ["def add(a, b):\n", "class Stack:\n", "import os\n"]


def request(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": f"# {number}\n{PROMPTS[number % 3]}", "max_tokens": 24}
    body |= {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def written(file: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return requests


def check(out: Path, requests: list[dict[str, Any]]) -> None:
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in answers) == sorted(each["custom_id"] for each in requests)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    for each in requests:
        body = each["body"]
        sampling = {"do_sample": True, "temperature": 0.8} if body["temperature"] else {"do_sample": False}
        assert texts[each["custom_id"]] == plain(body["prompt"], body.get("seed"), max_new_tokens=24, **sampling)


def killed_and_resumed(folder: Path, count: int, kills: int) -> None:
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    requests = written(source, [request(number) for number in range(count)])
    command = [sys.executable, "-m", "lookahead", "batch", str(source), str(out)]
    for kill in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline, wanted = time.monotonic() + 120, (kill + 1) * count // (kills + 1)
        while not out.exists() or out.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with out.open("ab") as file:
            file.write(b'{"id": "torn')
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=500).returncode == 0
    check(out, requests)


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

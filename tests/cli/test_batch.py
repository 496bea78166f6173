"""``lookahead batch``: every request once, whatever happens to the process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.batches import killed_and_resumed, request, written
from helpers.cli import run

from lookahead._files import lock
from lookahead.cli import batch as command
from lookahead.serve.batches import Line, Outcome


@pytest.mark.parametrize(("requests", "kills"), [(6, 1), pytest.param(500, 2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on(tmp_path: Path, requests: int, kills: int) -> None:
    killed_and_resumed(tmp_path, requests, kills)


@pytest.mark.usefixtures("augmented")
def test_bad_lines_stand_aside(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = request(2)
    lines = [json.dumps(good), "{", '"text"', json.dumps(good), json.dumps(request(4) | {"url": "/v2"})]
    lines += [json.dumps({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "", "max_tokens": 3}})]
    short = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}
    lines += [json.dumps(short), json.dumps(short | {"custom_id": None}), json.dumps(short | {"custom_id": 8})]
    lines += [json.dumps(short | {"custom_id": "half \ud800"}), json.dumps(short | {"model": "other"})]
    source.write_text("\n".join(lines))
    ran = run("batch", source, out)
    assert ran.status == 1
    bad = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    told = {2: "not JSON", 3: "got str", 4: "in an earlier line", 5: "got POST /v2", 9: "must be a text: got 8"}
    told |= {10: "half of a surrogate", 6: "prompt is empty", 11: "'other' does not exist here"}
    assert [each["line"] for each in bad] == list(told)
    assert all(words in each["error"] for each, words in zip(bad, told.values(), strict=True))
    names = [each["custom_id"] for each in bad]
    assert names == [None, None, "r2", "r4", None, "half \ud800", "x", "line-11"]
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {"r2", "line-7", "line-8"}
    assert {each["response"]["body"]["model"] for each in answers} == {"tiny-coder"}
    assert "3 answers" in ran.err and "8 bad lines" in ran.err
    before = out.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()
    assert run("batch", source, out).status == 1
    assert (out.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()) == before
    source.write_text(lines[0])
    assert run("batch", source, out).status == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_bad_lines_are_written_when_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, aside = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.errors.jsonl"))
    source.write_text("{\n" + json.dumps(request(1)) + "\n" + json.dumps(request(2)))
    seen = []

    def outcomes(lines: list[Line], options: object) -> Iterator[Outcome]:
        seen.append(aside.read_bytes().count(b"\n"))
        yield Outcome(2, error="refused")
        seen.append(aside.read_bytes().count(b"\n"))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_outcomes", outcomes)
    for _ in range(2):  # the second run begins the file anew
        assert run("batch", source, out).status == 130
    assert seen == [1, 2, 1, 2]


def test_the_model_may_have_another_name(tmp_path: Path) -> None:
    line = {"prompt": "import os\n", "max_tokens": 2, "model": "mine"}
    written(tmp_path / "in.jsonl", [line])
    assert run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--served-model-name", "mine").status == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["model"] == "mine"


def test_refusals(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    ran = run("batch", source, tmp_path / "out.jsonl")
    assert ran.status == 2 and "cannot be read" in ran.err
    source.write_text("\n")
    assert "holds no request" in run("batch", source, tmp_path / "out.jsonl").err
    written(source, [request(0)])


def record(name: str) -> str:
    return json.dumps({"id": "batch_req_1", "custom_id": name, "response": {}, "error": None}) + "\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a text\n", 1),
        (json.dumps(request(0)), 1),  # its line seems torn, but is none of ours
        (json.dumps(request(0)) + "\n", 1),
        (record("a") + "[]\n" + '{"id": "batch', 2),
        (record("a") + "a text", 2),
    ],
)
def test_files_of_others_stay_as_they_are(tmp_path: Path, text: str, line: int) -> None:
    source, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    written(source, [request(0)])
    other.write_text(text)
    ran = run("batch", source, other)
    assert ran.status == 2 and f"line {line}, was not written by lookahead batch" in " ".join(ran.err.split())
    assert other.read_text() == text
    aside = tmp_path / "out.errors.jsonl"
    aside.write_text("a text\n")
    assert "was not written by lookahead batch" in " ".join(run("batch", source, tmp_path / "out.jsonl").err.split())
    assert aside.read_text() == "a text\n"


def test_requests_are_never_the_target(tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    text = json.dumps(request(0)) + "\n" + json.dumps(request(1))
    source.write_text(text)
    link.symlink_to(source)
    for target in (source, link):
        assert "and answers would go there" in " ".join(run("batch", source, target).err.split())
    aside = tmp_path / "x.errors.jsonl"
    aside.symlink_to(source)
    assert "and bad lines would go there" in " ".join(run("batch", source, tmp_path / "x.jsonl").err.split())
    assert source.read_text() == text


def test_a_file_is_written_by_one_process(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(source, [request(0)])
    with out.open("ab") as file:
        lock(file)
        assert "written by another process" in " ".join(run("batch", source, out).err.split())

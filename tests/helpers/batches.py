"""Files of requests for ``lookahead batch``, runs that are killed, and what plain ``generate`` writes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def killed_and_resumed(folder: Path, count: int, kills: int, options: Sequence[str] = ()) -> None:
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    requests = written(source, [request(number) for number in range(count)])
    command = [sys.executable, "-m", "lookahead", "batch", str(source), str(out), *options]
    for kill in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline, wanted = time.monotonic() + 600, (kill + 1) * count // (kills + 1)
        while not out.exists() or out.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with out.open("ab") as file:
            file.write(b'{"id": "batch_req_torn')
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=500).returncode == 0
    check(out, requests)

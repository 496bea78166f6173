"""Replicas on Ray, some of which are killed; every test in a network of its own, for Ray listens on real addresses."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers.alone import alone
from helpers.batches import check, killed_and_resumed, written
from helpers.batches import request as request_of
from helpers.command import serving
from helpers.serving import client, plain

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray.serve")


RUNNING = r"running on (http://127\.0\.0\.1:\d+)"


def replicas(title: str) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if f"ray::{title}" in line]


def prompt_of(who: int, number: int) -> str:
    return f"# {who} {number}\ndef add(a, b):\n"


def ask(address: str, who: int, texts: dict[tuple[int, int], str], cut: dict[tuple[int, int], str]) -> None:
    """Ten requests of one client: of every four one is greedy, one sampled, and one of each is streamed."""
    with client(address) as asked:
        for number in range(10):
            key, kind = (who, number), (who + number) % 4
            chosen: dict[str, Any] = {"temperature": 0.8, "seed": number} if kind % 2 else {"temperature": 0}
            settings = {"model": "tiny-coder", "prompt": prompt_of(*key), "max_tokens": 64} | chosen
            text = ""
            try:
                if kind < 2:
                    text = asked.completions.create(**settings).choices[0].text
                else:
                    for chunk in asked.completions.create(**settings, stream=True):
                        text += chunk.choices[0].text
                texts[key] = text
            except openai.APIError as error:
                assert kind >= 2 and text and "not whole" in str(error), (key, error)
                cut[key] = text


@alone
def test_a_replica_is_killed_under_load(request: pytest.FixtureRequest) -> None:
    with serving(RUNNING, "--replicas", "2") as (process, address):
        texts: dict[tuple[int, int], str] = {}
        cut: dict[tuple[int, int], str] = {}
        clients = [threading.Thread(target=ask, args=(address, who, texts, cut)) for who in range(8)]
        for each in clients:
            each.start()
        while len(texts) < 10:
            time.sleep(0.01)
        os.kill(replicas("ServeReplica")[0], signal.SIGKILL)
        for each in clients:
            each.join()
        assert len(texts) + len(cut) == 80
        for (who, number), text in (texts | cut).items():
            sampling: dict[str, Any] = {"do_sample": False}
            seed = None
            if (who + number) % 2:
                sampling, seed = {"do_sample": True, "temperature": 0.8}, number
            expected = plain(prompt_of(who, number), seed, max_new_tokens=64, **sampling)
            assert expected.startswith(text) if (who, number) in cut else text == expected
        deadline = time.monotonic() + 120
        while len(replicas("ServeReplica")) < 2:  # another one takes its place
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert not replicas("ServeReplica")


@alone
def test_conversations_stay_metrics_add_up_and_answers_end(request: pytest.FixtureRequest) -> None:
    with (
        serving(RUNNING, "--replicas", "2", "--api-key", "secret") as (process, address),
        client(address, "secret") as asked,
    ):
        with pytest.raises(openai.AuthenticationError), client(address, "wrong") as stranger:
            stranger.models.list()
        for topic in "abcd":
            code = f"class {topic.upper()}:\n    def {topic}(self, value):\n        self.{topic} = value\n"
            messages: list[Any] = [{"role": "user", "content": code}]
            settings: dict[str, Any] = {"model": "tiny-coder", "max_tokens": 16, "temperature": 0}
            settings["logit_bias"] = {"0": -100}
            first = asked.chat.completions.create(messages=messages, **settings)
            messages.append({"role": "assistant", "content": first.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
            usage = asked.chat.completions.create(messages=messages, **settings).usage
            assert usage.prompt_tokens_details.cached_tokens  # by the same replica
        assert httpx.get(f"{address}/metrics").status_code == 401
        told = httpx.get(f"{address}/metrics", headers={"Authorization": "Bearer secret"}).text
        done = re.findall(r'vllm:request_success_total\{[^}]*replica="(\d)"[^}]*\} ([\d.]+)', told)
        assert sum(float(count) for _, count in done) >= 8 and "# TYPE vllm:request_success_total counter" in told
        assert httpx.get(address).text.startswith("<!doctype html>")
        settings |= {"max_tokens": 300, "temperature": 1.0, "seed": 3, "stream": True, "prompt": "def f"}
        stream = asked.completions.create(**settings)
        text = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        for chunk in stream:  # what runs is finished
            text += chunk.choices[0].text
        assert len(text) > 300


@alone
def test_a_batch_whose_replica_is_killed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = written(source, [request_of(number) for number in range(48)])
    command = [sys.executable, "-m", "lookahead", "batch", str(source), str(out), "--replicas", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not replicas("MapWorker(") and not (out.exists() and out.read_bytes()):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(replicas("MapWorker")[0], signal.SIGKILL)
    assert process.wait(200) == 0
    check(out, requests)


@alone
@pytest.mark.slow
def test_500_requests_killed_twice(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 500, 2, ["--replicas", "2"])

"""Wrong arguments are told before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import RUN

ROOT = Path(__file__).parents[2]


def fails(*args: str, told: str) -> None:
    ran = subprocess.run([sys.executable, "-c", RUN.format(args=list(args))], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.endswith("status 2\nloaded []\n"), ran.stdout + ran.stderr
    assert told in " ".join(ran.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("generate --magic", "No such option"),
        ("generate --prompt", "requires an argument"),
        ("generate --prompt x --max-new-tokens many", "Invalid value for '--max-new-tokens'"),
        ("generate --prompt x --top-p 0.5", "--top-p needs --sample"),
        ("generate --prompt x --ngram-size 1", "--ngram-size 1 is plain decoding"),
        ("conjure", "No such command 'conjure'"),
        ("chat --model /nowhere", "--model /nowhere does not exist"),
        ("chat --draft /nowhere", "--draft /nowhere does not exist"),
        ("chat --temperature 0 --top-k 3", "--temperature 0 takes the likeliest tokens: drop --top-k"),
        ("serve --chat-template /nowhere", "--chat-template /nowhere cannot be read"),
        ("serve --max-replicas 2", "--max-replicas 2 with --replicas 0"),
        ("bench --prompts /nowhere", "--prompts /nowhere cannot be read"),
        ("bench --questions /nowhere", "--questions /nowhere cannot be read"),
        ("bench --modes warm", "--modes names 'warm'"),
        ("batch /nowhere /out", "/nowhere cannot be read"),
        ("trace --output /nowhere/page.html", "there is no folder /nowhere"),
        ("verify --model lookahead/cli", "lookahead/cli holds no config.json"),
        ("tune --seconds 0", "Invalid value for '--seconds'"),
        ("support --model /nowhere", "--model /nowhere does not exist"),
        ("tree --model lookahead/assets/tiny-coder", "needs --heads"),
        ("convert --kind eagle /nowhere /target", "SOURCE /nowhere does not exist"),
        ("convert --kind mtp /nowhere /target", "--kind mtp: expected one of medusa, eagle, redrafter"),
        ("train-medusa --output heads --data /nowhere", "The data /nowhere does not exist"),
        ("train --kind eagle --output head --layers 0", "num_layers=0"),
        ("train --kind eagle --output head --feature-layers 1,x", "--feature-layers 1,x: expected numbers"),
    ],
)
def test_what_is_wrong_is_told_without_torch(args: str, told: str) -> None:
    fails(*args.split(), told=told)

"""``lookahead tune``: measures, saves and recommends."""

import json
import re
from pathlib import Path

import pytest
from helpers.cli import PROMPT, run

from lookahead import Lookahead, StepTimes, load_model, tuning

SHORT = ["--seconds", 4, "--new-tokens", 8]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text(json.dumps({"prompt": PROMPT, "other": 3}) + "\n\ndef sub(a, b):\n")
    return file


def test_tune_measures_saves_and_recommends(folder: Path, curves: Path, prompt_file: Path) -> None:
    ran = run("tune", "--model", folder, "--prompts", prompt_file, *SHORT)
    assert ran.status == 0 and "Measuring passes over 1 to 128 nodes, for about 2 s: 0%" in ran.err
    assert "Trying 17 sizes of drafts, for about 2 s: 0%" in ran.err
    for heading in ("Latency at about", "Best-first trees on the prompts, greedy", "Lookahead decoding as published"):
        assert heading in ran.words
    assert re.search(r"128 \d+\.\d\d \d+\.\d\d █+", ran.words)
    assert re.search(r"1/4/2 \d+\.\d \d+\.\d\d \d+\.\d\dx", ran.words)
    assert re.search(r"Budget: (\d+ drafted nodes a pass, expected \d+\.\d\dx|none; no draft pays)", ran.words)
    assert re.search(r"W, N, G as published: \d+/\d+/\d+, expected \d+\.\d\dx\.", ran.words)
    files = list(curves.iterdir())
    assert all(StepTimes.load(file).ms(8, 20) > 0.0 for file in files)
    assert sorted(StepTimes.load(file).about["executor"] for file in files) == ["eager", "traced"]
    assert re.search(
        r"Decodes that use this curve model LlamaForCausalLM attention sdpa device cpu .* threads \d+ batch 1 "
        r"weights [\d,]+ in float32 executors traced, eager",
        ran.words,
    )
    assert str(curves) in "".join(ran.out.split())
    assert "These passes are traced" in ran.words


def test_tune_as_json_and_into_a_file(folder: Path, curves: Path, prompt_file: Path, tmp_path: Path) -> None:
    """Calls of ``generate`` read the file that it writes."""
    output = tmp_path / "new" / "curve.json"
    ran = run("tune", "--model", folder, "--prompts", prompt_file, "--json", "--output", output, "--batch", 2, *SHORT)
    assert ran.status == 0
    document = json.loads(ran.out)
    own, traced = map(Path, document["saved"][:2])
    assert set(curves.iterdir()) == {own, traced}
    assert document["saved"][2:] == [str(output)]
    assert json.loads(output.read_text()) == json.loads(traced.read_text()) == document["curve"]
    assert document["plain_ms"] > 0.0
    assert document["applies_to"]["executors"] == ["traced", "eager"]
    assert document["curve"]["about"]["batch"] == 2
    tried = [entry["nodes"] for entry in document["budgets"]]
    assert tried and tried == [4, 8, 16, 24, 32, 48, 64, 96, 128][: len(tried)]
    assert len(tried) + len(document["published"]) + document["left_out"] == 17
    best, recommended = tuning.best(document["published"]), document["recommended"]
    assert all(recommended[size] == best[size] for size in ("window_size", "ngram_size", "verification_set_size"))
    assert Lookahead(tuning=output).step_times() is not None


def test_a_decode_of_a_checkpoint_in_half_precision_finds_its_curve(
    half: Path, curves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and ``generate`` itself agree on what the curve is of."""
    ran = run("tune", "--model", half, "--json", *SHORT)
    saved = set(map(Path, json.loads(ran.out)["saved"]))
    assert saved == set(curves.iterdir())
    assert "bfloat16" in json.loads(ran.out)["applies_to"]["weights"][0]
    read: list[Path] = []
    load = StepTimes.load
    monkeypatch.setattr(StepTimes, "load", lambda file, **settings: read.append(file) or load(file, **settings))
    assert run("generate", "--model", half, "--prompt", PROMPT, "--max-new-tokens", 8).status == 0
    model, tokenizer = load_model(half)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    model.generate(**inputs, max_new_tokens=8, custom_generate=Lookahead(seed=0))
    assert len(read) == 2 and set(read) < saved

"""``lookahead tree``: calibrates, grows, measures, saves and draws."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_tiny_model
from helpers.models import initialised
from transformers import AutoModelForCausalLM, LlamaConfig

from lookahead import DecodingStats, StepTimes, tuning
from lookahead.cli.prompts import PROMPTS
from lookahead.cli.tree import _reached
from lookahead.draft.latency import NODES
from lookahead.heads.medusa.accuracies import CalibratedTree
from lookahead.medusa import ChoiceTree, MedusaHeads, choices_from

LETTERS = 256  # tokens 256 and 257 are the end and the padding
HEADS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt nothing but to write letter t + 1 after letter t, round and round."""
    folder = save_tiny_model(tmp_path_factory.mktemp("clock"))
    config = LlamaConfig.from_pretrained(folder, hidden_size=LETTERS, intermediate_size=8, num_hidden_layers=1)
    model = initialised(config, dtype=torch.float32)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:LETTERS] = torch.eye(LETTERS)
        model.lm_head.weight.zero_()[:LETTERS] = torch.eye(LETTERS).roll(1, dims=0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of that model: the first is always right at rank 0, the others at rank 1."""
    heads = MedusaHeads(LETTERS, 258, num_heads=HEADS, own_output=True)
    with torch.no_grad():
        for head, output in enumerate(heads.outputs):
            right = torch.eye(LETTERS).roll(head + 2, dims=0)
            output.weight.zero_()[:LETTERS] = right + (2 * torch.eye(LETTERS) if head else 0)
    folder = tmp_path_factory.mktemp("heads")
    heads.save_pretrained(folder)
    return folder


@pytest.fixture
def curves(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``save(ms by nodes)`` puts a curve of the model where the commands look for one."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "curves"))

    def save(ms: dict[int, float]) -> Path:
        about = tuning.describe(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        times = StepTimes(about=about)
        for nodes, cost in ms.items():
            times.put(nodes, 64, cost)
        times.save(tuning.cache_file(about))
        return tuning.cache_file(about)

    return save


CHAIN = ((0,), (0, 1), (0, 1, 1))
PER_PASS = HEADS + 1
NEW_TOKENS = 1 + 5 * PER_PASS  # the prompt's pass, and five that keep all that is drafted


def grow(folder: Path, heads: Path, *args: Any) -> Any:
    return run("tree", "--model", folder, "--heads", heads, "--new-tokens", NEW_TOKENS, "--device", "cpu", *args)


def test_tree_calibrates_grows_measures_and_saves(folder: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    ran = grow(folder, heads, "--nodes", 64, "-o", file)
    assert (ran.status, ran.err) == (0, "Calibrating: 0%\nDecoding: 0%\n")
    tree = CalibratedTree.load(file)
    assert tree.choices == choices_from(file) == ChoiceTree(CHAIN)
    counts = tuple(len(PROMPTS) * (NEW_TOKENS - 1 - head) for head in range(HEADS))
    assert tree.accuracies.samples == counts
    assert [row[:2] for row in tree.accuracies.accuracies] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
    assert (tree.model, tree.heads) == (str(folder), str(heads))
    assert f"Heads on greedy texts of {len(PROMPTS)} prompts" in ran.words
    assert f"1 +3 {counts[1]} 0.000 1.000 1.000 1.000" in ran.words
    assert "64 nodes were asked for: no more than 3 are worth anything" in ran.words
    assert "1 1 1.000 1.000 2 1 1.000 1.000 3 1 1.000 1.000" in ran.words
    assert "4.00 tokens a pass expected, 4.00 measured on the same 6 prompts (too few to hold some out)" in ran.words
    assert f"Saved in {file}." in ran.out.replace("\n", "")


def test_tree_measures_on_prompts_that_were_held_out(folder: Path, heads: Path, tmp_path: Path) -> None:
    """As JSON; nothing is saved that was not asked for."""
    (tmp_path / "prompts.txt").write_text("\n".join("abcdefghi"))
    ran = grow(folder, heads, "--prompts", tmp_path / "prompts.txt", "--nodes", 2, "--json")
    document = json.loads(ran.out)
    assert ran.status == 0
    assert document["prompts"] == {"calibrated": 5, "measured": 4, "held_out": True}
    assert document["tree"]["paths"] == [[0], [0, 1]]
    assert document["tree"]["samples"][0] == 5 * (NEW_TOKENS - 1)
    assert (document["widths"], document["reached_expected"], document["budget"]) == ([1, 1], [1.0, 1.0], None)
    assert document["stats"]["emitted"] == 4 * NEW_TOKENS
    assert document["measured_length"] == pytest.approx(sum(document["reached_measured"]))
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.txt"]


def test_tree_calibrates_on_sampled_texts(folder: Path, heads: Path) -> None:
    """Where all letters are about as likely, no head is right as often."""
    arguments = ("--temperature", 50, "--nodes", 4, "--ranks", 50)
    ran, again = grow(folder, heads, *arguments, "--json"), grow(folder, heads, *arguments)
    accuracies = json.loads(ran.out)["tree"]["accuracies"]
    assert sum(accuracies[0]) < 0.9
    assert "texts sampled at temperature 50 of 6 prompts" in again.words
    assert f"{sum(accuracies[0][:10]):.3f}" in again.words, "the same seed, the same texts"


def test_the_size_comes_from_the_curve(folder: Path, heads: Path, curves: Any) -> None:
    file = curves({1: 1e3, 2: 1e3, 4: 1e6, 128: 1e9})
    document = json.loads(grow(folder, heads, "--json").out)
    assert document["tree"]["paths"] == [[0]], "2 tokens in a pass over 2 nodes, which costs what one over 1 does"
    assert document["budget"]["nodes"] == 1
    assert document["budget"]["speedup"] == pytest.approx(2.0, rel=0.1)
    assert document["budget"]["curve"] == f"saved in {file}"
    curves(dict.fromkeys(NODES, 1e3))
    ran = grow(folder, heads)
    assert "Nodes: 3, for which the latency curve promises the most tokens per millisecond" in ran.words
    assert "No tree pays" not in ran.words


def test_a_tree_that_does_not_pay_is_called_so(folder: Path, heads: Path, curves: Any) -> None:
    curves({1: 1e3, 2: 1e5, 4: 1e7, 128: 1e9})
    ran = grow(folder, heads)
    assert ran.status == 0
    assert "No tree pays here: this one is the least loss, and plain decoding is faster." in ran.words


def test_a_curve_is_measured_where_there_is_none(folder: Path, heads: Path, tmp_path: Path, curves: Any) -> None:
    ran = grow(folder, heads, "--seconds", 0.1)
    files = list((tmp_path / "curves").iterdir())
    assert len(files) == 2, "of transformers' passes, by which plain decoding is told, and of traced ones"
    assert any(f"The curve is measured now and saved in {file}." in ran.out for file in files)
    assert "against plain" in ran.words


def test_reached_is_counted_over_passes_without_the_prompts() -> None:
    stats = DecodingStats(row_steps=12, histogram={1: 7, 2: 2, 3: 1, 4: 2})
    assert _reached(stats, 2, 3) == [0.5, 0.3, 0.2]
    assert _reached(stats, 2, 4) == [0.5, 0.3, 0.2, 0.0]
    assert _reached(DecodingStats(), 0, 1) == [0.0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--heads", "/none/at/all"), "--heads /none/at/all does not exist"),
        (("-o", "/none/tree.json"), "--output /none/tree.json: there is no folder /none"),
        (("-o", "/"), "--output / is a folder"),
        (("--prompts", "/none.txt"), "--prompts /none.txt cannot be read"),
        (("--model", "/none/model"), "--model /none/model does not exist"),
        (("--ranks", 999), "ranks=999: expected 1 to 258"),
        (("--new-tokens", 3), "new_tokens=3: expected more than 3"),
        (("--temperature", -1), "temperature=-1.0"),
    ],
)
def test_bad_input_is_one_line(folder: Path, heads: Path, args: tuple[Any, ...], message: str) -> None:
    ran = grow(folder, heads, *args)
    assert (ran.status, ran.out) == (2, "")
    error = ran.err.splitlines()[-1]
    assert error.startswith("Error: ") and message in error


@pytest.mark.parametrize("nodes", [0, -3, 4097, "many"])
def test_nodes_out_of_range_are_usage_errors(heads: Path, nodes: Any) -> None:
    ran = run("tree", "--heads", heads, "--nodes", nodes)
    assert (ran.status, ran.out) == (2, "")
    assert "--nodes" in ran.err


def test_heads_of_another_model(heads: Path, tmp_path: Path) -> None:
    ran = run("tree", "--model", save_tiny_model(tmp_path / "other"), "--heads", heads, "--nodes", 4)
    assert (ran.status, ran.out) == (2, "")
    assert "hidden size of 256" in ran.err

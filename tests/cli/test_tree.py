"""``lookahead tree``: calibrates, grows and saves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_tiny_model
from helpers.models import initialised
from transformers import LlamaConfig

from lookahead.cli.prompts import PROMPTS
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


CHAIN = ((0,), (0, 1), (0, 1, 1))
PER_PASS = HEADS + 1
NEW_TOKENS = 1 + 5 * PER_PASS  # the prompt's pass, and five that keep all that is drafted


def grow(folder: Path, heads: Path, *args: Any) -> Any:
    return run("tree", "--model", folder, "--heads", heads, "--new-tokens", NEW_TOKENS, "--device", "cpu", *args)


def test_tree_calibrates_grows_and_saves(folder: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    ran = grow(folder, heads, "-o", file)
    assert (ran.status, ran.err) == (0, "Calibrating: 0%\n")
    tree = CalibratedTree.load(file)
    assert tree.choices == choices_from(file) == ChoiceTree(CHAIN)
    counts = tuple(len(PROMPTS) * (NEW_TOKENS - 1 - head) for head in range(HEADS))
    assert tree.accuracies.samples == counts
    assert [row[:2] for row in tree.accuracies.accuracies] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
    assert (tree.model, tree.heads) == (str(folder), str(heads))
    assert f"Heads on greedy texts of {len(PROMPTS)} prompts" in ran.words
    assert f"1 +3 {counts[1]} 0.000 1.000 1.000 1.000" in ran.words
    assert "63 nodes were asked for: no more than 3 are worth anything" in ran.words
    assert "3 nodes, 1, 1, 1 by depth: 4.00 tokens a pass expected" in ran.words
    assert f"Saved in {file}." in ran.out.replace("\n", "")


def test_tree_calibrates_on_given_prompts(folder: Path, heads: Path, tmp_path: Path) -> None:
    """As JSON; nothing is saved that was not asked for."""
    (tmp_path / "prompts.txt").write_text("\n".join("abcdefghi"))
    ran = grow(folder, heads, "--prompts", tmp_path / "prompts.txt", "--nodes", 2, "--json")
    document = json.loads(ran.out)
    assert (ran.status, document["prompts"], document["widths"]) == (0, 9, [1, 1])
    assert document["tree"]["paths"] == [[0], [0, 1]]
    assert document["tree"]["samples"][0] == 9 * (NEW_TOKENS - 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.txt"]


def test_tree_calibrates_on_sampled_texts(folder: Path, heads: Path) -> None:
    """Where all letters are about as likely, no head is right as often."""
    arguments = ("--temperature", 50, "--nodes", 4, "--ranks", 50)
    ran, again = grow(folder, heads, *arguments, "--json"), grow(folder, heads, *arguments)
    accuracies = json.loads(ran.out)["tree"]["accuracies"]
    assert sum(accuracies[0]) < 0.9
    assert "texts sampled at temperature 50 of 6 prompts" in again.words
    assert f"{sum(accuracies[0][:10]):.3f}" in again.words, "the same seed, the same texts"


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


def test_heads_of_another_model(heads: Path, tmp_path: Path) -> None:
    ran = run("tree", "--model", save_tiny_model(tmp_path / "other"), "--heads", heads, "--nodes", 4)
    assert (ran.status, ran.out) == (2, "")
    assert "hidden size of 256" in ran.err

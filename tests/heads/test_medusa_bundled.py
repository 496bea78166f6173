"""The bundled heads: complete, small, exact, and of use."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lookahead
from lookahead import Lookahead
from lookahead.bundled import BUNDLED_HEADS
from lookahead.cli import app
from lookahead.cli.prompts import PROMPTS
from lookahead.medusa import CalibratedTree, Medusa, MedusaHeads


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return lookahead.load_bundled()


def test_files_are_few_and_small() -> None:
    assert sum(file.stat().st_size for file in BUNDLED_HEADS.iterdir()) <= 4_000_000
    held = json.loads((BUNDLED_HEADS / "evaluation.json").read_text())
    assert held, "the accuracies that the card tells"
    assert "head 0" in (BUNDLED_HEADS / "README.md").read_text()


def test_heads_and_tree_fit_the_bundled_model(loaded: tuple[Any, Any]) -> None:
    heads = MedusaHeads.from_pretrained(BUNDLED_HEADS, model=loaded[0])
    assert (heads.num_heads, heads.own_output) == (4, False)
    tree = CalibratedTree.load(BUNDLED_HEADS / "tree.json")
    assert Medusa(str(BUNDLED_HEADS)).tree(loaded[0].config.vocab_size) == tree.choices
    assert tree.expected_length > 0.5


@pytest.mark.parametrize("sources", [None, ("heads", "recycling", "suffix")])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_texts_are_plain_ones_in_fewer_passes(loaded: tuple[Any, Any], sources: Any, sampling: dict[str, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    common = {**inputs, **sampling, "max_new_tokens": 48, "return_dict_in_generate": True}
    torch.manual_seed(0)
    plain = model.generate(**common)
    torch.manual_seed(0)
    fixed = {} if sources is None else {"sources": sources, "nodes": 32, "seed": 0}
    ours = model.generate(**common, custom_generate=Medusa(str(BUNDLED_HEADS), **fixed))
    assert torch.equal(plain.sequences, ours.sequences)
    assert ours.stats.mean_acceptance_length > 1.2


@pytest.mark.slow
def test_heads_add_to_the_free_sources(loaded: tuple[Any, Any]) -> None:
    """Tokens a pass at 63 and 64 nodes, greedy, over the command line's prompts."""
    model, tokenizer = loaded
    emitted: dict[str, float] = {}
    for name, strategy in {
        "medusa": Medusa(str(BUNDLED_HEADS)),
        "free": Lookahead(nodes=64, seed=0),
        "combined": Medusa(str(BUNDLED_HEADS), sources=("heads", "recycling", "suffix"), nodes=64, seed=0),
    }.items():
        tokens = passes = 0
        for prompt in PROMPTS[:3]:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            output = model.generate(
                **inputs, max_new_tokens=96, do_sample=False, return_dict_in_generate=True, custom_generate=strategy
            )
            tokens, passes = tokens + output.stats.emitted, passes + output.stats.row_steps
        emitted[name] = tokens / passes
    assert emitted["medusa"] > 2.0, emitted
    assert emitted["combined"] > max(emitted["medusa"], emitted["free"]), emitted


def test_tree_command_takes_the_bundled_heads() -> None:
    asked = ["tree", "--nodes", "8", "--max-new-tokens", "16", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(app, [*asked, "--model", "elsewhere"])
    assert refused.exit_code == 2 and "needs --heads" in refused.output

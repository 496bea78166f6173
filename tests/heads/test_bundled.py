"""The bundled heads: complete, small, exact, and of use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from typer.testing import CliRunner

import lookahead
from lookahead import Lookahead
from lookahead.bundled import BUNDLED_EAGLE, BUNDLED_HEADS
from lookahead.cli import app
from lookahead.cli.arguments import Chat
from lookahead.cli.common import drafting
from lookahead.cli.prompts import PROMPTS
from lookahead.eagle import Eagle, EagleHead
from lookahead.medusa import CalibratedTree, Medusa, MedusaHeads
from lookahead.registry import drafts_with


def test_medusas_files_are_few_and_small() -> None:
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


FIXED: dict[str, Any] = {"nodes": 24, "seed": 0}
STRATEGIES: dict[str, tuple[Any, float]] = {
    "medusa": (Medusa(str(BUNDLED_HEADS)), 1.2),
    "medusa beside others": (Medusa(str(BUNDLED_HEADS), sources=("heads", "recycling", "suffix"), **FIXED), 1.2),
    "eagle": (Eagle(BUNDLED_EAGLE, sources=("eagle",), **FIXED), 1.5),
    "eagle beside others": (Eagle(BUNDLED_EAGLE, **FIXED), 1.5),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_texts_are_plain_ones_in_fewer_passes(loaded: tuple[Any, Any], name: str, sampling: dict[str, Any]) -> None:
    model, tokenizer = loaded
    strategy, least = STRATEGIES[name]
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    common = {**inputs, **sampling, "max_new_tokens": 48, "return_dict_in_generate": True}
    torch.manual_seed(0)
    plain = model.generate(**common)
    torch.manual_seed(0)
    ours = model.generate(**common, custom_generate=strategy)
    assert torch.equal(plain.sequences, ours.sequences)
    assert ours.stats.mean_acceptance_length > least


def test_heads_are_taken_as_an_assistant_and_by_where_they_lie(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """``generate(assistant_model=)`` and ``--draft`` find the strategy of a head."""
    model, tokenizer = loaded
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    common = {**inputs, "do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    plain = model.generate(**common).sequences
    lookahead.augment_all()
    try:
        for kind, folder, source in ((EagleHead, BUNDLED_EAGLE, "eagle"), (MedusaHeads, BUNDLED_HEADS, "heads")):
            head = kind.from_pretrained(folder, model=model)
            ours = model.generate(**common, use_lookahead=True, assistant_model=head)
            assert torch.equal(plain, ours.sequences) and ours.stats.sources[source]
            strategy = drafting(Chat(draft=str(folder)), model, tokenizer)
            assert strategy.sources == (source, "recycling", "suffix") and drafts_with(head) is type(strategy)
    finally:
        lookahead.restore_all()
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysHead"]}')
    refuses("neither a model that is known here nor a head. As medusa: .* As eagle: ", drafts_with, str(tmp_path))


def tokens_per_pass(loaded: tuple[Any, Any], strategy: Any, count: int, **settings: Any) -> float:
    """Over so many of the command line's prompts."""
    model, tokenizer = loaded
    settings |= {"max_new_tokens": 96, "return_dict_in_generate": True, "custom_generate": strategy}
    tokens = passes = 0
    for seed, prompt in enumerate(PROMPTS[:count]):
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        stats = model.generate(**inputs, **settings).stats
        tokens, passes = tokens + stats.emitted, passes + stats.row_steps
    return tokens / passes


@pytest.mark.slow
def test_heads_add_to_the_free_sources(loaded: tuple[Any, Any]) -> None:
    """Tokens a pass at 63 and 64 nodes, greedy, over the command line's prompts."""
    emitted: dict[str, float] = {}
    for name, strategy in {
        "medusa": Medusa(str(BUNDLED_HEADS)),
        "free": Lookahead(nodes=64, seed=0),
        "combined": Medusa(str(BUNDLED_HEADS), sources=("heads", "recycling", "suffix"), nodes=64, seed=0),
    }.items():
        emitted[name] = tokens_per_pass(loaded, strategy, 3, do_sample=False)
    assert emitted["medusa"] > 2.0, emitted
    assert emitted["combined"] > max(emitted["medusa"], emitted["free"]), emitted


def test_tree_command_takes_the_bundled_heads() -> None:
    asked = ["tree", "--nodes", "8", "--max-new-tokens", "16", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(app, [*asked, "--model", "elsewhere"])
    assert refused.exit_code == 2 and "needs --heads" in refused.output


def test_eagles_files_are_few_and_small(loaded: tuple[Any, Any]) -> None:
    assert {file.name for file in BUNDLED_EAGLE.iterdir()} == {
        "README.md",
        "config.json",
        "evaluation.json",
        "model.safetensors",
    }
    assert sum(file.stat().st_size for file in BUNDLED_EAGLE.iterdir()) <= 4_000_000
    held = json.loads((BUNDLED_EAGLE / "evaluation.json").read_text())
    assert held["parts"]["right_0"] > 0.6
    head = EagleHead.from_pretrained(BUNDLED_EAGLE, model=loaded[0])
    assert (head.network.sizes.version, head.network.sizes.base_model) == (3, "tiny-coder")
    assert head.taps(loaded[0]) == ("layer.2", "layer.4", "norm")


@pytest.mark.slow
def test_eagles_head_adds_to_the_free_sources(loaded: tuple[Any, Any]) -> None:
    """Tokens a pass at 24 nodes, temperature 0.8, over the command line's prompts."""
    written: dict[str, float] = {}
    cold: dict[str, Any] = {"nodes": 24, "remember": False, "seed": 0}
    for name, strategy in {"free": Lookahead(**cold), "both": Eagle(BUNDLED_EAGLE, **cold)}.items():
        written[name] = tokens_per_pass(loaded, strategy, 4, do_sample=True, temperature=0.8, top_k=0)
    assert written["both"] > 1.1 * written["free"], written

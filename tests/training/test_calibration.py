"""Accuracies of heads whose ranks are known, trees that no other tree beats, and ``lookahead tree``."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run, save_tiny_model
from helpers.models import F64, VOCAB, counting_model, initialised, prompts, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from jacobi import LookaheadError
from lookahead import DecodingStats, StepTimes, tuning
from lookahead.cli import common
from lookahead.cli.drawing import draw, drawing
from lookahead.cli.tree import _reached
from lookahead.draft.latency import NODES
from lookahead.medusa import ChoiceTree, MedusaHeads, choices_from
from lookahead.sources.medusa.accuracies import (
    CalibratedTree,
    HeadAccuracies,
    best_size,
    expected_length,
    expected_lengths,
    grow_tree,
    node_values,
)
from lookahead.training.calibration import calibrate, heads_ms

Ranks = tuple[int, ...]


def table(*rows: tuple[float, ...]) -> HeadAccuracies:
    return HeadAccuracies(rows, (100,) * len(rows))


def tables(heads: int, ranks: int) -> st.SearchStrategy[HeadAccuracies]:
    """Tables in any order of ranks, with ties and with zeros; only the first head is right at least at times."""
    row = st.tuples(*[st.integers(0, 4)] * ranks).map(lambda counts: tuple(count / (4 * ranks) for count in counts))
    return st.tuples(row.filter(any), *[row] * (heads - 1)).map(lambda rows: table(*rows))


SMALL = st.one_of(tables(1, 4), tables(2, 3), tables(3, 2))


def all_trees(heads: int, ranks: int) -> Iterator[frozenset[Ranks]]:
    """Every prefix-closed set of paths, the empty one too."""
    if not heads:
        yield frozenset()
        return
    below = [None, *all_trees(heads - 1, ranks)]
    for parts in product(below, repeat=ranks):
        tree: set[Ranks] = set()
        for rank, part in enumerate(parts):
            if part is not None:
                tree |= {(rank,), *((rank, *path) for path in part)}
        yield frozenset(tree)


def worth(accuracies: HeadAccuracies, tree: frozenset[Ranks]) -> float:
    return math.fsum(math.prod(accuracies.accuracies[depth][rank] for depth, rank in enumerate(path)) for path in tree)


# --- trees -------------------------------------------------------------------------------------------------------


@examples(60)
@given(SMALL)
def test_no_tree_of_the_same_size_is_worth_more(accuracies: HeadAccuracies) -> None:
    """Against all trees there are, whether or not accuracies fall with the rank."""
    best: dict[int, float] = {}
    for tree in all_trees(len(accuracies.accuracies), len(accuracies.accuracies[0])):
        best[len(tree)] = max(best.get(len(tree), 0.0), worth(accuracies, tree))
    for nodes in range(1, max(best) + 1):
        grown = grow_tree(accuracies, nodes)
        assert len(grown.paths) <= nodes
        assert expected_length(accuracies, grown) == pytest.approx(best[nodes], abs=1e-12)
        assert expected_length(accuracies, grown) == pytest.approx(worth(accuracies, frozenset(grown.paths)))


@examples(60)
@given(st.one_of(SMALL, tables(4, 5)))
def test_larger_budgets_add_to_smaller_trees(accuracies: HeadAccuracies) -> None:
    """And every added node is worth at most as much as the one before."""
    grown = [set(grow_tree(accuracies, nodes).paths) for nodes in range(1, 40)]
    assert all(small <= large for small, large in pairwise(grown))
    lengths = expected_lengths(accuracies, 39)
    assert lengths[0] == 0.0
    gains = [after - before for before, after in pairwise(lengths)]
    assert all(gain > 0.0 for gain in gains)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(gains))
    assert len(lengths) - 1 == len(grown[-1]), "nodes that are worth nothing are left out"
    for nodes, length in enumerate(lengths[1:], start=1):
        assert expected_length(accuracies, grow_tree(accuracies, nodes)) == pytest.approx(length)


def test_ranks_are_taken_by_their_accuracy() -> None:
    accuracies = table((0.1, 0.6, 0.2), (0.0, 0.3, 0.5))
    assert grow_tree(accuracies, 1).paths == ((1,),)
    assert grow_tree(accuracies, 4).paths == ((1,), (2,), (1, 1), (1, 2))
    assert grow_tree(accuracies, 4096).paths == tuple(
        sorted([(0,), (1,), (2,), *product((0, 1, 2), (1, 2))], key=lambda path: (len(path), path))
    )


def test_values_are_products_in_the_order_of_the_paths() -> None:
    accuracies = table((0.5, 0.25), (0.5, 0.125))
    tree = ChoiceTree(((0,), (1,), (0, 0), (1, 1)))
    assert node_values(accuracies, tree) == (0.5, 0.25, 0.25, 0.03125)
    assert expected_length(accuracies, tree) == 1.03125


def test_certain_heads_give_a_chain() -> None:
    accuracies = table(*[(1.0, 0.0)] * 4)
    assert grow_tree(accuracies, 64).paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert expected_lengths(accuracies, 64) == [0.0, 1.0, 2.0, 3.0, 4.0]


@examples(60)
@given(st.one_of(SMALL, tables(4, 5)), st.lists(st.floats(0.1, 10.0), min_size=2, max_size=30))
def test_the_best_size_writes_the_most_per_ms(accuracies: HeadAccuracies, curve: list[float]) -> None:
    size = best_size(accuracies, curve)
    trees = {len(tree.paths): tree for tree in (grow_tree(accuracies, nodes) for nodes in range(1, len(curve)))}
    rates = {nodes: (1.0 + expected_length(accuracies, tree)) / curve[nodes] for nodes, tree in trees.items()}
    assert rates[size] == pytest.approx(max(rates.values()))


def test_the_curve_decides_about_the_size() -> None:
    accuracies = table(*[(0.4, 0.2, 0.1)] * 3)
    flat, steep = [1.0] * 40, [1.0 + node for node in range(40)]
    assert best_size(accuracies, flat) == 39
    assert best_size(accuracies, steep) == 1
    step = [1.0] * 9 + [2.0] * 31
    assert best_size(accuracies, step) == 8, "the last pass size before the step, the root left out"
    assert best_size(accuracies, [ms + 100.0 for ms in steep]) > 1, "costs that every pass has make larger trees pay"


def test_a_table_that_no_tree_can_be_made_of() -> None:
    nothing = table((0.0, 0.0), (1.0, 0.0))
    for make in (lambda: grow_tree(nothing, 5), lambda: best_size(nothing, [1.0] * 5)):
        with pytest.raises(LookaheadError, match="No candidate of the first head was right in 100 samples"):
            make()


@pytest.mark.parametrize("nodes", [0, -1, 4097, 2.0, True])
def test_budgets_out_of_range(nodes: Any) -> None:
    with pytest.raises(LookaheadError, match=r"cannot have .* nodes: expected 1 to 4096"):
        grow_tree(table((0.5,)), nodes)


@pytest.mark.parametrize("curve", [[], [1.0], [1.0, 0.0], [1.0, math.inf], [1.0, math.nan]])
def test_curves_that_are_none(curve: list[float]) -> None:
    with pytest.raises(LookaheadError, match="expected at least 2"):
        best_size(table((0.5,)), curve)


@pytest.mark.parametrize("path", [(0, 0, 0), (2,), (0, 2)])
def test_a_path_beyond_the_table_is_named(path: Ranks) -> None:
    with pytest.raises(LookaheadError, match=rf"Path \[{', '.join(map(str, path))}\] is not covered"):
        expected_length(table((0.5, 0.2), (0.4, 0.1)), ChoiceTree((path,)))


@pytest.mark.parametrize(
    ("rows", "samples", "message"),
    [
        ((), (), "at least one head"),
        (((0.5,), (0.5, 0.1)), (1, 1), r"\[1, 2\] ranks"),
        (((),), (1,), r"\[0\] ranks"),
        (((0.5,),), (1, 1), "samples for 2 heads and accuracies for 1"),
        (((0.5, -0.1),), (1,), "rank 1 of head 0 is -0.1"),
        (((0.5,), (1.5,)), (1, 1), "rank 0 of head 1 is 1.5"),
        (((math.nan,),), (1,), "is nan"),
        (((0.5, 0.6, 0.7),), (1,), r"head 0 sum to 1.8: .* Give each rank's own share"),
    ],
)
def test_impossible_tables(rows: Any, samples: Any, message: str) -> None:
    with pytest.raises(LookaheadError, match=message):
        HeadAccuracies(rows, samples)


def test_top_is_summed_over_ranks() -> None:
    accuracies = table((0.5, 0.25, 0.125), (0.25, 0.0, 0.5))
    assert accuracies.top(1) == (0.5, 0.25)
    assert accuracies.top(2) == (0.75, 0.25)
    assert accuracies.top(9) == (0.875, 0.75)


# --- calibration -------------------------------------------------------------------------------------------------

PERIOD = 7


def ranked_heads(*places: dict[int, int] | int) -> MedusaHeads:
    """Heads for :func:`counting_model`: the token that comes has the given rank, which may depend on the token read."""
    heads = MedusaHeads(VOCAB, VOCAB, num_heads=len(places), own_output=True).to(F64)
    with torch.no_grad():
        for head, place in enumerate(places):
            weight = heads.outputs[head].weight.zero_()
            for token in range(1, PERIOD + 1):
                right = (token + head + 1) % PERIOD + 1
                rank = place if isinstance(place, int) else place[token]
                order = list(range(20, 30))
                order.insert(rank, right)
                for score, other in enumerate(reversed(order), start=1):
                    weight[other, token] = score
    return heads


def counter(end: int | None = None) -> Any:
    model = counting_model(PERIOD).to(F64)
    model.generation_config.eos_token_id = end
    return model


def test_ranks_known_by_construction() -> None:
    """Each head is divided by its own number of samples: one less for each token that it looks further ahead."""
    by_parity = {token: token % 2 for token in range(1, PERIOD + 1)}
    accuracies = calibrate(counter(), ranked_heads(0, 2, by_parity), [[9, 3]], new_tokens=9, ranks=4)
    assert accuracies.samples == (8, 7, 6)
    assert accuracies.accuracies[:2] == ((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    assert accuracies.accuracies[2] == (2 / 6, 4 / 6, 0.0, 0.0), "read at 3 4 5 6 7 1"


def test_samples_of_all_prompts_are_added() -> None:
    by_token = dict.fromkeys(range(1, PERIOD + 1), 1) | {5: 0}
    accuracies = calibrate(counter(), ranked_heads(by_token), [[3], torch.tensor([1, 2, 4])], new_tokens=4, ranks=2)
    assert accuracies.samples == (6,)
    assert accuracies.accuracies == ((2 / 6, 4 / 6),), "read at 3 4 5 and at 4 5 6"


def test_a_text_that_ends_gives_fewer_samples() -> None:
    accuracies = calibrate(counter(end=7), ranked_heads(0, 0, 0), [[3], [6]], new_tokens=30, ranks=1)
    assert accuracies.samples == (3, 2, 1), "4 5 6 7, and 7 alone"
    assert accuracies.accuracies == ((1.0,),) * 3


def test_a_rank_that_is_not_looked_at_counts_as_wrong() -> None:
    assert calibrate(counter(), ranked_heads(2), [[3]], new_tokens=5, ranks=2).accuracies == ((0.0, 0.0),)


def test_texts_too_short_for_a_head() -> None:
    with pytest.raises(LookaheadError, match=r"Head 1 has no sample: every text ended within 2 tokens"):
        calibrate(counter(end=7), ranked_heads(0, 0, 0), [[5], [6]], new_tokens=30)


def random_heads(model: Any, num_heads: int = 3, *, own_output: bool = False) -> MedusaHeads:
    heads = MedusaHeads.for_model(model, num_heads, own_output=own_output)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return heads


def slow_accuracies(model: Any, heads: MedusaHeads, texts: list[list[int]], starts: list[int], ranks: int) -> Any:
    """Place by place, a pass for each prefix."""
    hits, samples = [[0] * ranks for _ in range(heads.num_heads)], [0] * heads.num_heads
    for text, start in zip(texts, starts, strict=True):
        for end in range(start, len(text)):
            prefix = torch.tensor([text[:end]])
            last = model(input_ids=prefix, output_hidden_states=True).hidden_states[-1][0, -1]
            for head in range(heads.num_heads):
                if end + head + 1 < len(text):
                    logits = heads(last, model.get_output_embeddings())[head]
                    order = logits.argsort(descending=True).tolist()
                    samples[head] += 1
                    rank = order.index(text[end + head + 1])
                    if rank < ranks:
                        hits[head][rank] += 1
    shares = [[hit / count for hit in row] for row, count in zip(hits, samples, strict=True)]
    return shares, samples


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_the_table_is_that_of_a_slow_reference(name: str, temperature: float | None) -> None:
    """Of the texts that plain ``generate`` writes, greedy or with the same seed."""
    model = tiny_model(name)
    heads = random_heads(model, own_output=name == "gpt2")
    inputs = [row[mask.bool()] for row, mask in zip(*prompts(3).values(), strict=True)]
    state = torch.get_rng_state()
    accuracies = calibrate(model, heads, inputs, 12, 5, temperature=temperature, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    settings = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    torch.manual_seed(3)
    texts = [model.generate(ids[None], max_new_tokens=12, **settings)[0].tolist() for ids in inputs]
    shares, samples = slow_accuracies(model, heads, texts, [len(ids) for ids in inputs], 5)
    assert list(accuracies.samples) == samples == [33, 30, 27]
    assert [list(row) for row in accuracies.accuracies] == [pytest.approx(row) for row in shares]
    assert sum(map(sum, shares)) > 0.0


def test_many_logits_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    whole = calibrate(model, heads, [[5, 6, 7]], 20)
    asked = []
    top = heads.top

    def watch(hidden: Any, output: Any, count: int) -> Any:
        asked.append(len(hidden))
        return top(hidden, output, count)

    monkeypatch.setattr(heads, "top", watch)
    monkeypatch.setattr("lookahead.training.calibration._LOGITS", 4 * 3 * VOCAB)
    assert calibrate(model, heads, [[5, 6, 7]], 20) == whole
    assert asked == [4, 4, 4, 4, 3]


def test_calibration_leaves_the_model_as_it_was_and_tells_how_far_it_is() -> None:
    model = tiny_model("llama")
    shares: list[float] = []
    calibrate(model, random_heads(model), [[1], [2]], 6, report=shares.append)
    assert shares == [0.5, 1.0]
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1], []]}, "Prompt 1 is not a sequence of token ids"),
        ({"prompts": [[VOCAB]]}, f"from 0 to {VOCAB - 1}"),
        ({"prompts": [[-1]]}, "Prompt 0"),
        ({"prompts": [[0.5]]}, "Prompt 0"),
        ({"prompts": ["text"]}, "Prompt 0 is 'text': expected token ids"),
        ({"prompts": [torch.ones(2, 2, dtype=torch.long)]}, "Prompt 0"),
        ({"ranks": 0}, "ranks=0: expected 1 to 48"),
        ({"ranks": VOCAB + 1}, "ranks=49"),
        ({"new_tokens": 3}, "new_tokens=3: expected more than 3"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"heads": MedusaHeads(16, VOCAB)}, "hidden size"),
        ({"heads": MedusaHeads(32, 99)}, "vocabulary"),
    ],
)
def test_bad_input_is_refused_before_any_pass(changes: dict[str, Any], message: str, passes: Any) -> None:
    model = tiny_model("llama")
    seen = passes(model)
    settings = {"heads": random_heads(model), "prompts": [[1, 2]]} | changes
    with pytest.raises(LookaheadError, match=message):
        calibrate(model, **settings)
    assert seen == []


def test_the_heads_take_time() -> None:
    model = tiny_model("llama")
    assert 0.0 < heads_ms(model, random_heads(model), 5) < 1e4


# --- files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def grown() -> CalibratedTree:
    accuracies = HeadAccuracies(((0.5, 0.1, 0.2), (0.3, 0.2, 0.0)), (40, 39))
    return CalibratedTree(choices=grow_tree(accuracies, 6), accuracies=accuracies, model="m", heads="h")


def test_a_tree_is_saved_and_read_back(grown: CalibratedTree, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    grown.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["tree.json"]
    assert CalibratedTree.load(file) == grown
    assert choices_from(file) == choices_from(str(file)) == choices_from(grown) == grown.choices
    document = json.loads(file.read_text())
    assert document == {
        "format": 1,
        "kind": "lookahead-medusa-tree",
        "paths": [list(path) for path in grown.choices.paths],
        "accuracies": [[0.5, 0.1, 0.2], [0.3, 0.2, 0.0]],
        "samples": [40, 39],
        "expected_length": pytest.approx(0.5 + 0.2 + 0.15 + 0.1 + 0.1 + 0.06),
        "model": "m",
        "heads": "h",
    }


def test_a_tree_that_cannot_be_written(grown: CalibratedTree, tmp_path: Path) -> None:
    with pytest.raises(LookaheadError, match="cannot be written"):
        grown.save(tmp_path / "none" / "tree.json")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ({"format": 2}, "has format 2: expected 1"),
        ({"kind": "other"}, "has kind 'other'"),
        ({"paths": []}, "empty"),
        ({"accuracies": None}, "no valid table"),
        ({"accuracies": [[0.5, "x"]], "samples": [1]}, "no valid table"),
        ({"accuracies": [[0.5, 0.9]], "samples": [1]}, "sum to 1.4"),
        ({"samples": [1]}, "samples for 1 heads"),
        ({"paths": [[0], [7]]}, r"Path \[7\] is not covered"),
    ],
)
def test_tree_files_that_are_not_taken(
    grown: CalibratedTree, tmp_path: Path, harm: dict[str, Any], message: str
) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(grown.to_dict() | harm))
    with pytest.raises(LookaheadError, match=message):
        CalibratedTree.load(file)


# --- the command -------------------------------------------------------------------------------------------------

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
    assert (ran.status, ran.err) == (0, "")
    tree = CalibratedTree.load(file)
    assert tree.choices == choices_from(file) == ChoiceTree(CHAIN)
    counts = tuple(len(common.PROMPTS) * (NEW_TOKENS - 1 - head) for head in range(HEADS))
    assert tree.accuracies.samples == counts
    assert [row[:2] for row in tree.accuracies.accuracies] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]
    assert (tree.model, tree.heads) == (str(folder), str(heads))
    assert f"Heads on greedy texts of {len(common.PROMPTS)} prompts" in ran.words
    assert f"1 +3 {counts[1]} 0.000 1.000 1.000 1.000" in ran.words
    assert "64 nodes were asked for: no more than 3 are worth anything" in ran.words
    assert "1 1 1.000 1.000 2 1 1.000 1.000 3 1 1.000 1.000" in ran.words
    assert "4.00 tokens a pass expected, 4.00 measured on the same 6 prompts (too few to hold some out)" in ran.words
    assert "└── 0 1.000 └── 1 1.000 └── 1 1.000" in ran.words
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
    assert "Nodes: 3, with which the step-time curve promises the most tokens per millisecond" in ran.words
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


def test_the_tree_in_text() -> None:
    """Nodes with children have a line each, the others share one."""
    accuracies = table((0.5, 0.25, 0.125), (0.5, 0.25, 0.0))
    grown = CalibratedTree(choices=grow_tree(accuracies, 6), accuracies=accuracies)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(drawing(grown))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines[1:] == [
        "├── 0 0.500",
        "│   └── 0 0.250, 1 0.125",
        "├── 1 0.250",
        "│   └── 0 0.125",
        "└── 2 0.125",
    ]


def test_a_large_tree_in_text_names_what_it_leaves_out() -> None:
    accuracies = table(*[(0.3, 0.2, 0.1, 0.1, 0.1)] * 4)
    grown = CalibratedTree(choices=grow_tree(accuracies, 500), accuracies=accuracies)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(drawing(grown))
    assert len(captured.get().splitlines()) < 120
    assert " below)" in captured.get()


def test_the_tree_as_a_picture(folder: Path, heads: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "tree.png"
    assert grow(folder, heads, "--nodes", 3, "--picture", file).status == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    accuracies = table(*[(0.3, 0.2, 0.1)] * 4)
    draw(CalibratedTree(choices=grow_tree(accuracies, 64), accuracies=accuracies), tmp_path / "tree.svg")
    text = (tmp_path / "tree.svg").read_text()
    assert text.count("<!-- 2 -->") >= sum(path[-1] == 2 for path in grow_tree(accuracies, 64).paths) > 0


def test_a_picture_without_matplotlib(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = run("tree", "--heads", heads, "--picture", tmp_path / "a.png")
    assert (ran.status, ran.out) == (2, "")
    assert "--picture needs matplotlib, which is not installed: pip install 'lookahead-decoding[bench]'" in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--heads", "/none/at/all"), "--heads /none/at/all does not exist"),
        (("-o", "/none/tree.json"), "--output /none/tree.json: there is no folder /none"),
        (("-o", "/"), "--output / is a folder"),
        (("--picture", "/none/a.png"), "--picture /none/a.png: there is no folder"),
        (("--picture", "tree.jpeg"), "ends in .png, .svg, .pdf"),
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
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


@pytest.mark.parametrize("nodes", [0, -3, 4097, "many"])
def test_nodes_out_of_range_are_usage_errors(heads: Path, nodes: Any) -> None:
    ran = run("tree", "--heads", heads, "--nodes", nodes)
    assert (ran.status, ran.out) == (2, "")
    assert "--nodes" in ran.err


def test_heads_of_another_model(heads: Path, tmp_path: Path) -> None:
    ran = run("tree", "--model", save_tiny_model(tmp_path / "other"), "--heads", heads, "--nodes", 4)
    assert (ran.status, ran.out) == (2, "")
    assert "hidden size of 256" in ran.err

"""Accuracies of heads whose ranks are known, trees that no other tree of their size beats, and trees in files."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.medusa import random_heads
from helpers.models import F64, VOCAB, counting_model, prompts, tiny_model
from helpers.refusals import refuses
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from lookahead.heads.medusa.accuracies import CalibratedTree, HeadAccuracies, expected_length, grow_tree
from lookahead.heads.medusa.calibration import calibrate
from lookahead.medusa import ChoiceTree, MedusaHeads, choices_from

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
    lengths = [0.0, *(expected_length(accuracies, ChoiceTree(tuple(paths))) for paths in grown)]
    gains = [after - before for before, after in pairwise(lengths[: 1 + len(grown[-1])])]
    assert all(gain > 0.0 for gain in gains), "nodes that are worth nothing are left out"
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(gains))


def test_ranks_are_taken_by_their_accuracy() -> None:
    accuracies = table((0.1, 0.6, 0.2), (0.0, 0.3, 0.5))
    assert grow_tree(accuracies, 1).paths == ((1,),)
    assert grow_tree(accuracies, 4).paths == ((1,), (2,), (1, 1), (1, 2))
    assert grow_tree(accuracies, 4096).paths == tuple(
        sorted([(0,), (1,), (2,), *product((0, 1, 2), (1, 2))], key=lambda path: (len(path), path))
    )


def test_tables_budgets_and_paths_that_fit_no_tree() -> None:
    nothing = table((0.0, 0.0), (1.0, 0.0))
    refuses("No candidate of the first head was right in 100 samples", grow_tree, nothing, 5)
    for nodes in (0, -1, 4097, 2.0, True):
        refuses(r"cannot have .* nodes: expected 1 to 4096", grow_tree, table((0.5,)), nodes)
    for path in ((0, 0, 0), (2,), (0, 2)):
        message = rf"Path \[{', '.join(map(str, path))}\] is not covered"
        refuses(message, expected_length, table((0.5, 0.2), (0.4, 0.1)), ChoiceTree((path,)))


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
    refuses(message, HeadAccuracies, rows, samples)


def test_top_is_summed_over_ranks() -> None:
    accuracies = table((0.5, 0.25, 0.125), (0.25, 0.0, 0.5))
    assert accuracies.top(1) == (0.5, 0.25)
    assert accuracies.top(2) == (0.75, 0.25)
    assert accuracies.top(9) == (0.875, 0.75)


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


def test_a_text_that_ends_gives_fewer_samples() -> None:
    accuracies = calibrate(counter(end=7), ranked_heads(0, 0, 0), [[3], [6]], new_tokens=30, ranks=1)
    assert accuracies.samples == (3, 2, 1), "4 5 6 7, and 7 alone"
    assert accuracies.accuracies == ((1.0,),) * 3
    message = r"Head 1 has no sample: every text ended within 2 tokens"
    refuses(message, calibrate, counter(end=7), ranked_heads(0, 0, 0), [[5], [6]], new_tokens=30)


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
    monkeypatch.setattr("lookahead.heads.medusa.calibration.MOST_LOGITS", 4 * 3 * VOCAB)
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
    refuses(message, calibrate, model, **settings)
    assert seen == []


@pytest.fixture
def grown() -> CalibratedTree:
    accuracies = HeadAccuracies(((0.5, 0.1, 0.2), (0.3, 0.2, 0.0)), (40, 39))
    return CalibratedTree(choices=grow_tree(accuracies, 6), accuracies=accuracies, model="m", heads="h")


def test_a_tree_is_saved_and_read_back(grown: CalibratedTree, tmp_path: Path) -> None:
    refuses("cannot be written", grown.save, tmp_path / "none" / "tree.json")
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


@pytest.mark.parametrize(
    ("harm", "message"),
    [
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
    refuses(message, CalibratedTree.load, file)

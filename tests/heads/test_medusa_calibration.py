"""Calibration: accuracies of heads whose ranks are known, and trees in files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.medusa import random_heads
from helpers.models import F64, VOCAB, counting_model, prompts, tiny_model

from jacobi import LookaheadError
from lookahead.heads.medusa.accuracies import CalibratedTree, HeadAccuracies, grow_tree
from lookahead.heads.medusa.calibration import calibrate
from lookahead.medusa import MedusaHeads, choices_from

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


def test_texts_too_short_for_a_head() -> None:
    with pytest.raises(LookaheadError, match=r"Head 1 has no sample: every text ended within 2 tokens"):
        calibrate(counter(end=7), ranked_heads(0, 0, 0), [[5], [6]], new_tokens=30)


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
    with pytest.raises(LookaheadError, match=message):
        calibrate(model, **settings)
    assert seen == []


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

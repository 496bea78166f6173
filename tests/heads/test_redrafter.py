"""Recurrent heads: files, beams, losses, what they compute, and texts that stay plain decoding's."""

import dataclasses
import itertools
import json
import random
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafting import Told, questions, with_few_hidden_states
from helpers.hybrids import hybrid
from helpers.models import VOCAB, counting_model, fresh_model, prompts, same_as_plain, successor_model, tiny_model
from helpers.redrafter import KINDS, apple_tensors, knowing_head, random_head, write_head
from helpers.refusals import refuses
from helpers.training import batch as texts_with_labels
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu

from jacobi import LookaheadError, Path
from jacobi import Path as TreePath
from lookahead.heads.redrafter.head import RecurrentPasses
from lookahead.heads.redrafter.strategy import CANDIDATES, beam_search
from lookahead.heads.redrafter.training import TrainedRecurrent
from lookahead.models.output_layer import beside
from lookahead.redrafter import RecurrentHead, ReDrafter, ReDrafterSettings
from lookahead.training.data import IGNORE
from lookahead.training.drafter import BesideModel

pytestmark = pytest.mark.usefixtures("augmented")


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_read_as_they_were_written(kind: str, binary: bool, tmp_path: FilePath) -> None:
    head = random_head(**KINDS[kind])
    folder = write_head(tmp_path / "theirs", head, binary=binary)
    read = RecurrentHead.from_pretrained(folder, model=tiny_model("llama"))
    assert read.sizes == head.sizes
    read.save_pretrained(tmp_path / "ours")
    again = RecurrentHead.from_pretrained(tmp_path / "ours")
    for each in (read, again):
        tensors, expected = apple_tensors(each), apple_tensors(head)
        assert tensors.keys() == expected.keys() == each.state_dict().keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "ours", folder))
    assert theirs.items() <= ours.items()


def test_tensors_decide(tmp_path: FilePath) -> None:
    """Whatever config.json says, or if there is none."""
    head = random_head(**KINDS["rnn projected"])
    folder = write_head(tmp_path, head)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 3, "exit_dim": 7, "num_draft_layers": 9}))
    assert RecurrentHead.from_pretrained(folder).sizes == head.sizes
    (folder / "config.json").unlink()
    assert RecurrentHead.from_pretrained(folder / "model.safetensors").sizes == head.sizes


def naive(tensors: dict[str, Tensor], hidden: Tensor, tokens: list[int], embed: Any) -> Tensor:
    """Scores of what follows ``tokens``, from nothing, by the tensors themselves."""
    state = torch.zeros_like(hidden)
    for token in tokens:
        embedded = embed(torch.tensor(token))
        if "rnn_u.weight" in tensors:
            turned = linear(state, tensors["rnn_u.weight"], tensors["rnn_u.bias"])
            state = silu(linear(embedded, tensors["rnn_w.weight"]) + turned)
        else:
            state = state + embedded
    joined = torch.cat([hidden, state])
    if "input_proj.weight" in tensors:
        joined = linear(joined, tensors["input_proj.weight"], tensors["input_proj.bias"])
    layer = 0
    while f"lm_head.{layer}.linear.weight" in tensors:
        names = (f"lm_head.{layer}.linear.weight", f"lm_head.{layer}.linear.bias")
        joined = joined + silu(linear(joined, *(tensors[name] for name in names)))
        layer += 1
    return linear(joined, tensors[f"lm_head.{layer}.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_text(kind: str) -> None:
    """After any sequence of questions and texts the head says what it says from scratch."""
    head, rng = random_head(**KINDS[kind]), random.Random(1)
    tensors, embed = apple_tensors(head), fresh_model("llama").get_input_embeddings()
    torch.manual_seed(0)
    for _ in range(4):
        features = torch.randn(2, 1, 32, dtype=torch.float64)
        passes = RecurrentPasses(head, lambda: features, 1, embed, VOCAB)  # noqa: B023
        root, hidden = rng.randrange(VOCAB), features[1, 0]
        passes.start([1, 2, 3])
        passes.write(Path([0], [root]))
        for _ in range(5):
            for branch, said in questions(passes, rng):
                with torch.no_grad():
                    scores = naive(tensors, hidden, [root, *branch], embed)
                tokens, logits = said or ([], [])
                expected = scores[torch.tensor(tokens)].float()
                torch.testing.assert_close(expected, torch.tensor(logits), atol=1e-5, rtol=1e-5)
                assert float(expected[0]) == pytest.approx(float(scores.max()))
            nodes, new = sorted(rng.sample(range(5), rng.randint(1, 3))), [rng.randrange(VOCAB) for _ in range(3)]
            features = torch.randn(2, 5, 32, dtype=torch.float64)
            passes.write(Path(nodes, new[: len(nodes)]))
            root, hidden = new[len(nodes) - 1], features[1, nodes[-1]].clone()
            features[:] = torch.nan  # the next pass may write where this one did


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_change(kind: str) -> None:
    model, head = tiny_model("llama"), random_head(**KINDS[kind])
    beams = ReDrafter(head, tree="beam", beam_width=4, beam_length=4)
    for batch, sample in ((1, True), (3, False)):
        for strategy in (ReDrafter(head, nodes=8, seed=0, sources=("redrafter",)), ReDrafter(head), beams):
            settings = {"do_sample": sample, "max_new_tokens": 24, "eos_token_id": [5, 6], "output_scores": True}
            output = same_as_plain(model, prompts(batch), strategy, **settings)
        assert output.stats.drafted > 10


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rnn", [True, False], ids=["rnn", "sums"])
def test_a_head_that_knows_the_model_is_right_to_the_end(rnn: bool, sample: bool) -> None:
    """Wired so that it gives what the model does, it has every draft accepted to full depth."""
    follows = {token: token % 7 + 1 for token in range(VOCAB)}
    head = knowing_head(follows, rnn)
    for batch in (1, 3):
        strategy = ReDrafter(head, tree="beam", beam_width=3, beam_length=5)
        settings = {"do_sample": sample, "max_new_tokens": 61, "top_k": 1 if sample else None}
        output = same_as_plain(counting_model(), prompts(batch), strategy, **settings)
        assert output.stats.steps == 13, "the prompt's pass, and twelve with four drafted tokens and one more"


def test_an_automatic_tree_is_as_deep_as_the_head_is_right() -> None:
    follows = {token: (token * 5 + 1) % VOCAB for token in range(VOCAB)}
    strategy = ReDrafter(knowing_head(follows, rnn=True), nodes=5, seed=0, sources=("redrafter",))
    output = same_as_plain(successor_model(follows), prompts(1), strategy, max_new_tokens=60)
    assert output.stats.steps <= 2 + 59 / 5, "every pass but the first ones keeps five drafted tokens"
    assert output.stats.sources["redrafter"]


def test_prompts_of_which_few_hidden_states_are_seen() -> None:
    """Drafts are as good as ever."""
    head = knowing_head({token: token % 7 + 1 for token in range(VOCAB)}, rnn=True)
    strategy = ReDrafter(head, tree="beam", beam_width=2)
    outputs = with_few_hidden_states(counting_model(), strategy, max_new_tokens=41)
    assert [output.stats.steps for output in outputs] == [9, 9, 9]


@pytest.mark.parametrize("family", ["mamba2", "zaya"])
def test_a_recurrent_model_is_given_one_branch(family: str) -> None:
    model = hybrid(family)
    head = random_head(hidden_size=48)
    for batch in (1, 2):
        for strategy in (ReDrafter(head, tree="beam", beam_length=4), ReDrafter(head, nodes=3)):
            output = same_as_plain(model, prompts(batch, ragged=False), strategy, max_new_tokens=30)
            assert not output.stats.plain
            assert output.stats.drafted > 10


def test_a_head_in_a_folder_computes_as_its_model_does(tmp_path: FilePath) -> None:
    """A copy for each model, which goes with it; a head in memory is the caller's, and stays as it is."""
    head, model = random_head().float(), fresh_model("llama")
    strategy = ReDrafter(write_head(tmp_path / "head", head), nodes=4)
    for each in (model, fresh_model("llama").float(), model):
        same_as_plain(each, prompts(1), strategy, max_new_tokens=8)
        copy = beside(each, strategy._read)
        assert {weight.dtype for weight in copy.parameters()} == {each.dtype}
        assert beside(each, strategy._read) is copy
    same_as_plain(model, prompts(1), ReDrafter(head, nodes=4), max_new_tokens=8)
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}


def test_settings_as_a_dict(tmp_path: FilePath) -> None:
    folder = write_head(tmp_path / "head", random_head())
    settings = {"strategy": "redrafter", "head": str(folder), "tree": "beam", "beam_width": 2}
    same_as_plain(tiny_model("llama"), prompts(2), settings, max_new_tokens=12)
    assert ReDrafter(folder).to_dict() == ReDrafter.from_dict(ReDrafter(folder).to_dict()).to_dict()


def test_broken_files(tmp_path: FilePath) -> None:
    head = random_head(**KINDS["rnn projected"])

    def refused(match: str, name: str, **changes: Any) -> None:
        folder = write_head(tmp_path / name, head, **changes)
        refuses(match, RecurrentHead.from_pretrained, folder)

    refused("lacks rnn_w.weight", "missing", rnn_w__weight=None)
    refused("lacks lm_head.1.linear.bias", "bias", lm_head__1__linear__bias=None)
    refused("has heads.0 besides", "foreign", heads__0=torch.ones(2))
    refused("is no ReDrafter head: .* as lm_head.2.weight; it has input_proj.bias", "none", lm_head__2__weight=None)
    refused(r"rnn_u.bias is \[3\], expected \[32\]", "shape", rnn_u__bias=torch.ones(3))
    refused("rnn_u.bias holds torch.float64 or infinite", "nan", rnn_u__bias=torch.full((32,), torch.nan).double())
    refused("rnn_u.bias holds torch.int64", "whole", rnn_u__bias=torch.ones(32, dtype=torch.long))
    refused("reads 63 channels, expected twice", "odd", input_proj__weight=torch.ones(24, 63))
    left = {"rnn_u__weight": None, "rnn_u__bias": None, "rnn_w__weight": None}
    refused("config.json says rnn, and it lacks rnn_u and rnn_w", "rnn", **left)

    with torch.no_grad():
        head.weight[0, 0] = torch.inf
    with pytest.raises(LookaheadError, match=r"The head is broken: lm_head.2.weight holds NaN or infinite numbers"):
        head.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_heads_of_other_models(tmp_path: FilePath) -> None:
    for head, match in (
        (random_head(hidden_size=16), "reads hidden states of size 16, and Llama.* has 32"),
        (random_head(vocab_size=40), "scores a vocabulary of 40, and Llama.* has 48"),
    ):
        folder = write_head(tmp_path / match[:6], head)
        refuses(match, RecurrentHead.from_pretrained, folder, model=tiny_model("llama"))
        refuses(match, ReDrafter(folder).check, tiny_model("llama"))


def test_settings() -> None:
    head = random_head()
    for settings, match in (
        ({"tree": "trunk"}, "tree=.* must be one of 'beam'"),
        ({"tree": "beam", "nodes": 4}, "nodes=.* belongs to the automatic mode: got tree='beam'"),
        ({"beam_width": 0}, "beam_width=.* must be at least 1"),
        ({"beam_length": 1}, "beam_length=.* must be at least 2"),
        ({"sources": ("suffix",)}, "must name 'redrafter'"),
    ):
        refuses(match, ReDrafter, head, **settings)
    refuses(r"ReDrafter\(head=\) must be a RecurrentHead", ReDrafter, 3)
    refuses("does not exist", ReDrafter, "nowhere")
    assert ReDrafter(head, nodes=4).to_dict()["head"] == "RecurrentHead"


def drawn(tree: Any) -> list[str]:
    """The tree's leaves, spelt."""
    leaves = [node for node, below in enumerate(tree.children) if not below]
    return sorted("".join(chr(tree.tokens[node]) for node in tree.path(leaf)[1:]) for leaf in leaves)


def log(*chances: float) -> tuple[float, ...]:
    return tuple(float(np.log(chance)) for chance in chances)


SAID = {
    (): ("ax", log(0.9, 0.1)),
    ("a",): ("be", log(0.6, 0.4)),
    ("x",): ("y", log(1.0)),
    ("a", "b"): ("cd", log(0.7, 0.3)),
    ("a", "e"): ("fg", log(0.8, 0.2)),
    ("x", "y"): ("z", log(1.0)),
}


def test_what_beams_begin_with_is_merged() -> None:
    """After one token a 0.9, x 0.1; after two ab 0.54, ae 0.36, xy 0.1; then abc 0.378, aef 0.288, abd 0.162."""
    passes = Told(SAID)
    tree = beam_search(0, passes, room=9, width=3, length=4)
    assert drawn(tree) == ["abc", "abd", "aef"]
    assert len(tree) == 1 + 6, "nine tokens of three beams are six nodes"
    assert passes.asked == [[""], ["a", "x"], ["ab", "ae", "xy"]], "the first step starts from one beam"


def test_scores_are_of_likely_tokens_alone() -> None:
    """Logits count from the best one, and the first fifty are all there are: two alike have one half each."""
    few = {(): ("ab", (7.0, 7.0)), ("a",): ("c", (-3.0,)), ("b",): ("de", (9.0, 9.0))}
    assert drawn(beam_search(0, Told(few), room=9, width=1, length=3)) == ["ac"]
    many = "".join(chr(300 + place) for place in range(60))
    tree = beam_search(0, Told({(): (many, (0.0,) * 60)}), room=9, width=60, length=2)
    assert len(tree) == 1 + CANDIDATES


def test_a_tree_is_as_deep_as_there_is_room() -> None:
    assert drawn(beam_search(0, Told(SAID), room=1, width=3, length=4)) == ["a", "x"]
    assert len(beam_search(0, Told(SAID), room=0, width=10, length=5)) == 1
    assert len(beam_search(0, Told({}), room=5, width=10, length=5)) == 1
    assert drawn(beam_search(0, Told(SAID), room=9, chain=True, width=3, length=4)) == ["abc"]


def test_wide_beams_find_the_likeliest_of_all_branches() -> None:
    rng = np.random.default_rng(0)
    table: dict[Any, Any] = {}
    for depth in range(3):
        for branch in itertools.product("abcd", repeat=depth):
            logits = np.sort(rng.normal(size=4))[::-1]
            table[branch] = ("".join(rng.permutation(list("abcd"))), tuple(logits - np.log(np.exp(logits).sum())))
    sums = {
        word: sum(dict(zip(*table[tuple(word[:end])], strict=True))[word[end]] for end in range(3))
        for word in map("".join, itertools.product("abcd", repeat=3))
    }
    best = sorted(sums, key=lambda word: -sums[word])[:16]
    assert drawn(beam_search(0, Told(table), room=9, width=16, length=4)) == sorted(best)


SETTINGS = ReDrafterSettings(unroll=2, block_size=12, batch_size=2, epochs=1.0, min_steps=0, learning_rate=1e-3)


@pytest.mark.parametrize("targets", ["tokens", "model"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_what_the_head_says_when_it_drafts(kind: str, targets: Any) -> None:
    """Step s at token i scores token i + 2 + s, having read the model at i and tokens i + 1 to i + 1 + s."""
    model, head = fresh_model("llama"), random_head(**KINDS[kind])
    settings = dataclasses.replace(SETTINGS, unroll=3, targets=targets)
    given = texts_with_labels()
    learner = BesideModel(model, TrainedRecurrent(head, settings), 1.0)
    loss = learner(**given)["loss"]
    total = torch.zeros(())
    seen = learner.look(**given)
    for step in range(3):
        each, right = [], []
        for row, (line, labels) in enumerate(zip(seen.tokens.tolist(), seen.labels, strict=True)):
            for place in range(len(line) - 2 - step):
                wanted = int(labels[place + 2 + step])
                if wanted == IGNORE:
                    continue
                states = seen.states["last"][row : row + 1, place : place + 1]
                passes = RecurrentPasses(head, lambda states=states: states, 0, model.get_input_embeddings(), 48)
                passes.write(TreePath([0], [line[place + 1]]))
                (said,) = passes.after([tuple(line[place + 2 : place + 2 + step])])
                scores = torch.zeros(48).scatter(0, torch.tensor(said[0]), torch.tensor(said[1]))
                target = torch.tensor(wanted)
                if targets == "model":
                    target = seen.logits[row, place + 1 + step].float().softmax(-1)
                each.append(cross_entropy(scores, target))
                right.append(float(said[0][0] == wanted))
        assert learner.parts[f"loss_{step}"].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)
        assert learner.parts[f"right_{step}"].item() == pytest.approx(sum(right) / len(right))
        total += torch.stack(each).mean()
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)

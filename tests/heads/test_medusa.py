"""The Medusa strategy through ``generate``: plain decoding's text whatever the heads say, and what heads are worth."""

import copy
import gc
import json
import time
import weakref
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.automatic import FLAT, STEEP, memory_of
from helpers.medusa import COMBINED, SMALL, counting, fitted, random_heads
from helpers.models import F32, VOCAB, fresh_model, initialised, prompts, run, same_as_plain, tiny_model
from helpers.refusals import Passes, refused, refuses
from transformers import GPT2Config, MambaConfig, MambaForCausalLM

from jacobi import LookaheadError
from lookahead import Lookahead
from lookahead.medusa import ChoiceTree, Medusa, MedusaHeads, choices_from, output_layer
from lookahead.registry import strategy_from

pytestmark = pytest.mark.usefixtures("augmented")


def test_settings_as_plain_data(tmp_path: FilePath) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    heads.save_pretrained(tmp_path)
    for strategy in (
        Medusa(str(tmp_path)),
        Medusa(tmp_path, "vicuna_7b_stage2", static=True) if heads.num_heads > 3 else Medusa(tmp_path, [2, 2]),
        Medusa(str(tmp_path), SMALL, acceptance="typical", posterior_threshold=0.2, posterior_alpha=0.5),
        Medusa(str(tmp_path), [3, 2], acceptance="nucleus", top_p=0.5, stats="detailed"),
        Medusa(str(tmp_path), sources=COMBINED, nodes=9, remember=False, tuning=FLAT),
    ):
        data = json.loads(json.dumps(strategy.to_dict()))
        again = Medusa.from_dict(data)
        assert again.to_dict() == strategy.to_dict() == data
        assert strategy_from(data).to_dict() == data
        assert again.acceptance == strategy.acceptance and again.choices == strategy.choices
        same_as_plain(model, prompts(1), data, max_new_tokens=12)
    assert Medusa(str(tmp_path)) == Medusa(tmp_path) != Medusa(tmp_path, SMALL)
    assert len({Medusa(tmp_path), Medusa(str(tmp_path)), Medusa(tmp_path, SMALL)}) == 2
    data = Medusa(heads, SMALL).to_dict()
    assert data["heads"] == "MedusaHeads" and json.dumps(data)


def test_heads_are_not_copied() -> None:
    """``generate`` copies its settings in every call; weights must not be among them."""
    strategy = Medusa(random_heads(tiny_model("llama")))
    assert copy.deepcopy(strategy) is strategy
    assert copy.deepcopy({"s": [strategy]})["s"][0].heads is strategy.heads


def test_a_folder_is_read_once(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until what lies there changes; beside a model of another dtype it is moved, not read again."""
    model = tiny_model("llama")
    random_heads(model).save_pretrained(tmp_path)
    reads: list[str] = []
    read = MedusaHeads.from_pretrained
    monkeypatch.setattr(MedusaHeads, "from_pretrained", lambda folder: reads.append(folder) or read(folder))
    strategy = Medusa(tmp_path, SMALL)
    for _ in range(2):
        same_as_plain(model, prompts(1), strategy, max_new_tokens=9)
    half = initialised(model.config, dtype=F32)
    same_as_plain(half, prompts(1), Medusa(tmp_path, SMALL), max_new_tokens=9)
    assert strategy.heads_for(half).blocks[0][0].linear.weight.dtype is F32
    assert strategy.heads_for(model).blocks[0][0].linear.weight.dtype is model.dtype
    assert reads == [str(tmp_path)]


@pytest.mark.parametrize("sources", [None, ("heads", "suffix")])
def test_heads_live_as_long_as_somebody_holds_them(tmp_path: FilePath, sources: tuple[str, ...] | None) -> None:
    """Nothing in the library outlives the strategy that read them, whatever device or dtype they were moved to."""
    model = tiny_model("llama")
    random_heads(model, seed=3).to(F32).save_pretrained(tmp_path)
    strategy: Any = Medusa(tmp_path, sources=sources)
    run(model, prompts(1), max_new_tokens=9, do_sample=False, lookahead_strategy=strategy)
    assert Medusa(tmp_path).heads_for(model) is strategy.heads_for(model), "read once for both"
    held = [weakref.ref(strategy.heads_for(model)), weakref.ref(strategy._read)]
    assert held[0]() is not held[1]()
    del strategy
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_the_default_tree(tmp_path: FilePath) -> None:
    """What lies beside the heads, else the published tree cut down to what the heads can fill."""
    published = choices_from("mc_sim_7b_63").paths
    for num_heads in (1, 2, 3, 4, 5):
        heads = MedusaHeads(8, 1000, num_heads)
        expected = tuple(path for path in published if len(path) <= num_heads)
        assert Medusa(heads).tree(1000).paths == expected
    few = Medusa(MedusaHeads(8, 3, 4)).tree(3)
    assert few.paths == tuple(path for path in published if max(path) < 3)
    heads = random_heads(tiny_model("llama"))
    heads.save_pretrained(tmp_path)
    tree = {"format": 1, "kind": "lookahead-medusa-tree", "paths": [[0], [0, 0], [4]]}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    assert Medusa(tmp_path).tree(VOCAB).paths == ((0,), (4,), (0, 0))
    assert Medusa(tmp_path, [2]).tree(VOCAB).paths == ((0,), (1,))
    assert Medusa(tmp_path, tmp_path / "tree.json").tree(VOCAB) == Medusa(tmp_path).tree(VOCAB)
    assert Medusa(heads, ChoiceTree(((0,), (1,)))).tree(VOCAB).widths == (2,)


HEADS = MedusaHeads(32, VOCAB, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"acceptance": "greedy"}, r"Medusa\(acceptance=\) must be one of 'exact', 'typical', 'nucleus': got 'greedy'"),
        ({"posterior_threshold": 0.0}, r"posterior_threshold=\) must be a number above 0 and below 1: got 0.0"),
        ({"posterior_threshold": 1.0}, r"posterior_threshold=\) must be a number above 0 and below 1: got 1.0"),
        ({"posterior_threshold": float("nan")}, r"posterior_threshold=\) must be .*: got nan"),
        ({"posterior_threshold": "0.1"}, r"posterior_threshold=\) must be .*: got '0.1'"),
        ({"posterior_alpha": 0}, r"posterior_alpha=\) must be a number above 0: got 0"),
        ({"posterior_alpha": float("inf")}, r"posterior_alpha=\) must be a number above 0: got inf"),
        ({"top_p": 0.0}, r"top_p=\) must be a number above 0 and at most 1: got 0.0"),
        ({"top_p": 1.1}, r"top_p=\) must be a number above 0 and at most 1: got 1.1"),
        ({"top_p": True}, r"top_p=\) must be a number above 0 and at most 1: got True"),
        ({"acceptance": "typical", "verification": "rejection"}, r"acceptance='typical'\) has a rule of its own"),
        ({"choices": [[0, 1, 0, 2]]}, r"Path \[0, 1, 0, 2\] is 4 deep, and there are 3 heads"),
        ({"choices": [[0, VOCAB]]}, f"asks for rank {VOCAB}, and the vocabulary has {VOCAB} tokens"),
        ({"choices": [2, 2], "sources": ("heads",)}, r"Medusa\(choices=\) belongs to the fixed tree"),
        ({"nodes": 5}, r"Medusa\(nodes=\) belongs to the automatic mode: got no sources"),
        ({"tuning": FLAT}, r"Medusa\(tuning=\) belongs to the automatic mode: got no sources"),
        ({"sources": ()}, r"Medusa\(sources=\) must be a tuple of one or more of 'heads', 'recycling'"),
        ({"sources": ("heads", "heads")}, "names a source twice"),
        ({"sources": ("heads", "oracle")}, "Unknown source 'oracle': expected 'heads', 'recycling'"),
        ({"sources": ("suffix",)}, r"Medusa\(sources=\) must name 'heads': got \('suffix',\)"),
        ({"sources": ("heads",), "nodes": 0}, r"Medusa\(nodes=\) must be at least 1: got 0"),
        ({"sources": ("heads",), "max_nodes": 9999}, r"Medusa\(max_nodes=\) must be at most 512: got 9999"),
        ({"static": 1}, r"Medusa\(static=\) must be True or False: got 1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    refuses(message, Medusa, HEADS, **settings)


def test_what_is_no_heads(tmp_path: FilePath) -> None:
    given: Any
    for given in (None, 3, {"heads": 1}, torch.nn.Linear(2, 2)):
        refuses(r"Medusa\(heads=\) must be MedusaHeads or the folder they lie in: got", Medusa, given)
    refuses(r"must be MedusaHeads or the folder", strategy_from, {"strategy": "medusa"})
    refuses("holds no Medusa heads", Medusa, tmp_path)
    refuses("Unknown field 'head' for Medusa: it knows", Medusa.from_dict, {"head": "x"})
    refuses("Unknown source 'heads': expected 'recycling', 'suffix'", Lookahead, sources=("heads",))


@pytest.mark.parametrize(
    ("heads", "settings", "message"),
    [
        (MedusaHeads(16, VOCAB), {}, "those of another model"),
        (MedusaHeads(32, 99), {}, "those of another model"),
        (MedusaHeads(16, VOCAB), {"sources": ("heads",)}, "those of another model"),
        (MedusaHeads(32, 99), {"sources": ("heads",)}, "those of another model"),
        (MedusaHeads(32, None, 3), {"choices": [VOCAB + 3]}, f"asks for rank {VOCAB}, and the vocabulary has {VOCAB}"),
    ],
    ids=range(5),
)
def test_heads_of_another_model(heads: MedusaHeads, settings: dict[str, Any], message: str, passes: Passes) -> None:
    refused(passes, fresh_model("llama"), message, lookahead_strategy=Medusa(heads.double(), **settings))


def test_heads_that_leave_the_vocabulary_open() -> None:
    same_as_plain(tiny_model("llama"), prompts(1), Medusa(MedusaHeads(32, None, 3).double()), max_new_tokens=9)


def test_models_that_the_heads_cannot_help() -> None:
    """A recurrent one is handed over, as for lookahead; and a model whose output layer cannot be reached."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes)).eval()
    settings = {"max_new_tokens": 5, "do_sample": False}
    plain = model.generate(**prompts(1), **settings)
    assert torch.equal(model.generate(**prompts(1), lookahead_strategy=Medusa(HEADS), **settings), plain)
    model = initialised(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    model.get_output_embeddings = lambda: None
    with pytest.raises(LookaheadError, match="The output layer of GPT2LMHeadModel cannot be reached"):
        model.generate(**prompts(1), lookahead_strategy=Medusa(HEADS), max_new_tokens=5)


def test_an_output_layer_that_is_not_called(passes: Passes) -> None:
    """Named in the prompt's pass, before anything is written."""
    model = fresh_model("llama")
    layer, heads = output_layer(model), random_heads(model)
    run(model, prompts(1), lookahead_strategy=Medusa(heads), max_new_tokens=2)  # the self-test has been
    copied = copy.deepcopy(layer)
    model.get_output_embeddings = lambda: copied
    seen = passes(model)
    with pytest.raises(LookaheadError, match=r"output layer of this model \(Linear\) was not called at all"):
        run(model, prompts(1), lookahead_strategy=Medusa(heads), max_new_tokens=5)
    assert seen == [12]
    assert not copied._forward_pre_hooks


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_right_heads(num_heads: int, batch: int) -> None:
    """Every pass writes the whole depth of the tree and the carried token."""
    model, heads = counting(num_heads)
    strategy = Medusa(heads, [[0] * num_heads], stats="detailed")
    output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=1 + 4 * (num_heads + 1))
    assert [record["tokens"] for record in output.stats.passes[1:]] == [[num_heads + 1] * batch] * 4
    assert output.stats.accepted == output.stats.drafted == 4 * num_heads * batch


def test_fitted_heads_are_worth_more_than_wrong_ones() -> None:
    model = tiny_model("gpt2")
    lengths = [
        same_as_plain(model, prompts(3), Medusa(heads), max_new_tokens=40).stats.mean_acceptance_length
        for heads in (random_heads(model), fitted(model))
    ]
    assert lengths[1] > lengths[0] + 0.5


def test_the_tree_has_the_published_shape() -> None:
    """63 nodes as long as there is room, cut by depth towards the end; a path is never deeper than what may follow."""
    model, heads = counting(4)
    sizes = [len([path for path in choices_from("mc_sim_7b_63").paths if len(path) <= depth]) for depth in range(5)]
    strategy = Medusa(heads, stats="detailed")
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=13)
    nodes = [record["nodes"][0] - 1 for record in output.stats.passes]
    written = [record["tokens"][0] for record in output.stats.passes]
    left = [13 - sum(written[:index]) - 1 for index in range(len(written))]
    assert nodes[1:] == [sizes[min(4, room)] for room in left[1:]]


def test_heads_run_once_a_pass_on_accepted_nodes_only(passes: Passes) -> None:
    """All rows together, and not for passes after which nothing is drafted."""
    model, heads = counting(3)
    shapes: list[tuple[int, ...]] = []
    heads.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    same_as_plain(model, prompts(3), Medusa(heads), max_new_tokens=21)
    assert shapes == [(3, VOCAB)] * 5
    seen = passes(model)
    shapes.clear()
    run(model, prompts(3), lookahead_strategy=Medusa(heads), max_new_tokens=1)
    assert (seen, shapes) == ([12], [])


def test_heads_count_as_drafting() -> None:
    """A head that takes its time shows in the time of drafts, so that sizes are chosen with it."""
    model, heads = counting(3)
    heads.register_forward_hook(lambda *_: time.sleep(0.005))
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21)
    assert output.stats.draft_ms >= 5.0 * (output.stats.steps - 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_heads_get_the_credit(batch: int) -> None:
    """They are right from the first token on, where other sources know nothing yet; those go on where heads end."""
    model, heads = counting(3)
    alone = Medusa(heads, sources=("heads",), nodes=8, seed=0)
    stats = same_as_plain(model, prompts(batch), alone, max_new_tokens=33).stats
    assert stats.sources == {"heads": stats.accepted}
    strategy = Medusa(heads, sources=COMBINED, nodes=8, seed=0)
    stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=33).stats
    assert sum(stats.sources.values()) == stats.accepted
    assert stats.sources["heads"] > 0.4 * stats.accepted
    assert stats.mean_acceptance_length > 4
    assert "heads" in stats.explain()
    free = same_as_plain(model, prompts(batch), Lookahead(nodes=8, seed=0), max_new_tokens=33).stats
    assert free.mean_acceptance_length < stats.mean_acceptance_length


def test_what_heads_and_others_know_adds_up() -> None:
    """A text of which the heads know one half, and its own past the other: both are credited."""
    model, heads = counting(2, period=9)
    strategy = Medusa(heads, sources=("heads", "suffix"), nodes=16, seed=0)
    stats = same_as_plain(model, prompts(1), strategy, max_new_tokens=60).stats
    assert set(stats.sources) == {"heads", "suffix"}
    alone = same_as_plain(model, prompts(1), Medusa(heads, [[0, 0]]), max_new_tokens=60).stats
    assert stats.mean_acceptance_length > alone.mean_acceptance_length


def test_heads_rest_while_nothing_pays() -> None:
    """In a batch too: passes that draft nothing run no heads, and later ones go on from the right place."""
    for batch in (1, 3):
        model = tiny_model("llama")
        heads = random_heads(model)
        runs: list[int] = []
        heads.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        strategy = Medusa(heads, sources=("heads", "suffix"), tuning=STEEP, seed=0)
        stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=120).stats
        assert len(runs) < stats.steps / 2


def test_the_time_of_heads_is_no_part_of_the_curve() -> None:
    """They run in passes of any size, and plain lookahead reads the same curve."""
    model = fresh_model("llama")
    heads = random_heads(model)
    run(model, prompts(1), lookahead_strategy=Lookahead(), max_new_tokens=20)
    run(model, prompts(1), lookahead_strategy=Medusa(heads, sources=COMBINED), max_new_tokens=20)
    memory = memory_of(model)
    assert len(memory.times) == 1
    (expensive,) = memory.expensive.values()
    assert expensive.time.ms > 0.0

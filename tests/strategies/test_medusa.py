"""The Medusa strategy through ``generate``: plain decoding's text whatever the heads say, and what heads are worth."""

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.medusa import counting, random_heads
from helpers.models import (
    F32,
    VOCAB,
    counting_model,
    fresh_model,
    initialised,
    prompts,
    run,
    same_as_plain,
    successor_model,
    tiny_model,
    waiting,
)
from helpers.streaming import Puts
from runtime.test_cuda_graphs import StandIn
from torch import Tensor
from transformers import (
    GPT2Config,
    LogitsProcessor,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

import lookahead
from jacobi import LookaheadError
from lookahead import DecodingStats, Lookahead, LookaheadOutput, StepTimes
from lookahead.draft.latency import NODES
from lookahead.medusa import ChoiceTree, Medusa, MedusaHeads, choices_from, output_layer
from lookahead.models.fingerprint import fingerprint
from lookahead.models.hidden_states import HiddenStates
from lookahead.runtime.tree import FusedModel
from lookahead.strategies import medusa as module
from lookahead.strategies.registry import strategy_from

pytestmark = pytest.mark.usefixtures("augmented")

SMALL = [[0, 0, 0], [0, 1], [1, 0], [2], [3]]
SAMPLED = [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 8}]
COMBINED = ("heads", "recycling", "suffix")


def flat() -> StepTimes:
    """A pass costs the same whatever its size."""
    times = StepTimes()
    for nodes in NODES:
        times.put(nodes, 64, 1.0)
    return times


def fitted(model: Any, num_heads: int = 3) -> MedusaHeads:
    """Heads with output layers of their own, fitted by least squares to the model's own greedy texts."""
    heads = MedusaHeads.for_model(model, num_heads, own_output=True)
    text = run(model, prompts(24, ragged=False), do_sample=False, max_new_tokens=50)[0]
    with torch.no_grad(), HiddenStates(output_layer(model)) as states:
        states.expect()
        hidden = states.take(model(text).logits)
        for head, layer in enumerate(heads.outputs):
            ahead = head + 2
            inputs = hidden[:, :-ahead].flatten(0, 1)
            targets = torch.nn.functional.one_hot(text[:, ahead:].flatten(), VOCAB).to(inputs.dtype)
            layer.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
    return heads


KINDS: dict[str, Callable[[MedusaHeads], Medusa]] = {
    "published": lambda heads: Medusa(heads),
    "paths": lambda heads: Medusa(heads, SMALL),
    "dense": lambda heads: Medusa(heads, [3, 2, 1]),
    "static": lambda heads: Medusa(heads, SMALL, static=True),
    "combined": lambda heads: Medusa(heads, sources=COMBINED, tuning=flat(), seed=0),
    "fixed size": lambda heads: Medusa(heads, sources=("recycling", "heads", "pool", "window"), nodes=20, seed=0),
    "heads alone": lambda heads: Medusa(heads, sources=("heads",), tuning=flat(), seed=0),
}


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SAMPLED, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_decodings_text(batch: int, settings: dict[str, Any], kind: str) -> None:
    """Heads that are wrong, untrained, fitted and right; alone and in a left-padded batch."""
    llama = tiny_model("llama")
    for model, heads in (
        (llama, random_heads(llama)),
        (llama, MedusaHeads.for_model(llama, 3)),
        (llama, random_heads(llama, own_output=True)),
        counting(3, sharpness=6.0),
    ):
        output = same_as_plain(model, prompts(batch), KINDS[kind](heads), max_new_tokens=24, **settings)
        assert output.stats.emitted == 24 * batch


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen2_mixed", "gemma2", "gemma3", "cohere2", "phi3", "llama4"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_other_models(name: str, sample: bool) -> None:
    """Tied and scaled output layers, sliding windows, learned positions that end soon."""
    model = tiny_model(name)
    heads = random_heads(model, 2)
    for kind in ("published", "combined"):
        same_as_plain(model, prompts(3), KINDS[kind](heads), max_new_tokens=20, do_sample=sample)
    room = getattr(model.config, "n_positions", 64) - 12
    same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=min(room, 52), do_sample=sample)


@pytest.mark.parametrize("seed", range(8))
def test_seeds(seed: int) -> None:
    """Fitted heads, so that much is accepted; sampled texts are those of plain decoding, seed for seed."""
    model = tiny_model("gpt2")
    heads = fitted(model)
    for kind in ("published", "combined"):
        output = same_as_plain(
            model, prompts(2, seed=seed), KINDS[kind](heads), max_new_tokens=24, do_sample=True, top_k=3, seed=seed
        )
        assert output.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_in_another_dtype(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    heads = random_heads(model).to(dtype)
    same_as_plain(model, prompts(2), Medusa(heads, SMALL), max_new_tokens=20)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": [3, 5]},
        {"suppress_tokens": [1, 4], "do_sample": True, "top_p": 0.7},
        {"repetition_penalty": 1.2, "do_sample": True, "temperature": 1.4},
        {"output_scores": True, "output_logits": True},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 17},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_settings_of_generate(batch: int, settings: dict[str, Any]) -> None:
    for model, heads in (counting(3), (tiny_model("llama"), random_heads(tiny_model("llama")))):
        for kind in ("published", "combined"):
            length = {} if "max_length" in settings else {"max_new_tokens": 24}
            same_as_plain(model, prompts(batch), KINDS[kind](heads), **length | settings)


@pytest.mark.parametrize("batch", [1, 4])
def test_end_tokens_inside_a_path(batch: int) -> None:
    """Rows end one after another, each inside what its pass accepts."""
    model, heads = counting(4)
    for end in ([2], [5], [7, 3], [1]):
        for recorded in (False, True):
            output = same_as_plain(
                model, prompts(batch), Medusa(heads), max_new_tokens=30, eos_token_id=end, output_scores=recorded
            )
            new = output.sequences[:, 12:].tolist()
            ends = [min([line.index(token) + 1 for token in end if token in line]) for line in new]
            assert output.stats.emitted == sum(ends)


@pytest.mark.parametrize("batch", [1, 3])
def test_stop_strings(batch: int, tokenizer: PreTrainedTokenizerFast) -> None:
    model, heads = counting(4)
    for strings in ("fga", ["cd", "ga"]):
        settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 24, "eos_token_id": 40}
        for strategy in (Medusa(heads), Medusa(heads, acceptance="typical")):
            same_as_plain(model, prompts(batch), strategy, **settings)


class Even(LogitsProcessor):
    """A processor of the user's own, which looks at the whole batch: what the other rows wrote last is excluded."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(len(scores)):
            others = [other for other in range(len(scores)) if other != row]
            scores[row, input_ids[others, -1]] = -1e4
        return scores


class Halts(StoppingCriteria):
    """A rule of the user's own: a row ends at its third token that 5 divides."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 12:] % 5 == 0).sum(1) >= 3


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_processors_and_rules_of_the_users_own(sample: bool) -> None:
    settings = {"do_sample": sample, "logits_processor": [Even()], "stopping_criteria": [Halts()]}
    for model, heads in (counting(3), (tiny_model("llama"), random_heads(tiny_model("llama")))):
        for kind in ("published", "combined"):
            same_as_plain(model, prompts(3), KINDS[kind](heads), max_new_tokens=20, **settings)


def test_rejection() -> None:
    """The papers' scheme goes with exact acceptance: greedy text is plain decoding's, sampled text has its odds."""
    model, heads = counting(3, sharpness=5.0)
    strategy = Medusa(heads, verification="rejection")
    same_as_plain(model, prompts(2), strategy, max_new_tokens=20)
    output, _ = run(model, prompts(2), lookahead_strategy=strategy, do_sample=True, max_new_tokens=20)
    assert output.shape == (2, 32)


# --- doors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_custom_generate_and_streams(batch: int, patched: bool) -> None:
    if not patched:
        lookahead.restore_all()
    model, heads = counting(3)
    for settings in SAMPLED:
        plain, state = run(model, prompts(batch), max_new_tokens=20, **settings)
        streamer = Puts()
        ours, after = run(
            model,
            prompts(batch),
            max_new_tokens=20,
            custom_generate=Medusa(heads),
            lookahead_streamer=streamer,
            **settings,
        )
        assert ours.tolist() == plain.tolist()
        assert torch.equal(after, state)
        assert torch.stack(streamer.puts[1:], dim=1).tolist() == plain[:, 12:].tolist()


@pytest.mark.parametrize("acceptance", ["exact", "typical", "nucleus"])
@pytest.mark.parametrize("batch", [1, 3])
def test_streaming(batch: int, acceptance: str) -> None:
    """Every token once, in order, one pass at a time."""
    model, heads = counting(3, sharpness=5.0)
    streamer = Puts()
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "eos_token_id": 40}
    text, _ = run(
        model, prompts(batch), lookahead_strategy=Medusa(heads, acceptance=acceptance), streamer=streamer, **settings
    )
    assert streamer.puts[0].tolist() == prompts(batch)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1


def test_a_cache_is_continued() -> None:
    """Turn by turn in one cache, with Medusa and without."""
    model = tiny_model("llama")
    heads = random_heads(model)
    for strategy in (Medusa(heads), Medusa(heads, sources=COMBINED, seed=0)):
        first = same_as_plain(model, prompts(2, ragged=False), strategy, max_new_tokens=9)
        following = torch.cat([first.sequences, torch.randint(1, VOCAB, (2, 5))], dim=1)
        caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
        inputs = {"input_ids": following, "attention_mask": torch.ones_like(following)}
        plain, _ = run(model, inputs, past_key_values=caches[0], max_new_tokens=15)
        ours, _ = run(model, inputs, past_key_values=caches[1], max_new_tokens=15, lookahead_strategy=strategy)
        assert ours.tolist() == plain.tolist()


def test_a_chunked_prompt() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21, prefill_chunk_size=5)
    assert output.stats.steps == 6


def test_settings_as_plain_data(tmp_path: FilePath) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    heads.save_pretrained(tmp_path)
    curve = flat()
    for strategy in (
        Medusa(str(tmp_path)),
        Medusa(tmp_path, "vicuna_7b_stage2", static=True) if heads.num_heads > 3 else Medusa(tmp_path, [2, 2]),
        Medusa(str(tmp_path), SMALL, acceptance="typical", posterior_threshold=0.2, posterior_alpha=0.5),
        Medusa(str(tmp_path), [3, 2], acceptance="nucleus", top_p=0.5, stats="detailed"),
        Medusa(str(tmp_path), sources=COMBINED, nodes=9, remember=False, tuning=curve),
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


# --- what heads are worth ------------------------------------------------------------------------------------------


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


def test_heads_run_once_a_pass_on_accepted_nodes_only(passes: Callable[[Any], list[int]]) -> None:
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


# --- combined with other sources -----------------------------------------------------------------------------------


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


def test_wrong_heads_are_left_out() -> None:
    """What they propose is learnt to be wrong, and gets no nodes where nodes cost something."""
    model = counting_model()
    heads = random_heads(model, own_output=True)
    with torch.no_grad():
        for layer in heads.outputs:
            layer.weight.zero_()
            layer.weight[40] = 1.0
    times = StepTimes()
    for nodes in NODES:
        times.put(nodes, 64, 1.0 + 0.2 * (nodes - 1))
    strategy = Medusa(heads, sources=("heads",), tuning=times, seed=0, stats="detailed")
    stats = same_as_plain(model, prompts(1), strategy, max_new_tokens=200).stats
    late = [record["nodes"][0] - 1 for record in stats.passes[100:]]
    assert sum(late) / len(late) < 0.2
    assert stats.sources == {}


def test_heads_rest_while_nothing_pays() -> None:
    """In a batch too: passes that draft nothing run no heads, and later ones go on from the right place."""
    for batch in (1, 3):
        model = tiny_model("llama")
        heads = random_heads(model)
        runs: list[int] = []
        heads.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        times = StepTimes()
        for nodes in NODES:
            times.put(nodes, 64, 1.0 + 3.0 * (nodes - 1))
        strategy = Medusa(heads, sources=("heads", "suffix"), tuning=times, seed=0)
        stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=120).stats
        assert len(runs) < stats.steps / 2


def test_what_is_learnt_stays_with_the_choice() -> None:
    """Heads that were right before are trusted in the next call on the model."""
    model, heads = counting(3)
    strategy = Medusa(heads, sources=("heads",), nodes=3)
    first, second = (same_as_plain(model, prompts(1), strategy, max_new_tokens=17).stats for _ in range(2))
    assert second.mean_acceptance_length >= first.mean_acceptance_length > 1.5


def test_the_time_of_heads_is_no_part_of_the_curve() -> None:
    """They run in passes of any size, and plain lookahead reads the same curve."""
    model = fresh_model("llama")
    heads = random_heads(model)
    run(model, prompts(1), lookahead_strategy=Lookahead(), max_new_tokens=20)
    run(model, prompts(1), lookahead_strategy=Medusa(heads, sources=COMBINED), max_new_tokens=20)
    with lookahead.draft.memory.borrowed(model, True) as memory:
        assert len(memory.times) == 1
        (costly,) = memory.costly.values()
        assert costly.ms > 0.0


# --- hooks and buffers ---------------------------------------------------------------------------------------------


def hooks(model: Any) -> int:
    return len(output_layer(model)._forward_pre_hooks)


class Breaks(LogitsProcessor):
    """Raises after some calls; counts the hooks that are there meanwhile."""

    def __init__(self, model: Any, calls: int) -> None:
        self.model, self.calls, self.seen = model, calls, set[int]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.add(hooks(self.model))
        self.calls -= 1
        if not self.calls:
            raise RuntimeError("broken")
        return scores


def test_the_hook_is_there_for_the_call_only() -> None:
    model, heads = counting(3)
    for calls in (1, 5):
        breaks = Breaks(model, calls)
        with pytest.raises(RuntimeError, match="broken"):
            run(model, prompts(1), lookahead_strategy=Medusa(heads), max_new_tokens=20, logits_processor=[breaks])
        assert breaks.seen == {1}
        assert hooks(model) == 0
    whole = Breaks(model, 1000)
    same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=20, logits_processor=[whole])
    assert whole.seen == {0, 1}  # 0 in plain decoding
    assert hooks(model) == 0


class Thinks(LogitsProcessor):
    """Runs the same model inside of a call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            self.model(torch.full((len(input_ids), 3), 40))
        return scores


def test_passes_inside_a_processor_are_not_noted() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(2), Medusa(heads), max_new_tokens=21, logits_processor=[Thinks(model)])
    assert output.stats.mean_acceptance_length == pytest.approx(21 / 6)


def test_two_threads() -> None:
    """Calls on one model at the same time: each one's heads see its own passes."""
    model, heads = counting(3)
    strategy = Medusa(heads, [[0, 0, 0]])
    inputs = [prompts(1, seed=seed) for seed in range(4)]
    settings = {"do_sample": False, "max_new_tokens": 61, "return_dict_in_generate": True}
    plain = [model.generate(**each, **settings).sequences.tolist() for each in inputs]
    outputs: list[Any] = [None] * len(inputs)

    def work(index: int) -> None:
        outputs[index] = model.generate(**inputs[index], lookahead_strategy=strategy, **settings)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [output.sequences.tolist() for output in outputs] == plain
    assert [output.stats.steps for output in outputs] == [16] * 4
    assert hooks(model) == 0


def test_hidden_states_of_other_threads_are_not_noted() -> None:
    layer = torch.nn.Linear(3, 5)
    with HiddenStates(layer) as states:
        states.expect()
        thread = threading.Thread(target=layer, args=(torch.ones(2, 7, 3),))
        thread.start()
        thread.join()
        with pytest.raises(LookaheadError, match="was not called at all"):
            states.take(torch.zeros(2, 7, 5))
        layer(torch.ones(2, 4, 3))  # not expected
        states.expect()
        logits = layer(torch.full((2, 7, 3), 2.0))
        assert states.take(logits).tolist() == torch.full((2, 7, 3), 2.0).tolist()
        states.expect()
        layer(torch.ones(14, 3))
        with pytest.raises(LookaheadError, match=r"called with \[14, 3\] in a pass whose logits are \[2, 7, 5\]"):
            states.take(logits)
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("batch", [1, 3])
def test_static_shapes(batch: int, made: list[FusedModel]) -> None:
    """Hidden states are cut to the nodes of the tree, whatever the bucket; buffers wait for the next call."""
    model, heads = counting(3)
    strategy = Medusa(heads, SMALL, static=True)
    for settings in SAMPLED:
        output = same_as_plain(model, prompts(batch), strategy, max_new_tokens=25, **settings)
        assert made[-1].route == "static"
        dynamic = same_as_plain(
            model, prompts(batch), Medusa(heads, SMALL, static=False), max_new_tokens=25, **settings
        )
        assert output.stats.histogram == dynamic.stats.histogram
    assert len(waiting(model)) == 1


def test_graphs_keep_hidden_states(monkeypatch: pytest.MonkeyPatch, made: list[FusedModel]) -> None:
    """A replay overwrites what its capture returned, logits and hidden states alike; the next tree is made of those."""
    model, heads = counting(3)
    monkeypatch.setattr(StandIn, "shape", (1, 8, VOCAB))
    monkeypatch.setattr(StandIn, "hidden", VOCAB)
    strategy = Medusa(heads, [[0, 0, 0], [1], [2], [0, 1], [0, 0, 1]], static=True)  # a bucket of 8
    stand_in = StandIn(monkeypatch)
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=61)
    assert output.stats.steps == 16
    assert made[-1].route == "cuda graphs"
    assert stand_in.captured == 1
    assert stand_in.replayed > 10


def test_graphs_outlive_other_strategies(monkeypatch: pytest.MonkeyPatch, made: list[FusedModel]) -> None:
    """The hook does not make another model of it: both kinds of graphs wait side by side."""
    model, heads = counting(3)
    layer = output_layer(model)
    before = fingerprint(model)
    with HiddenStates(layer):
        assert fingerprint(model) == before
    for _ in range(2):
        run(model, prompts(1), lookahead_strategy=Medusa(heads, SMALL, static=True), max_new_tokens=9)
        run(model, prompts(1), lookahead_strategy=Lookahead(window_size=3, static=True), max_new_tokens=9)
    assert len(waiting(model)) == 2


# --- statistics ----------------------------------------------------------------------------------------------------


def test_statistics() -> None:
    model, heads = counting(3)
    output = same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=21)
    assert isinstance(output, LookaheadOutput)
    stats = output.stats
    assert isinstance(stats, DecodingStats)
    assert (stats.steps, stats.emitted, stats.accepted) == (6, 21, 15)
    assert stats.histogram == {1: 1, 4: 5}
    assert stats.explain().startswith("21 tokens in 6 passes (S = 3.50)")
    assert same_as_plain(model, prompts(1), Medusa(heads, stats="none"), max_new_tokens=9).stats is None


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(message: str, passes: Callable[[Any], list[int]], model: Any, strategy: Callable[[], Any]) -> None:
    """Assert that a call is refused before any pass, and leaves no hook."""
    seen = passes(model)
    with pytest.raises(LookaheadError, match=message):
        run(model, prompts(1), lookahead_strategy=strategy(), max_new_tokens=5)
    assert seen == []
    assert hooks(model) == 0


HEADS = MedusaHeads(32, VOCAB, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"acceptance": "greedy"}, r"Medusa\(acceptance=\) must be one of 'exact', 'typical', 'nucleus': got 'greedy'"),
        ({"acceptance": None}, r"Medusa\(acceptance=\) must be one of"),
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
        ({"choices": []}, "The choices are empty"),
        ({"choices": "mc_sim"}, "There is no preset and no file 'mc_sim'"),
        ({"choices": [[0], [0]]}, r"Path \[0\] is given 2 times"),
        ({"choices": [[0, 1, 0, 2]]}, r"Path \[0, 1, 0, 2\] is 4 deep, and there are 3 heads"),
        ({"choices": "mc_sim_7b_63"}, "deep, and there are 3 heads"),
        ({"choices": [[0, VOCAB]]}, f"asks for rank {VOCAB}, and the vocabulary has {VOCAB} tokens"),
        ({"choices": [2, 2], "sources": ("heads",)}, r"Medusa\(choices=\) belongs to the fixed tree"),
        ({"nodes": 5}, r"Medusa\(nodes=\) belongs to the automatic mode: got no sources"),
        ({"tuning": flat()}, r"Medusa\(tuning=\) belongs to the automatic mode: got no sources"),
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
    with pytest.raises(LookaheadError, match=message):
        Medusa(HEADS, **settings)


def test_sources_of_lookahead_are_its_own() -> None:
    with pytest.raises(LookaheadError, match="Unknown source 'heads': expected 'recycling', 'suffix'"):
        Lookahead(sources=("heads",))


@pytest.mark.parametrize("given", [None, 3, {"heads": 1}, torch.nn.Linear(2, 2)], ids=str)
def test_heads_of_a_wrong_type(given: Any) -> None:
    with pytest.raises(LookaheadError, match=r"Medusa\(heads=\) must be MedusaHeads or the folder they lie in: got"):
        Medusa(given)


def test_no_heads(tmp_path: FilePath) -> None:
    with pytest.raises(LookaheadError, match=r"must be MedusaHeads or the folder"):
        strategy_from({"strategy": "medusa"})
    with pytest.raises(LookaheadError):
        Medusa(tmp_path)
    with pytest.raises(LookaheadError, match="Unknown field 'head' for Medusa: it knows"):
        Medusa.from_dict({"head": "x"})


def test_a_tree_of_another_version(tmp_path: FilePath) -> None:
    random_heads(tiny_model("llama")).save_pretrained(tmp_path)
    tree = {"format": 2, "kind": "lookahead-medusa-tree", "paths": [[0]]}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    with pytest.raises(LookaheadError, match="has format 2: expected 1"):
        Medusa(tmp_path)


def test_heads_of_another_model(passes: Callable[[Any], list[int]]) -> None:
    model = fresh_model("llama")
    for sources in (None, ("heads",)):
        refused("those of another model", passes, model, lambda s=sources: Medusa(MedusaHeads(16, VOCAB), sources=s))
        refused("those of another model", passes, model, lambda s=sources: Medusa(MedusaHeads(32, 99), sources=s))


def test_ranks_beyond_the_vocabulary_of_heads_that_leave_it_open(passes: Callable[[Any], list[int]]) -> None:
    model = fresh_model("llama")
    heads = MedusaHeads(32, None, 3).to(model.dtype)
    refused(
        f"asks for rank {VOCAB}, and the vocabulary has {VOCAB} tokens",
        passes,
        model,
        lambda: Medusa(heads, [VOCAB + 3]),
    )
    same_as_plain(model, prompts(1), Medusa(heads), max_new_tokens=9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_heads(value: float, passes: Callable[[Any], list[int]]) -> None:
    model = fresh_model("llama")
    heads = random_heads(model)
    with torch.no_grad():
        heads.blocks[1][0].linear.weight[3, 3] = value
    refused("The heads are broken: 1 of 1024 numbers of blocks.1.0", passes, model, lambda: Medusa(heads))


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


def test_an_output_layer_that_is_not_called(passes: Callable[[Any], list[int]]) -> None:
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


def test_beams_are_refused() -> None:
    model, heads = counting(3)
    with pytest.raises(LookaheadError, match="cannot be combined with num_beams=2"):
        model.generate(**prompts(1), lookahead_strategy=Medusa(heads), num_beams=2, max_new_tokens=5)


def test_text_that_nothing_follows_from() -> None:
    """Where the model is equally unsure of everything, nothing is accepted, and nothing is lost."""
    model = successor_model({})
    heads = random_heads(model)
    same_as_plain(model, prompts(2), Medusa(heads), max_new_tokens=12, do_sample=True)


def test_public_names() -> None:
    assert lookahead.Medusa is Medusa is module.Medusa

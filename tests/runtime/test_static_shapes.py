"""Calls with static shapes: the same text, buffers that wait for the next call, and where they cannot be used."""

import random
from typing import Any

import pytest
import torch
from helpers.graphs import view, waiting
from helpers.marks import BATCH_AND_SAMPLE
from helpers.models import MODELS, counting_model, fresh_model, initialised, prompts, run, same_as_plain, tiny_model
from helpers.mtp import deepseek
from helpers.refusals import refuses
from helpers.views import buffers_of, tree_view
from torch import Tensor
from transformers import DynamicCache, Gemma3nTextConfig, StaticCache

from jacobi import Path, TokenTree
from lookahead import Jacobi, Lookahead, LookaheadError, release
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime import open as opening
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs import executor
from lookahead.runtime.cuda_graphs.buffers import Graph, StaticBuffers, bucket_of
from lookahead.runtime.cuda_graphs.executor import GraphExecutor
from lookahead.runtime.open import static_reason
from lookahead.runtime.tree import TreeModel

pytestmark = pytest.mark.usefixtures("augmented")
SMALL = Lookahead(window_size=4, ngram_size=3, verification_set_size=3, seed=1, static=True)


@pytest.mark.parametrize(("batch", "sample"), BATCH_AND_SAMPLE)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"llama4"}))  # which is given places for each pass
def test_same_as_plain(name: str, batch: int, sample: bool, made: list[TreeModel]) -> None:
    """Every kind of model, alone and in a left-padded batch, greedy and sampled."""
    same_as_plain(tiny_model(name), prompts(batch), SMALL, max_new_tokens=24, do_sample=sample)
    assert (made[-1].route, made[-1].executor.reason) == ("static", None)


@pytest.mark.parametrize("strategy", [Jacobi(static=True, seed=1), Jacobi(static=True, mode="jacobi", block_size=40)])
def test_jacobi(strategy: Jacobi, made: list[TreeModel]) -> None:
    """Chains, one of them longer than what a pass moves by itself."""
    same_as_plain(counting_model(), prompts(2), strategy, max_new_tokens=90)
    assert made[-1].route == "static"


def test_latent_attention(made: list[TreeModel]) -> None:
    """Keys and values of different sizes."""
    model = deepseek(first_k_dense_replace=2)
    same_as_plain(model, prompts(2), SMALL, max_new_tokens=20)
    buffers = waiting(model)[0].stock
    assert len({buffer.shape[-1] for buffer in buffers}) == 2


def test_shared_keys(made: list[TreeModel]) -> None:
    """Layers that read another layer's keys."""
    config = Gemma3nTextConfig(
        vocab_size=48, vocab_size_per_layer_input=48, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_kv_shared_layers=2, sliding_window=6, max_position_embeddings=256, laurel_rank=4, initializer_range=0.1,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    same_as_plain(initialised(config), prompts(2), SMALL, max_new_tokens=20)
    assert made[-1].route == "static"


def test_token_types(made: list[TreeModel]) -> None:
    """The last token type of each row's prompt goes along with every pass."""
    inputs = prompts(2)
    inputs["token_type_ids"] = torch.randint(0, 48, inputs["input_ids"].shape)
    same_as_plain(tiny_model("gpt2"), inputs, SMALL, max_new_tokens=20)
    inputs["token_type_ids"] = (inputs["token_type_ids"] + 1) % 48
    same_as_plain(tiny_model("gpt2"), inputs, SMALL, max_new_tokens=20)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
def test_buffers_grow(name: str, batch: int, made: list[TreeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that outgrows its buffers several times and passes through several spans."""
    monkeypatch.setattr(static_buffers, "_LEAST_SPAN", 16)
    monkeypatch.setattr(executor, "ALIGNED", 16)
    spans: list[int] = []
    mask_of = StaticBuffers.mask_of
    monkeypatch.setattr(StaticBuffers, "mask_of", lambda own, *of: spans.append(of[1]) or mask_of(own, *of))
    model = fresh_model(name)
    same_as_plain(model, prompts(batch), SMALL, max_new_tokens=150)
    assert 162 <= waiting(model)[0].capacity <= 12 + 150 + 64 + 16
    assert len(set(spans)) >= 4


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continued_cache(name: str, kind: Any, made: list[TreeModel]) -> None:
    """A conversation of three turns in a cache of the caller's, which is what plain decoding leaves after each."""
    if (name, kind) == ("mistral", StaticCache):
        pytest.skip("static caches of sliding layers are refused")
    model, text = tiny_model(name), prompts(1)["input_ids"]
    caches = [kind(config=model.config, **({"max_cache_len": 128} if kind is StaticCache else {})) for _ in range(2)]
    for turn in range(3):
        settings = {"max_new_tokens": 12, "do_sample": False}
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        plain, _ = run(model, inputs, **{CACHE: caches[0]}, **settings)
        ours, _ = run(model, inputs, **{CACHE: caches[1]}, lookahead_strategy=SMALL, **settings)
        assert torch.equal(ours, plain)
        for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
            length = int(theirs.get_seq_length())
            assert int(mine.get_seq_length()) == length
            torch.testing.assert_close(mine.keys[:, :, :length], theirs.keys[:, :, :length])
            torch.testing.assert_close(mine.values[:, :, :length], theirs.values[:, :, :length])
        text = torch.cat([plain, prompts(1, 5, turn)["input_ids"]], dim=1)


def test_shapes_do_not_follow_the_history(made: list[TreeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are as wide as a bucket, and the masks of a bucket and span are one and the same memory."""
    seen: dict[tuple[int, ...], set[int]] = {}
    model = fresh_model("llama")

    def note(_module: Any, _args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4 and mask.shape[3] > 24:  # not the self-test
            assert kwargs["input_ids"].shape[1] == mask.shape[2] == bucket_of(mask.shape[2])
            assert mask.shape[3] in (128, 192)
            seen.setdefault(tuple(mask.shape), set()).add(mask.data_ptr())

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    run(model, prompts(1), max_new_tokens=60, do_sample=False, lookahead_strategy=SMALL)
    hook.remove()
    assert seen and all(len(places) == 1 for places in seen.values())


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_against_the_dynamic_path(batch: int) -> None:
    """Pass by pass the same scores, whatever is kept: paths anywhere in the tree, rows that wait, none that moves."""
    model, rng = tiny_model("qwen2_mixed"), random.Random(batch)
    ours = view(model, batch)
    theirs = tree_view(model, batch)
    for fused in (ours, theirs):
        fused.prefill()
        fused.keep([Path([0], [1])] * batch)
    for _ in range(25):
        trees = []
        for _row in range(batch):
            tree = TokenTree(rng.randrange(48))
            for _node in range(rng.choice([0, 3, 12, 40])):
                tree.add(rng.randrange(max(0, len(tree) - 6), len(tree)), rng.randrange(48))
            trees.append(tree)
        mine, other = ours.forward(trees), theirs.forward(trees)
        for row, tree in enumerate(trees):
            torch.testing.assert_close(mine.logits[row, : len(tree)], other.logits[row, : len(tree)])
            assert mine.greedy[row][: len(tree)] == other.greedy[row][: len(tree)]
        assert ours.bucket(max(map(len, trees))) == bucket_of(max(map(len, trees)))
        paths = []
        for row, tree in enumerate(trees):
            nodes = tree.path(rng.randrange(len(tree))) if row == 0 or rng.random() < 0.7 else []
            paths.append(Path(nodes, [1] * len(nodes)))
        ours.keep(paths)
        theirs.keep(paths)


def test_buffers_wait_for_the_next_call(made: list[TreeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of the same kind takes them, another kind does not, and only so many bytes wait."""
    model = fresh_model("llama")
    settings = {"max_new_tokens": 8, "do_sample": False, "lookahead_strategy": SMALL}
    run(model, prompts(1), **settings)
    (first,) = waiting(model)
    run(model, prompts(1, seed=1), **settings)
    assert waiting(model) == [first]
    budget = 9 * first.nbytes
    monkeypatch.setattr(static_buffers, "_LEAST_BUDGET", budget)
    for batch in (2, 3, 4, 20):
        run(model, prompts(batch), **settings)
    assert [arena.batch for arena in waiting(model)][-2:] == [3, 4], "one that is too large is not kept"
    assert sum(arena.nbytes for arena in waiting(model)) <= budget
    release(model)
    assert waiting(model) == []


def test_inference_mode(made: list[TreeModel]) -> None:
    """Buffers made there are not written outside of it, nor the other way round."""
    model = fresh_model("llama")
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            same_as_plain(model, prompts(1), SMALL, max_new_tokens=8)


def test_leftovers_do_no_harm(made: list[TreeModel]) -> None:
    """A call that ends in NaN leaves nothing that the next one could see."""
    model = fresh_model("llama")
    run(model, prompts(1, 30), max_new_tokens=8, do_sample=False, lookahead_strategy=SMALL)
    for buffer in waiting(model)[0].stock:
        buffer.fill_(torch.nan)
    same_as_plain(model, prompts(1), SMALL, max_new_tokens=20)


@torch.no_grad()
def test_a_call_in_use_is_not_shared() -> None:
    """A second view of the model gets buffers of its own while the first one is at work."""
    model = fresh_model("llama")
    first, second = view(model), view(model)
    first.prefill()
    second.prefill()
    assert buffers_of(first) is not None and buffers_of(first) is not buffers_of(second)
    first.close()
    third = view(model)
    third.prefill()
    assert buffers_of(third) is not None and buffers_of(third) is not buffers_of(second)
    assert waiting(model) == []


def scaled(kind: str) -> Any:
    """A tiny model whose RoPE changes with the text's length."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 256}
    return fresh_model("llama", rope_parameters=rope)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_changing_frequencies(kind: str, made: list[TreeModel]) -> None:
    """Refused by name when asked for; otherwise the dynamic path writes the text."""
    model = scaled(kind)
    assert kind in str(static_reason(model, ModelTraits.of(model)))
    with pytest.raises(LookaheadError, match=f"static=True cannot be used: {kind} RoPE"):
        run(model, prompts(1), max_new_tokens=8, do_sample=False, lookahead_strategy=SMALL)
    same_as_plain(model, prompts(1), Lookahead(seed=1), max_new_tokens=8)
    assert made[-1].route == "dynamic"


def test_models_that_have_none() -> None:
    """One that is spread over devices has no single stream to capture; flex attention's masks are compiled."""
    model = fresh_model("llama")
    assert static_reason(model, ModelTraits.of(model)) is None
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu"}
    assert static_reason(model, ModelTraits.of(model)) == "the model lies on several devices"
    model = fresh_model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    assert "flex_attention" in str(static_reason(model, ModelTraits.of(model)))


class Picky(torch.nn.Module):
    """Stands before a layer and accepts only passes that look like the dynamic path's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.shape[-1] == 128:
            raise ValueError("this many slots?")
        return self.layer(hidden, *args, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_that_rejects_it(batch: int, made: list[TreeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic path takes over in the first pass; or the error names the reason, if static shapes were asked for."""
    model = fresh_model("llama")
    model.model.layers[1] = Picky(model.model.layers[1])
    with pytest.raises(LookaheadError, match=r"static=True cannot be used: the model rejects .* this many slots"):
        run(model, prompts(batch), max_new_tokens=8, do_sample=False, lookahead_strategy=SMALL)
    release(model)  # or it would be remembered
    original = GraphExecutor.__init__
    monkeypatch.setattr(GraphExecutor, "__init__", lambda *a, **k: original(*a, **k | {"required": False}))
    same_as_plain(model, prompts(batch), SMALL, max_new_tokens=20)
    assert made[-1].route == "dynamic"
    assert "this many slots" in str(made[-1].executor.reason)
    assert made[-1].bucket(5) == 5


def test_a_rejection_is_remembered(made: list[TreeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model as it is: the next call of this kind does not try, another kind and a changed model do."""
    model = fresh_model("llama")
    model.model.layers[1] = Picky(model.model.layers[1])
    original = GraphExecutor.__init__
    monkeypatch.setattr(GraphExecutor, "__init__", lambda *a, **k: original(*a, **k | {"required": False}))
    tried: list[int] = []
    prepare = GraphExecutor._prepare
    monkeypatch.setattr(GraphExecutor, "_prepare", lambda self, *a: tried.append(1) or prepare(self, *a))
    settings = {"max_new_tokens": 8, "do_sample": False}

    def tries(batch: int, static: bool | None = None) -> int:
        tried.clear()
        strategy = Lookahead(window_size=3, ngram_size=3, verification_set_size=3, seed=1, static=static)
        run(model, prompts(batch), lookahead_strategy=strategy, **settings)
        return len(tried)

    assert tries(1, static=True) == 1
    monkeypatch.setattr(opening, "dynamic_reason", lambda *_: None)
    assert (tries(1), made[-1].route) == (0, "dynamic")
    assert "this many slots" in str(made[-1].executor.reason)
    refuses("static=True cannot be used: the model rejects", tries, 1, static=True)
    assert (tries(2), tries(2)) == (1, 0)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert (tries(1), tries(1)) == (1, 0)


def test_choosing(made: list[TreeModel]) -> None:
    """On a CPU static shapes are used only when asked for; the setting survives plain data."""
    model = fresh_model("llama")
    for chosen, route in ((None, "dynamic"), (False, "dynamic"), (True, "static")):
        strategy = Lookahead(static=chosen, seed=1)
        assert Lookahead.from_dict(strategy.to_dict()) == strategy
        run(model, prompts(1), max_new_tokens=4, do_sample=False, lookahead_strategy=strategy)
        assert made[-1].route == route
        assert (made[-1].executor.reason is None) == (route == "static")


def test_a_tensor_of_the_callers(made: list[TreeModel]) -> None:
    """Buffers of a call that feeds tensors of its own are not used again: a graph would go on reading them."""
    model = fresh_model("llama")
    fused = tree_view(model, static=True, cache_position_bias=torch.zeros(1))
    assert executor.kind_of_call(fused.forward_pass) is None


def test_a_short_call_after_a_long_one_has_buffers_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are little beside the weights, or graphs read them that would have to be captured again."""
    model, strategy = tiny_model("llama"), Lookahead(nodes=8, static=True)

    def capacity(new: int) -> int:
        model.generate(**prompts(1, 9), max_new_tokens=new, lookahead_strategy=strategy, do_sample=False)
        (kept,) = waiting(model)
        return kept.capacity

    monkeypatch.setattr(executor, "spare_bytes", lambda model: 0)
    assert capacity(600) >= 609 and capacity(4) <= 256
    monkeypatch.setattr(executor, "spare_bytes", lambda model: 1 << 30)
    assert capacity(600) >= 609 and capacity(4) >= 609
    buffers = waiting(model)[0]
    buffers.graphs[1, 1] = Graph(lambda: None, None, 0, None)  # type: ignore[arg-type]
    buffers.reserve(Extent(buffers.capacity // 2, 0, 64), at_once=True)
    assert buffers.graphs
    buffers.reserve(Extent(9, 4, 64), at_once=True)
    assert buffers.capacity <= 128 and not buffers.graphs

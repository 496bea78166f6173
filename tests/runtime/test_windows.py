"""Sliding-window layers hold their windows, as plain decoding's do, and the text is still plain decoding's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, run, same_as_plain, same_outputs, tiny_model
from transformers import DynamicCache, StaticCache

from lookahead import Jacobi, Lookahead
from lookahead.models.mask_rules import held_window, mask_rules
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache import buffers
from lookahead.runtime.cache.buffers import Extent, LayerBuffer
from lookahead.runtime.cache.tree import TreeCache
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.tracing import schedule

pytestmark = pytest.mark.usefixtures("augmented", "passes_count")

SLIDING = ["mistral", "qwen2_mixed", "gemma2", "gemma3", "cohere2", "phi3", "gpt_oss"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """For every pass with masks, slots of the text and the most that a sliding-window layer could hold."""
    seen: list[tuple[int, int]] = []
    before = TreeForward.masks

    def masks(forward: TreeForward, trees: Any) -> Any:
        found = before(forward, trees)
        cache = forward.layout.cache
        sizes = [group.buffer.shape[3] for group in cache._store.groups if group.window is not None]
        if forward.holds is not None:
            seen.append((cache.base, max(sizes, default=0)))
        return found

    monkeypatch.setattr(TreeForward, "masks", masks)
    monkeypatch.setattr(buffers, "_TREE", 8)  # so that buffers slide every few passes
    yield seen


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize(("batch", "sampled"), [(1, True), (3, False)])
def test_texts_scores_and_caches_are_plain_ones(name: str, batch: int, sampled: bool, held: list[Any]) -> None:
    model, given = tiny_model(name), prompts(batch, 30)
    settings = {"max_new_tokens": 60, "do_sample": sampled, "return_dict_in_generate": True, "output_logits": True}
    plain = run(model, given, use_lookahead=False, **settings)
    for strategy in (Lookahead(nodes=5), Jacobi()):
        ours = run(model, given, use_lookahead=True, lookahead_strategy=strategy, **settings)
        same_outputs(ours, plain, model.dtype, 1e-9 if model.dtype == torch.float64 else 1e-4)
    assert held[-1][0] > 80
    assert batch > 1 or max(size for _, size in held) <= 48, "a window of 6 needs no more"
    assert all(size for _, size in held)


@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_traced_passes_slide_along(name: str, held: list[Any]) -> None:
    model = fresh_model(name)
    for _ in range(3):
        same_as_plain(model, prompts(1, 20), Lookahead(nodes=6), max_new_tokens=80)
    assert any(traces.made for traces in schedule._kept.of(model))
    assert max(size for _, size in held) <= 48


def test_after_a_long_prompt_no_more_is_held_than_by_plain_decoding() -> None:
    model = fresh_model("gemma3", sliding_window=40, max_position_embeddings=2048)
    given = prompts(1, 1000)
    plain = run(model, given, use_lookahead=False, max_new_tokens=1, return_dict_in_generate=True)[0][CACHE]
    usual = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    found: list[int] = []
    before = TreeCache.consolidate

    def consolidate(cache: TreeCache) -> None:
        before(cache)
        found.append(sum(buffer.nbytes for buffer in cache.buffers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeCache, "consolidate", consolidate)
        run(model, given, use_lookahead=True, max_new_tokens=50)
    assert found[-1] <= 1.15 * usual


def test_a_buffer_slides_where_the_next_token_begins_to_see() -> None:
    buffer = LayerBuffer(0, torch.zeros(1, 1, 1, 8, 1), Extent(4, 100, 8, window=3), 3)
    states = torch.arange(1.0, 6.0).view(1, 1, 5, 1)
    assert buffer.write(0, 0, states) is states
    assert (buffer.first, buffer.buffer.flatten().tolist()) == (2, [3, 4, 5, 0, 0, 0, 0, 0])
    buffer.open(5, 9)
    buffer.fresh[0][:] = torch.arange(6.0, 10.0).view(1, 1, 4, 1)
    assert buffer.history[0].flatten().tolist() == [3, 4, 5, 6, 7, 8, 9]
    one, two = torch.tensor([0]), torch.tensor([7])
    buffer.move(one, two, torch.tensor([5]))
    assert buffer.buffer.flatten().tolist() == [3, 4, 5, 8, 7, 8, 9, 0]
    buffer.oldest = 4
    buffer.open(6, 12)
    assert (buffer.first, buffer.buffer.shape[3]) == (4, 8)
    assert buffer.history[0].flatten().tolist()[:2] == [5, 8]
    buffer.open(6, 16)
    assert (buffer.first, buffer.buffer.shape[3] >= 12) == (4, True)
    assert buffer.history[0].flatten().tolist()[:2] == [5, 8]


def test_buffers_that_have_grown_apart_slide_together() -> None:
    cache = TreeCache(["sliding_attention", "sliding_attention"], 2)
    cache.reserve(Extent(20, 100, 4, window=8))
    states = torch.arange(20.0).view(1, 1, 20, 1)
    for layer in range(2):
        cache.update(states, states[..., :1].expand(1, 1, 20, layer + 1), layer)
    cache.consolidate()
    cache.keep([[0]])
    groups = cache._store.groups
    assert len(groups) > 1
    groups[0].grow(40)
    for _ in range(12):
        first = cache.make_room(3)
        assert {group.first for group in groups} == {first}
        assert first <= cache.base - 7
        for layer in range(2):
            new = torch.full((1, 1, 3, 1), float(cache.base))
            keys, values = cache.update(new, new.expand(1, 1, 3, layer + 1), layer)
            assert keys[0, 0, -10:-3, 0].tolist() == [float(slot) for slot in range(cache.base - 7, cache.base)]
            assert values.shape[2] == keys.shape[2] == cache.base + 3 - first
        cache.keep([[0]])


def test_layers_hold_everything_where_a_window_is_not_sure_to_be_enough() -> None:
    def window(model: Any, cache: Any = None) -> int | None:
        traits = ModelTraits.of(model)
        return held_window(model, traits, mask_rules(model, traits), cache)

    gemma = tiny_model("gemma3")
    assert window(gemma) == window(gemma, DynamicCache(config=gemma.config)) == 6
    assert window(tiny_model("mistral")) == 6
    filled = DynamicCache(config=gemma.config)
    gemma(torch.tensor([[5, 6, 7]]), **{CACHE: filled})
    for cache in (filled, DynamicCache(), StaticCache(config=gemma.config, max_cache_len=32)):
        assert window(gemma, cache) is None
    for name in ("llama", "llama4", "gpt2"):
        assert window(tiny_model(name)) is None


def test_a_cache_that_holds_everything_is_left_so() -> None:
    model, given = tiny_model("gemma3"), prompts(1, 20)
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    for use in (True, False):
        cache = DynamicCache()
        run(model, given | {CACHE: cache}, use_lookahead=use, **settings)
        assert [layer.keys.shape[2] for layer in cache.layers] == [31, 31]
    same_as_plain(model, given, max_new_tokens=12, prefill_chunk_size=7)

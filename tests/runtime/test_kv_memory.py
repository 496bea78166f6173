"""What keys and values take in a call, counted as the tensors whose last dimension nothing else has; and what stays."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model, sources
from helpers.graphs import waiting
from helpers.hybrids import hybrid
from helpers.medusa import random_heads
from helpers.models import F32, fresh_model, initialised, prompts, run, same_as_plain, tiny_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LogitsProcessorList

from lookahead import Jacobi, Lookahead, Medusa
from lookahead.draft.planner import Planner
from lookahead.generation.group import CallGroup
from lookahead.models.names import CACHE
from lookahead.runtime.cache import buffers
from lookahead.runtime.cache.buffers import Extent, LayerBuffer
from lookahead.runtime.cache.tree import TreeCache
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.tree import TreeModel
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier

pytestmark = pytest.mark.usefixtures("augmented")

CHANNELS = 24  # of a head
HEADS = 3


def wide_model(layers: int = 6, **changes: Any) -> Any:
    """A tiny Llama whose keys and values take much more than anything else of it."""
    config = LlamaConfig(
        vocab_size=48, hidden_size=18, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=CHANNELS, max_position_embeddings=4096, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **changes,
    )  # fmt: skip
    return initialised(config, dtype=torch.float32)


def bytes_of(layers: int, tokens: int, batch: int = 1) -> int:
    """What the keys and values of a text take in float32."""
    return 2 * layers * batch * HEADS * tokens * CHANNELS * 4


class LiveStates(TorchDispatchMode):
    """Notes the storages of keys and values that are alive.

    Attributes:
        peak: most bytes at once since it was last set to 0.
        least: storages of fewer bytes are what one layer computes, and are not counted.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.ndim >= 4 and tensor.shape[-1] == CHANNELS:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self._seen = {at: seen for at, seen in self._seen.items() if not seen[0].expired()}
        return sum(size for _, size in self._seen.values())


SMALL: dict[str, Any] = {"window_size": 4, "ngram_size": 3, "verification_set_size": 3, "seed": 1}
GREEDY: dict[str, Any] = {"do_sample": False}


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of tiny models are as many as those of large ones."""
    monkeypatch.setattr(buffers, "_LEAST_BYTES", 1)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of all buffers at the end of every prompt."""
    sizes: list[int] = []
    consolidate = TreeCache.consolidate

    def noted(cache: TreeCache) -> None:
        consolidate(cache)
        sizes.append(sum(buffer.untyped_storage().nbytes() for buffer in cache.buffers))

    monkeypatch.setattr(TreeCache, "consolidate", noted)
    return sizes


def text(length: int, batch: int = 1) -> dict[str, Tensor]:
    tokens = torch.randint(0, 48, (batch, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.mark.parametrize(("layers", "batch", "static"), [(2, 1, False), (9, 2, False), (6, 1, True)])
def test_peaks(layers: int, batch: int, static: bool, spread: None) -> None:
    """At the prompt's end 1.15 times what plain decoding holds, and the last layer's states while it computes them;
    while buffers grow 1.5 times. Afterwards nothing, or what the next call of static passes uses."""
    model, length, new = wide_model(layers), 1000, 150
    run(model, prompts(1), max_new_tokens=3, lookahead_strategy=Lookahead(**SMALL), **GREEDY)  # the self-test
    peaks: list[float] = []
    one = bytes_of(layers, 1, batch)
    counter = LiveStates(least=one * length // (2 * layers) * 9 // 10)

    def note(_module: Any, _args: Any, _kwargs: Any, outputs: Any) -> None:
        held = int(outputs[CACHE].get_seq_length())
        peaks.append(counter.peak / (one * max(held, length)))
        counter.peak = 0

    hook = model.register_forward_hook(note, with_kwargs=True)
    with counter:
        run(model, text(length, batch), max_new_tokens=1, **GREEDY)
        strategy = Lookahead(**SMALL, static=static)
        ours, _ = run(model, text(length, batch), max_new_tokens=new, lookahead_strategy=strategy, **GREEDY)
    hook.remove()
    assert peaks[1] <= peaks[0] + 0.15 + 1 / layers
    assert 1.15 < max(peaks[2:]) <= 1.5
    assert counter.live() == (sum(part.nbytes for part in waiting(model)[0].stock) if static else 0)
    assert counter.live() <= one * -(-(length + new + 64) // 256) * 256
    plain, _ = run(model, text(length, batch), max_new_tokens=new, **GREEDY)
    assert torch.equal(plain, ours)


def test_large_extents() -> None:
    """Little more than the text at any time, and never more than prompt, new tokens and one tree."""
    for granule in (16, 64):
        for prompt in (500, 3000, 8192, 131072):
            for new in (1, 64, 1024, 8192):
                extent = Extent(prompt, new, granule)
                assert prompt < extent.first <= max(1.15 * prompt, prompt + 64 + granule)
                capacity, bound = extent.first, -(-(prompt + new + 64) // 256) * 256
                while capacity < prompt + new:
                    grown = extent.after(capacity, capacity + 1)
                    assert capacity < grown <= min(bound, max(1.125 * capacity, capacity + 64 + granule))
                    capacity = grown
                assert extent.after(capacity, bound + 200) >= bound + 200


def test_chunks_and_earlier_turns(spread: None, ends: list[int]) -> None:
    """A prompt in pieces, and one that goes on where a cache of the caller's ends, go to their places at once."""
    model = wide_model(6)
    same_as_plain(model, text(500), max_new_tokens=9, prefill_chunk_size=100)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache, asked in zip(caches, ({}, {"use_lookahead": True}), strict=True):
        run(model, text(400), max_new_tokens=1, **{CACHE: cache}, **GREEDY, **asked)
        longer = torch.cat([text(400)["input_ids"], text(100)["input_ids"]], dim=1)
        inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        run(model, inputs, max_new_tokens=9, **{CACHE: cache}, **GREEDY, **asked)
    assert max(size / bytes_of(6, 500) for size in ends[-1:]) <= 1.16
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        assert ours.keys.untyped_storage().nbytes() == ours.keys.nbytes


def test_a_returned_cache_leaves_its_buffers_one_by_one(spread: None) -> None:
    """Never twice all keys and values, when a call hands its cache out."""
    model = wide_model(8)
    run(model, prompts(1), max_new_tokens=3, lookahead_strategy=Lookahead(**SMALL), **GREEDY)
    counter = LiveStates(least=1)
    store = TreeCache.store

    def stored(cache: TreeCache, given: Any, *, move: bool) -> None:
        counter.peak = 0
        store(cache, given, move=move)

    with pytest.MonkeyPatch.context() as patch, counter:
        patch.setattr(TreeCache, "store", stored)
        output, _ = run(model, text(500), max_new_tokens=9, use_lookahead=True, return_dict_in_generate=True, **GREEDY)
    held = bytes_of(8, 508)
    assert sum(2 * layer.keys.nbytes for layer in output[CACHE].layers) == held
    assert counter.peak <= 1.5 * held


def test_layers_whose_shapes_nobody_expects() -> None:
    """No entry of any buffer is left empty once the prompt is read."""
    shapes = [(2, 8), (2, 8), (1, 4), (2, 8), (1, 4), (1, 4), (3, 8)] * 3
    cache = TreeCache([None] * len(shapes), len(shapes))
    cache.reserve(Extent(32, 0))
    for layer, (heads, channels) in enumerate(shapes):
        states = torch.full((1, heads, 32, channels), float(layer))
        cache.update(states, states + 0.5, layer)
    cache.consolidate()
    slots = Extent(32, 0).first
    assert sum(buffer.numel() for buffer in cache.buffers) == sum(2 * h * slots * c for h, c in shapes)
    for number, layer in enumerate(cache.layers):
        assert layer.keys.unique().tolist() == [number] and layer.values.unique().tolist() == [number + 0.5]


@pytest.mark.parametrize("static", [False, True])
def test_growing_where_memory_is_short(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a larger buffer cannot be had, the smallest that will do is tried."""
    refused = []
    move = LayerBuffer._move

    def short(group: LayerBuffer, entries: int, capacity: int) -> None:
        if capacity > group.buffer.shape[3] + 64:
            refused.append(capacity)
            raise torch.OutOfMemoryError("no memory")
        move(group, entries, capacity)

    monkeypatch.setattr(LayerBuffer, "_move", short)
    monkeypatch.setattr(buffers, "_ROOM", 4)
    same_as_plain(wide_model(2), text(700), Lookahead(**SMALL, static=static), max_new_tokens=200)
    assert refused


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_eager", "gpt2", "mistral", "gemma2", "qwen2_mixed"])
def test_the_prompts_logits_are_plain_decodings_to_the_last_bit(name: str, batch: int, chunk: int | None) -> None:
    """Keys and values are read out of the middle of a buffer by the same kernels. (Windows of plain decoding's own
    cache drop slots between the pieces of a prompt.)"""
    if chunk and name not in ("llama", "llama_mha", "llama_eager", "gpt2"):
        pytest.skip("plain decoding reads other keys")
    model = initialised(tiny_model(name).config, dtype=F32, attention=tiny_model(name).config._attn_implementation)
    settings = GREEDY | {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    settings["prefill_chunk_size"] = chunk
    for length in (9, 33):
        plain, _ = run(model, prompts(batch, length), **settings)
        ours, _ = run(model, prompts(batch, length), use_lookahead=True, **settings)
        assert torch.equal(ours.logits[0], plain.logits[0])


KINDS = (TreeCache, LayerBuffer, TreeModel, LinearModel, TreeForward, Sequences, Verifier, Planner, CallGroup)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """What calls make, for as long as something refers to it; nothing is collected meanwhile."""
    made: list[weakref.ref[Any]] = []

    def watched(kind: Any) -> None:
        original = kind.__init__

        def noted(self: Any, *given: Any, **named: Any) -> None:
            original(self, *given, **named)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", noted)

    for kind in KINDS:
        watched(kind)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


def left(alive: list[weakref.ref[Any]]) -> list[str]:
    assert alive
    return [type(thing).__name__ for ref in alive if (thing := ref()) is not None]


WAYS: dict[str, Any] = {
    "automatic": Lookahead(),
    "windows": Lookahead(**SMALL),
    "jacobi": Jacobi(),
    "blocks": Jacobi(mode="jacobi"),
    "static": Lookahead(**SMALL, static=True),
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_for_the_collector(way: str, sample: bool, alive: list[weakref.ref[Any]]) -> None:
    model = fresh_model("llama")
    for batch in (1, 3):
        for more in ({}, {"return_dict_in_generate": True, "output_scores": True}):
            run(model, prompts(batch), max_new_tokens=24, do_sample=sample, lookahead_strategy=WAYS[way], **more)
            assert left(alive) == []


@pytest.mark.parametrize("way", WAYS)
def test_nothing_stays_of_a_call_that_fails(way: str, alive: list[weakref.ref[Any]]) -> None:
    def stops(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 12 + 9:
            raise ValueError("enough")
        return scores

    model, asked = fresh_model("llama"), {"lookahead_strategy": WAYS[way], "max_new_tokens": 60}
    with pytest.raises(ValueError, match="enough") as error:
        model.generate(**prompts(2), logits_processor=LogitsProcessorList([stops]), **asked)
    del error
    assert left(alive) == []


def test_nothing_stays_of_other_routes(alive: list[weakref.ref[Any]]) -> None:
    """Medusa's heads, states beside keys, linear drafts, encoder-decoder models, texts that end in plain passes."""
    model = tiny_model("llama")
    heads = random_heads(model)
    for strategy in (Medusa(heads), Medusa(heads, sources=("heads", "suffix"))):
        run(model, prompts(2), max_new_tokens=20, lookahead_strategy=strategy, **GREEDY)
    for name in ("qwen3_next", "zaya"):
        run(hybrid(name), prompts(1), max_new_tokens=20, use_lookahead=True, **GREEDY)
    run(seq2seq_model("bart"), sources("bart", 2), max_new_tokens=20, use_lookahead=True, **GREEDY)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    bounded = fresh_model("llama", rope_parameters=rope, max_position_embeddings=24)
    run(bounded, prompts(1), max_new_tokens=30, use_lookahead=True, return_dict_in_generate=True, **GREEDY)
    assert left(alive) == []

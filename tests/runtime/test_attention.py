"""Grouped-query attention under a mask, against repeated keys and values; over keys in chunks, and by its kernel."""

import threading
from typing import Any

import pytest
import torch
from helpers.graphs import attended, chunked, counting
from helpers.models import fresh_model, prompts, run, same_as_plain
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead import Lookahead
from lookahead.runtime import attention, split_attention
from lookahead.runtime.attention import grouped_attention, packed_attention, tree_forward
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs.buffers import Graph, StaticBuffers
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.registry import this_pass
from lookahead.runtime.split_attention import chunk_length, serves

pytestmark = pytest.mark.usefixtures("augmented")


def repeated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What every form must give: each query head with its own copy of its key head."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scale * query @ key.transpose(-1, -2) + mask
    return scores.softmax(-1) @ value


def example(groups: int, value_channels: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and mask of two rows, five nodes, nine slots and two key heads."""
    generator = torch.Generator().manual_seed(groups)
    query = torch.randn(2, 2 * groups, 5, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, 9, 8, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 2, 9, value_channels, generator=generator, dtype=torch.float64)
    hidden = torch.rand(2, 1, 5, 9, generator=generator) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, torch.finfo(torch.float64).min)
    return query, key, value, mask


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_channels", [8, 6])
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_packed_attention(groups: int, value_channels: int, nodes: int) -> None:
    """The form that CUDA takes, which runs anywhere; a mask may have one row for every node, or for every row of the
    batch, or hold truths, as linear drafts have them."""
    query, key, value, mask = example(groups, value_channels)
    query, mask = query[:, :, :nodes], mask[:, :, :nodes]
    for shared in (mask, mask[:, :, :1], mask[:1], mask[:1, :, :1]):
        expected = repeated(query, key, value, shared, 0.3)
        assert torch.allclose(packed_attention(query, key, value, shared, 0.3), expected)
        assert torch.allclose(packed_attention(query, key, value, shared > -1.0, 0.3), expected)
    if nodes == 1:  # without a mask it attends to everything
        expected = repeated(query, key, value, torch.zeros_like(mask), 0.3)
        assert torch.allclose(packed_attention(query, key, value, None, 0.3), expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [9, 3000])
def test_every_way_through_the_wrapper(groups: int, nodes: int, dtype: torch.dtype, slots: int) -> None:
    """Few slots and many, one node and several, with a mask and without, in both kinds of numbers."""
    generator = torch.Generator().manual_seed(nodes)
    query = torch.randn(2, 2 * groups, nodes, 32, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 2, slots, 32, generator=generator).to(dtype)
    mask = torch.zeros(2, 1, nodes, slots, dtype=dtype)
    mask[1, :, :, :4] = torch.finfo(dtype).min
    for given in [mask] if nodes > 1 else [mask, None]:
        inside = attended(query, key, value, given, 0.3)
        hidden = torch.zeros_like(mask) if given is None else given
        expected = repeated(*(tensor.double() for tensor in (query, key, value, hidden)), 0.3).transpose(1, 2)
        assert inside.dtype == dtype
        assert inside.is_contiguous()
        torch.testing.assert_close(inside.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_where_packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for many nodes, few elements or more threads than key heads; always for a single row in bfloat16."""

    def pays(heads: int, key_heads: int, nodes: int, slots: int, dtype: torch.dtype = torch.float32) -> bool:
        query, key = torch.empty(1, heads, nodes, 64, dtype=dtype), torch.empty(1, key_heads, slots, 64, dtype=dtype)
        return attention.packing_pays(query.shape, key.shape, query.dtype)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert pays(8, 2, 4, 1000)
    assert not pays(8, 2, 4, 100)
    assert not pays(8, 2, 9, 1000)
    assert not pays(8, 8, 1, 1000)
    assert pays(8, 8, 1, 1000, torch.bfloat16)
    assert pays(8, 2, 1, 100, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert not pays(8, 2, 4, 1000)
    assert pays(8, 2, 1, 1000, torch.bfloat16)


def test_the_last_one_out_restores() -> None:
    """Overlapping decodes in two threads leave the registry as it was, whichever ends first."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with grouped_attention():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with grouped_attention():
        thread.start()
        assert entered.wait(10)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    leave.set()
    thread.join()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_a_model_compiled_elsewhere_is_compiled_once_more_at_most() -> None:
    """It meets the wrapper while a decode runs, takes what was registered, and knows it when the next one runs."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    model = fresh_model("llama")
    forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = forward(tokens, use_cache=False).logits
        for _ in range(3):
            with grouped_attention(), tree_forward():
                assert torch.equal(forward(tokens, use_cache=False).logits, expected)
            assert torch.equal(forward(tokens, use_cache=False).logits, expected)
    assert len(compiled) <= 2
    torch._dynamo.reset()


CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


def long_example(
    dtype: torch.dtype, batch: int, groups: int, nodes: int, slots: int, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two key heads in a larger buffer, and a mask that hides most of the text from all, and all but a little of it
    from some: a chunk in the middle, whole chunks of a row, everything but one slot."""
    generator = torch.Generator().manual_seed(slots)
    query = torch.randn(batch, nodes, 2 * groups, channels, generator=generator).to(dtype).transpose(1, 2)
    states = torch.randn(2, batch, 2, slots + 50, channels, generator=generator).to(dtype)
    key, value = states[:, :, :, :slots]
    hidden = torch.rand(batch, 1, nodes, slots, generator=generator) < 0.3
    hidden[..., slots // 4 : slots // 2] = True
    hidden[:, :, -1, : slots - 1] = True
    hidden[0, :, 0, slots // 3 :] = True
    hidden[..., -1] = False
    return query, key, value, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


def in_chunks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, chunk: int) -> Tensor:
    with chunked(chunk):
        return attended(query, key, value, mask, 0.2)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("slots", "channels", "chunk"), [(512, 64, 128), (777, 80, 64), (300, 128, 256), (130, 64, 64)]
)
def test_chunks(dtype: torch.dtype, batch: int, groups: int, slots: int, channels: int, chunk: int) -> None:
    """Even and odd spans, with chunks of which some row sees nothing."""
    for nodes in (1, 5):
        query, key, value, mask = long_example(dtype, batch, groups, nodes, slots, channels)
        split = in_chunks(query, key, value, mask, chunk)
        exact = attended(*(tensor.double() for tensor in (query, key, value, mask)), 0.2)
        assert split.dtype == dtype
        assert split.shape == exact.shape
        torch.testing.assert_close(split.double(), exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        whole = in_chunks(query, key, value, mask, slots)
        torch.testing.assert_close(whole.double(), exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_at_all(lowest: float) -> None:
    """No row gets NaN, which a later layer would hand on to the others."""
    query, key, value, mask = long_example(torch.float32, 1, 2, 3, 256, 64)
    mask = torch.where(mask < 0, lowest, mask)
    mask[:, :, 1] = lowest
    split = in_chunks(query, key, value, mask, 64)
    assert split.isfinite().all()
    expected = attended(query, key, value, mask.clamp(min=-1e30), 0.2)
    torch.testing.assert_close(split[:, [0, 2]], expected[:, [0, 2]], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen2_mixed", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("static", [True, False])
def test_whole_texts(name: str, batch: int, static: bool) -> None:
    """Of models with windows and without, over a history in chunks of 16 slots."""
    with chunked(16):
        strategy = Lookahead(window_size=4, ngram_size=3, verification_set_size=3, seed=1, static=static)
        same_as_plain(fresh_model(name), prompts(batch), strategy, max_new_tokens=40)


def test_a_pass_packs_its_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers together, anew in the next pass, and kept no longer."""
    masks = counting(monkeypatch, attention.RowsMask, "__init__")
    passes = counting(monkeypatch, TreeForward, "call")
    model = fresh_model("llama", num_hidden_layers=3)
    with chunked(16):
        run(model, prompts(1), max_new_tokens=20, do_sample=False, lookahead_strategy=Lookahead(nodes=6, static=True))
    assert 0 < len(masks) <= len(passes)
    assert this_pass.masks is None


def test_a_mask_of_every_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass holds a few, and never takes one for another."""
    query, key, value, _ = long_example(torch.float64, 1, 2, 3, 64, 8)
    with tree_forward():
        for seed in range(12):
            hidden = torch.rand(1, 1, 3, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
            mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, -1e300)
            packed = attention.packed_attention(query, key, value, mask, 0.3)
            expected = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(packed, expected)
            assert len(this_pass.masks) <= 4


def test_the_number_of_chunks() -> None:
    """As many as fill the GPU, none where it is filled already, where the text is short, or on a CPU."""
    eight_heads = {nodes: 8 * -(-4 * nodes // 64) for nodes in (1, 64)}
    for nodes, blocks in eight_heads.items():
        length = chunk_length(1, blocks, 12288, 132)
        assert length % 64 == 0
        assert 100 <= blocks * -(-12288 // length) <= 264, nodes
        assert chunk_length(1, blocks, 700, 132) == 700
        assert chunk_length(1, blocks, 12288, 1) == 12288
    assert chunk_length(16, 32, 12288, 132) == 12288
    assert chunk_length(2, 8, 131072, 132) < 131072
    assert all(chunk_length(1, 8, slots, 132) >= 256 for slots in range(1024, 9000, 61))


def test_where_the_kernel_serves() -> None:
    """Not on a CPU."""
    states = torch.zeros(1, 2, 4, 64)
    assert not serves(states, states, states, torch.zeros(1, 1, 4, 4))


def test_alignment() -> None:
    """Sixteen bytes at once: of channels, rows and where they begin."""
    states = torch.zeros(2, 4, 100, 80, dtype=torch.bfloat16)
    assert split_attention._is_aligned(states)
    assert split_attention._is_aligned(states[:, :, 3:50])
    assert not split_attention._is_aligned(states[..., :76])
    assert not split_attention._is_aligned(states[..., 4:])
    assert not split_attention._is_aligned(torch.zeros(2, 4, 100, 81)[..., :80])
    assert not split_attention._is_aligned(states.transpose(2, 3))
    assert split_attention._is_aligned(torch.zeros(1, 2, 3, 4))


@pytest.mark.parametrize(("slots", "nodes"), [(777, 5), (768, 5), (777, 1), (768, 1)])
def test_rows_of_masks_are_aligned_on_an_accelerator(slots: int, nodes: int) -> None:
    """Whatever the span, also where one row serves all heads."""
    rows = split_attention.RowsMask(torch.zeros(2, 1, nodes, slots, device="meta"), nodes, 4).rows
    assert rows.shape == (2, 1, 4 * nodes, slots)
    assert not any(stride % 64 for stride in (rows.stride(0), rows.stride(2)))


@pytest.mark.parametrize(("batch", "nodes", "slots"), [(1, 1, 8320), (1, 64, 8331), (2, 5, 777)])
def test_how_the_kernel_of_an_accelerator_is_called(batch: int, nodes: int, slots: int) -> None:
    """With shapes that it takes; its log-sum-exp has more rows than the query."""
    query = torch.zeros(batch, 32, nodes, 128, dtype=torch.bfloat16, device="meta")
    key, value = torch.zeros(2, batch, 8, slots + 64, 128, dtype=torch.bfloat16, device="meta")[:, :, :, :slots]
    mask = torch.zeros(batch, 1, nodes, slots, dtype=torch.bfloat16, device="meta")
    for chunk in (512, slots):
        output = in_chunks(query, key, value, mask, chunk)
        assert output.shape == (batch, nodes, 32, 128)
        assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_planned_passes(nodes: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to cuDNN's kernel, single nodes whole and without repeated keys; if it fails, it is not asked again."""
    query, key, value, mask = long_example(torch.float32, 2, 4, nodes, 256, 64)
    asked = []

    def cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, with_sums: bool, *, scale: float) -> Any:
        asked.append(tuple(query.shape))
        if fails:
            raise RuntimeError("no valid execution plans")
        if query.shape[1] != key.shape[1]:
            return functional.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=True), bias
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, sums = attend(query, key, value, attn_mask=bias, scale=scale)
        return output, sums[..., None]

    monkeypatch.setattr(split_attention, "_can_plan", lambda *_: True)
    monkeypatch.setattr(split_attention, "_no_plan", set())
    monkeypatch.setattr(split_attention, "_processors", lambda _: 132)
    monkeypatch.setattr(split_attention, "_LEAST_CHUNK", 64)
    monkeypatch.setattr(split_attention, "_KERNEL_KEYS", 0)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    chunk_length.cache_clear()
    packed, rows = query.reshape(2, 2, 4 * nodes, 64), split_attention.RowsMask(mask, nodes, 4)
    expected = functional.scaled_dot_product_attention(query, key, value, mask.clamp(min=-1e30), enable_gqa=True)
    for _ in range(2):
        output = split_attention.fused_attention(packed, key, value, rows, None, planned=True)
        torch.testing.assert_close(output.reshape(expected.shape), expected, atol=2e-6, rtol=2e-6)
    chunk_length.cache_clear()
    whole = (2, 8, 1, 64)
    assert asked[0] == whole if nodes == 1 else asked[0][:1] + asked[0][2:] == (2, 12, 64)
    assert len(asked) == 1 if fails else len(asked) >= 2
    assert nodes > 1 or set(asked) == {whole}


def test_plans_are_for_long_histories_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of such spans are made anew then; those of shorter ones stay."""
    monkeypatch.setattr(static_buffers, "_PLANNED_AFTER", 3)
    monkeypatch.setattr(static_buffers, "may_plan", lambda device: True)
    buffers = StaticBuffers(1, torch.float32, torch.device("cpu"))
    graphs = {(1, 256): Graph(lambda: None, None, 0, None), (1, 2048): Graph(lambda: None, None, 0, None)}  # type: ignore[arg-type]
    buffers.graphs = dict(graphs)
    assert [buffers.plans(span) for span in (256, 2048, 3072, 256)] == [False] * 4
    assert buffers.graphs == graphs
    assert [buffers.plans(span) for span in (2048, 256, 4096)] == [True, False, True]
    assert list(buffers.graphs) == [(1, 256)]
    monkeypatch.undo()
    assert not buffers.plans(4096), "nor for another device than was tried"

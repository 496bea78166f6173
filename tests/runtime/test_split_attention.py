"""Attention over keys in chunks, and the kernel by name, against the plain one; on a CPU by its own kernel."""

from typing import Any

import pytest
import torch
from helpers.graphs import chunked, counting
from helpers.models import fresh_model, prompts, run
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead import Lookahead
from lookahead.runtime import attention, split_attention
from lookahead.runtime.attention import grouped_attention, tree_forward
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs.buffers import Graph, StaticBuffers
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.split_attention import chunk_length, serves

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


def example(
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


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, chunk: int | None) -> Tensor:
    """Through the wrapper, inside a pass."""
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = query.shape[1] // key.shape[1], False
    with grouped_attention(), tree_forward():
        wrapper = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if chunk is None:
            output, _ = wrapper(module, query, key, value, mask, scaling=0.2)
        else:
            with chunked(chunk):
                output, _ = wrapper(module, query, key, value, mask, scaling=0.2)
    return output


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("slots", "channels", "chunk"), [(512, 64, 128), (777, 80, 64), (300, 128, 256), (130, 64, 64)]
)
def test_chunks(dtype: torch.dtype, batch: int, groups: int, slots: int, channels: int, chunk: int) -> None:
    """Even and odd spans, with chunks of which some row sees nothing."""
    for nodes in (1, 5):
        query, key, value, mask = example(dtype, batch, groups, nodes, slots, channels)
        split = attended(query, key, value, mask, chunk)
        exact = attended(*(tensor.double() for tensor in (query, key, value)), mask.double(), None)
        assert split.dtype == dtype
        assert split.shape == exact.shape
        torch.testing.assert_close(split.double(), exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        whole = attended(query, key, value, mask, slots)
        torch.testing.assert_close(whole.double(), exact, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_at_all(lowest: float) -> None:
    """No row gets NaN, which a later layer would hand on to the others."""
    query, key, value, mask = example(torch.float32, 1, 2, 3, 256, 64)
    mask = torch.where(mask < 0, lowest, mask)
    mask[:, :, 1] = lowest
    split = attended(query, key, value, mask, 64)
    assert split.isfinite().all()
    expected = attended(query, key, value, mask.clamp(min=-1e30), None)
    torch.testing.assert_close(split[:, [0, 2]], expected[:, [0, 2]], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen2_mixed", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.usefixtures("augmented")
def test_whole_texts(name: str, batch: int, static: bool) -> None:
    """Of models with windows and without, over a history in chunks of 16 slots."""
    model, settings = fresh_model(name), {"max_new_tokens": 40, "do_sample": False}
    plain, _ = run(model, prompts(batch), **settings)
    with chunked(16):
        strategy = Lookahead(window_size=4, ngram_size=3, verification_set_size=3, seed=1, static=static)
        ours, _ = run(model, prompts(batch), lookahead_strategy=strategy, **settings)
    assert torch.equal(ours, plain)


@pytest.mark.usefixtures("augmented")
def test_a_pass_packs_its_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers together, anew in the next pass, and kept no longer."""
    masks = counting(monkeypatch, attention.RowsMask, "__init__")
    passes = counting(monkeypatch, TreeForward, "call")
    model = fresh_model("llama", num_hidden_layers=3)
    with chunked(16):
        run(model, prompts(1), max_new_tokens=20, do_sample=False, lookahead_strategy=Lookahead(nodes=6, static=True))
    assert 0 < len(masks) <= len(passes)
    assert attention._thread.masks is None


def test_a_mask_of_every_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass holds a few, and never takes one for another."""
    query, key, value, _ = example(torch.float64, 1, 2, 3, 64, 8)
    with tree_forward():
        for seed in range(12):
            hidden = torch.rand(1, 1, 3, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
            mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, -1e300)
            packed = attention.packed_attention(query, key, value, mask, 0.3)
            expected = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(packed, expected)
            assert len(attention._thread.masks) <= 4


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
        output = attended(query, key, value, mask, chunk)
        assert output.shape == (batch, nodes, 32, 128)
        assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_planned_passes(nodes: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to cuDNN's kernel, single nodes whole and without repeated keys; if it fails, it is not asked again."""
    query, key, value, mask = example(torch.float32, 2, 4, nodes, 256, 64)
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


@pytest.mark.usefixtures("augmented")
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

"""Grouped-query attention under a mask, against repeated keys and values."""

import threading

import pytest
import torch
from helpers.models import fresh_model
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.runtime import attention
from lookahead.runtime.attention import grouped_attention, packed_attention, tree_forward


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
def test_packed_attention(groups: int, value_channels: int) -> None:
    """The form that CUDA takes, which runs anywhere."""
    tensors = example(groups, value_channels)
    assert torch.allclose(packed_attention(*tensors, 0.3), repeated(*tensors, 0.3))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_wrapper_inside_and_outside_a_pass(groups: int) -> None:
    """Both ways give the same numbers, and outside a pass the wrapper hands on what it was given."""
    query, key, value, mask = example(groups)
    module = torch.nn.Module()
    module.num_key_value_groups = groups
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with grouped_attention():
        wrapper = ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert wrapper is not before
        outside, _ = wrapper(module, query, key, value, mask, scaling=0.3)
        with tree_forward():
            inside, _ = wrapper(module, query, key, value, mask, scaling=0.3)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    expected = repeated(query, key, value, mask, 0.3).transpose(1, 2)
    assert torch.allclose(inside, expected)
    assert torch.equal(outside, before(module, query, key, value, mask, scaling=0.3)[0])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_packed_attention_of_one_node(groups: int, masked: bool) -> None:
    """One node, which may be one row in all; without a mask it attends to everything."""
    query, key, value, mask = example(groups)
    query, mask = query[:, :, :1], mask[:, :, :1] if masked else torch.zeros_like(mask[:, :, :1])
    packed = packed_attention(query, key, value, mask if masked else None, 0.3)
    assert torch.allclose(packed, repeated(query, key, value, mask, 0.3))


@pytest.mark.parametrize("nodes", [1, 3])
def test_packed_attention_under_a_mask_of_truths(nodes: int) -> None:
    """Linear drafts have such masks."""
    query, key, value, mask = example(2)
    query, mask = query[:, :, :nodes], mask[:, :, :nodes]
    assert torch.allclose(packed_attention(query, key, value, mask > -1.0, 0.3), repeated(query, key, value, mask, 0.3))


def test_packed_attention_under_one_mask_for_all_nodes() -> None:
    """A mask may have one row for every node, or for every row of the batch."""
    query, key, value, mask = example(2)
    for shared in (mask[:, :, :1], mask[:1], mask[:1, :, :1]):
        assert torch.allclose(
            packed_attention(query, key, value, shared, 0.3), repeated(query, key, value, shared, 0.3)
        )


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
    module = torch.nn.Module()
    module.num_key_value_groups = groups
    module.is_causal = False
    for given in [mask] if nodes > 1 else [mask, None]:
        with grouped_attention(), tree_forward():
            wrapper = ALL_ATTENTION_FUNCTIONS["sdpa"]
            inside, _ = wrapper(module, query, key, value, given, scaling=0.3)
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

"""Grouped-query attention under a mask, against repeated keys and values."""

import threading

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.attention import fused_pass, grouped_attention, packed_attention


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
        with fused_pass():
            inside, _ = wrapper(module, query, key, value, mask, scaling=0.3)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    expected = repeated(query, key, value, mask, 0.3).transpose(1, 2)
    assert torch.allclose(inside, expected)
    assert torch.equal(outside, before(module, query, key, value, mask, scaling=0.3)[0])


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

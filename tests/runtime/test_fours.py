"""Attention in the order of a kernel that adds in fours, in batches, and what a trial of it finds."""

from collections.abc import Iterator

import pytest
import torch
from helpers.ordered import Pass
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jacobi import TokenTree
from lookahead.runtime.attention_trials import IN_FOURS, IN_ORDER, PACKED, SINGLY, tried
from lookahead.runtime.ordered_attention import attend, obstacle
from lookahead.runtime.singly import how_of

pytestmark = pytest.mark.skipif(
    obstacle() is not None or how_of(16, 2) < IN_FOURS, reason="torch's kernel for a single token adds in another order"
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [(6, 2, 64), (6, 3, 32), (8, 2, 24)])
def test_sequences_of_a_padded_batch_have_the_bits_of_that_batch(heads: tuple[int, int, int]) -> None:
    """Where torch's threads take heads of several sequences each, in room that lies elsewhere in memory."""
    how, layer = how_of(heads[2], heads[0] // heads[1]), torch.nn.Module()
    layer.num_key_value_groups = heads[0] // heads[1]  # type: ignore[assignment]
    for length in (*range(41, 49), 600):
        torch.manual_seed(length)
        given = Pass([TokenTree.from_parents([0], [-1])] * 3, [length] * 3, [0, 7, 30], heads)
        given.sequences[:, 3] = how | SINGLY if how & PACKED else how
        given.sequences[:, 5], given.sequences[:, 6] = torch.arange(3), 3
        given.query.zero_()
        for row, pad in enumerate(given.pads):  # of whose values roundings alone are left
            half = (length - pad) // 2
            first = torch.randn(heads[1], half, heads[2]) * torch.randint(-6, 7, (heads[1], half, heads[2])).exp2()
            given.value[row, :, pad + half : length] = 0.0
            given.value[row, :, pad : pad + 2 * half] = torch.cat([first, -first.flip(1)], 1).bfloat16()
        given.value[:, :, length:] *= 2.0**-16
        shown = torch.arange(length + 1) >= torch.tensor(given.pads)[:, None, None, None]
        plain = sdpa_attention_forward(layer, given.query, given.key, given.value, shown, scaling=given.scale)[0]
        found = attend(given.query, given.key, given.value, given.mask, given.sequences, given.scale)
        assert torch.equal(plain, found)


@pytest.mark.parametrize(("group", "moved"), [(3, True), (3, False), (8, False)])
def test_a_trial_finds_a_single_rounding(
    group: int, moved: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that is computed elsewhere in memory, if threads are several; of a single number."""
    attended = torch.ops.lookahead.attended

    def nearly(*given: torch.Tensor) -> torch.Tensor:
        if moved:
            given[4][:, 5:7] += 3  # the last of four
            return attended(*given)
        found = attended(*given)
        found.view(torch.int16)[0, 0, 0, 0] ^= 1
        return found

    assert tried(64, group) >= IN_FOURS
    monkeypatch.setattr(torch.ops.lookahead, "attended", nearly)
    assert (tried(64, group) == IN_ORDER) == (not moved or threads > 1)

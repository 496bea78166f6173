"""Attention in the order of the text: right, and the same bits wherever a text lies and whatever is beside it."""

import pytest
import torch
from helpers.ordered import LOWEST, Pass, passes
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jacobi import TokenTree
from lookahead.runtime.ordered_attention import attend, obstacle, serves
from lookahead.runtime.registry import During
from lookahead.runtime.turns import Turns, steps_of

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@settings(max_examples=60, deadline=None)
@given(passes())
def test_numbers_are_attention_and_follow_the_text_alone(given: Pass) -> None:
    found = given.ours()
    exact = (states.double() for states in (given.query, given.key, given.value))
    right = scaled_dot_product_attention(*exact, attn_mask=given.mask.double(), enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found.double(), right, atol=0.02, rtol=0.02)
    for row, tree in enumerate(given.trees):
        for node in range(len(tree)):  # alone, behind its text, which is all there is
            key, value = given.text(row, node, given.key), given.text(row, node, given.value)
            slots = key.shape[2]
            place = torch.tensor([[0, slots - 1, slots - 1, 0, 0, 0, 1, 0]], dtype=torch.int32)
            alone = attend(given.query[row : row + 1, :, node : node + 1], key, value, None, place, given.scale)
            assert torch.equal(alone[0, 0], found[row, node])


@settings(max_examples=60, deadline=None)
@given(passes())
def test_nodes_in_their_turns_have_plain_decodings_bits(given: Pass) -> None:
    """Those of transformers' own call for the last token of each node's text; keys and values stay as they were."""
    before, padded = given.key.clone(), any(given.pads)
    turns, layer = [], torch.nn.Module()
    layer.num_key_value_groups = given.heads[0] // given.heads[1]  # type: ignore[assignment]
    for tree, length, pad in zip(given.trees, given.lengths, given.pads, strict=True):
        shown = None
        if padded:
            shown = torch.ones(1, 1, 1, length + given.width, dtype=torch.bool)
            shown[..., :pad] = False
        steps = steps_of(tree, given.width, length == given.base)
        turns.append(Turns(length, given.base + given.width, shown, steps, True))
    with During(turns=turns):
        found = given.ours()
    for row, (tree, length, pad) in enumerate(zip(given.trees, given.lengths, given.pads, strict=True)):
        held = [*range(length), *range(given.base, given.base + given.width)]
        assert torch.equal(given.key[row][:, held], before[row][:, held])
        for node in range(len(tree)):
            slots = [*range(length), *(given.base + above for above in given.path(row, node))]
            key, value = (states[row : row + 1][:, :, slots] for states in (given.key, given.value))
            mask = None
            if padded:
                mask = torch.ones(1, 1, 1, len(slots), dtype=torch.bool)
                mask[..., :pad] = False
            query = given.query[row : row + 1, :, node : node + 1]
            plain = sdpa_attention_forward(layer, query, key, value, mask, scaling=given.heads[2] ** -0.5)[0]
            assert torch.equal(plain[0, 0], found[row, node])


def test_a_tree_may_see_no_more_than_a_window() -> None:
    torch.manual_seed(0)
    whole = Pass([TokenTree.chain(0, [1, 2])], [200], [0], (4, 2, 16))
    whole.mask[..., :150] = LOWEST
    key, value, mask = whole.key[:, :, 100:], whole.value[:, :, 100:], whole.mask[..., 100:]
    held = attend(whole.query, key, value, mask, whole.sequences, 0.25)
    assert torch.equal(whole.ours(), held)  # a layer that has dropped what nobody sees


def test_only_what_the_kernel_knows_is_served() -> None:
    query, key = torch.zeros(1, 4, 2, 16).bfloat16(), torch.zeros(1, 2, 9, 16).bfloat16()
    assert serves(query, key, key, None) and serves(query, key, key, torch.zeros(1, 1, 2, 9).bfloat16())
    assert not serves(query.float(), key.float(), key.float(), None)
    assert not serves(query, key, key[..., :8], None)
    assert not serves(query, key, key, torch.zeros(1, 4, 2, 9).bfloat16())
    assert not serves(query, key, key, torch.ones(1, 1, 2, 9, dtype=torch.bool))


@pytest.mark.parametrize("wrong", [[0, 9, 7, 0, 0], [3, 2, 7, 0, 0], [-1, 7, 7, 0, 0], [0, 7, 7, 0, 2], [0, 7, 7, 0]])
def test_places_that_cannot_be_are_refused(wrong: list[int]) -> None:
    query, key = torch.zeros(1, 4, 2, 16).bfloat16(), torch.zeros(1, 2, 9, 16).bfloat16()
    with pytest.raises(ValueError, match="expected slots, masks and places of the same sequences and nodes"):
        attend(query, key, key, None, torch.tensor([[*wrong[:3], 0, 0, *wrong[3:]]], dtype=torch.int32), 0.25)

"""Attention of many nodes at once: each has plain decoding's bits, or the trial says that there is none such."""

import pytest
import torch
from helpers.ordered import LOWEST, Pass, passes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jacobi import TokenTree
from lookahead.runtime import attention_trials
from lookahead.runtime.attention_trials import IN_FOURS, IN_ORDER, PACKED, SINGLY, tried
from lookahead.runtime.ordered_attention import attend, obstacle
from lookahead.runtime.singly import how_of

pytestmark = pytest.mark.skipif(
    obstacle() is not None or not how_of(16, 2), reason="torch's kernel for a single token adds in another order here"
)


def computed(given: Pass, how: int, window: int, dropped: int) -> torch.Tensor:
    """A pass's attention, in a layer with a window (0 = none) that has ``dropped`` slots."""
    given.sequences[:, 3], given.sequences[:, 4] = how | SINGLY if how & PACKED and any(given.pads) else how, window
    for row, (tree, length) in enumerate(zip(given.trees, given.lengths, strict=True)):
        for node in range(len(tree)) if window else ():
            places = torch.arange(given.base + given.width)
            places[given.base :] = length + given.width  # hidden anyway, or
            for above in given.path(row, node):
                places[given.base + above] = length + tree.depths[above]
            given.mask[row, 0, node, places <= length + tree.depths[node] - window] = LOWEST
    key, value, mask = (each[..., dropped:, :] for each in (given.key, given.value, given.mask.mT))
    return attend(given.query, key, value, mask.mT.contiguous(), given.sequences, given.scale, int(window > 0))


@pytest.mark.parametrize("window", [0, 12, 90])
@settings(max_examples=60, deadline=None)
@given(passes(), st.booleans())
def test_nodes_that_are_computed_singly_have_plain_decodings_bits(window: int, given: Pass, drops: bool) -> None:
    """Those of transformers' own call for the last token of each node's text, in a layer with a window, too."""
    (many, key_heads, channels), layer = given.heads, torch.nn.Module()
    how = how_of(channels, many // key_heads) if many > 1 and given.query.dtype == torch.bfloat16 else 0
    shared = how >= IN_FOURS and key_heads == 1 and (window or any(given.pads))  # by threads
    if not how or shared:
        return
    layer.num_key_value_groups = many // key_heads  # type: ignore[assignment]
    found = computed(given, how, window, max(0, min(given.lengths) + 1 - window) if drops and window else 0)
    for row, (tree, length, pad) in enumerate(zip(given.trees, given.lengths, given.pads, strict=True)):
        for node in range(len(tree)):
            slots = [*range(length), *(given.base + above for above in given.path(row, node))]
            shown = torch.arange(len(slots)) >= pad
            first = max(0, len(slots) - window) if window else 0  # plain decoding has dropped what is before it
            key, value = (states[row : row + 1][:, :, slots[first:]] for states in (given.key, given.value))
            mask = shown[None, None, None, first:] if any(given.pads) or 0 < window == len(slots) - first else None
            query = given.query[row : row + 1, :, node : node + 1]
            plain = sdpa_attention_forward(layer, query, key, value, mask, scaling=channels**-0.5)[0]
            assert torch.equal(plain[0, 0], found[row, node])


def test_single_rows_and_tiles_may_take_turns() -> None:
    """Of channels that fill no vector: those that do not reach the end of a window, and those behind it."""
    torch.manual_seed(0)
    tree = TokenTree.from_parents([0] * 9, [-1, 0, 1, 2, 3, 0, 5, 2, 7])
    whole = Pass([tree], [38], [0], (8, 2, 24))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = computed(whole, PACKED, 40, 0)
        for node in range(len(tree)):  # each by itself
            alike = torch.full([len(tree)], node)
            query, mask = whole.query.index_select(2, alike), whole.mask.index_select(2, alike)
            places = whole.sequences.clone()
            places[0, 7:] = tree.depths[node]
            alone = attend(query, whole.key, whole.value, mask, places, whole.scale, 1)
            assert torch.equal(found[:, node], alone[:, node])
    finally:
        torch.set_num_threads(threads)


def test_a_window_has_to_be_held() -> None:
    with pytest.raises(ValueError, match="expected slots, masks and places"):
        computed(Pass([TokenTree.chain(0, [1, 2])], [200], [0], (4, 2, 16)), SINGLY, 60, 150)


@pytest.mark.parametrize("kind", ["another order", "heads together"])
def test_a_trial_finds_what_is_not_plain_decodings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "another order":  # in one of 100,000 numbers
        attend = torch.ops.lookahead.attended

        def nearly(*given: object) -> torch.Tensor:
            found = attend(*given)
            found[0, 3, 2, 1] *= 1.0 + 2.0**-7
            return found

        monkeypatch.setattr(torch.ops.lookahead, "attended", nearly)
    else:
        monkeypatch.setattr(attention_trials, "SINGLY", IN_ORDER)
    assert tried(16, 8) == IN_ORDER

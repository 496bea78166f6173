"""Kept KV caches: the longest common prefix, bounds, and texts that stay plain ones."""

import pytest
import torch
from helpers.models import counting_model, prompts, tiny_model

from lookahead.generation.conversations import Conversations
from lookahead.models.names import CACHE


def text_of(model: object, length: int = 40) -> list[int]:
    return list(prompts(1, length)["input_ids"][0].tolist())


@pytest.mark.usefixtures("augmented")
def test_texts_are_plain_ones() -> None:
    model = tiny_model("llama")
    kept, ids, found = Conversations(model), text_of(model), []
    for turn in range(5):
        cache, cached = kept.take(ids)
        found.append(cached)
        given, settings = torch.tensor([ids]), {"max_new_tokens": 12, "do_sample": turn % 2 == 1}
        torch.manual_seed(turn)
        plain = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        torch.manual_seed(turn)
        mask = torch.ones_like(given)
        ours = model.generate(given, attention_mask=mask, **{CACHE: cache}, use_lookahead=True, **settings)
        assert ours.tolist() == plain.tolist()
        kept.put(ours[0].tolist(), cache)
        assert len(kept) == 1
        ids = [*ours[0].tolist()[: -3 if turn == 2 else None], 5, 6, 7]
    assert found[0] == 0 and found == sorted(set(found))


def test_bounds() -> None:
    model = counting_model()
    kept = Conversations(model, most=2)
    for first in (1, 2, 3):
        ids = [first] * 30
        cache, _ = kept.take(ids)
        given = torch.tensor([ids])
        model(given, **{CACHE: cache}, use_cache=True)
        kept.put(ids, cache)
    assert len(kept) == 2 and kept.bytes > 0
    assert kept.take([1] * 30)[1] == 0
    cache, cached = kept.take([3] * 30)
    assert (cached, cache.get_seq_length(), len(kept)) == (29, 29, 1)
    kept.put([3] * 30, cache)
    kept._most_bytes = 1
    kept.put([4] * 30, kept.take([4] * 30)[0])
    assert len(kept) <= 1
    kept.clear()
    assert not len(kept)
    assert Conversations(model, most=0).take([1] * 30) == (None, 0)


def test_windows_are_not_kept() -> None:
    assert Conversations(tiny_model("mistral")).take([1] * 30) == (None, 0)


@torch.no_grad()
def test_conversations_with_a_common_beginning_keep_their_caches() -> None:
    model = counting_model()
    kept = Conversations(model)
    for last in (1, 2):
        ids = [5] * 20 + [last] * 100
        cache, cached = kept.take(ids)
        assert cached == (0 if last == 1 else 20)
        model(torch.tensor([ids[cached:]]), **{CACHE: cache}, use_cache=True)
        kept.put(ids, cache)
    for last in (1, 2):
        ids = [5] * 20 + [last] * 110
        cache, cached = kept.take(ids)
        assert cached == cache.get_seq_length() == 120
        plain = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(model(torch.tensor([ids[120:]]), **{CACHE: cache}).logits[0, -1], plain)

"""Kept beginnings: the longest one, what is shared, bounds, salts, and texts that stay plain ones."""

import pytest
import torch
from helpers.models import counting_model, fresh_model, prompts, tiny_model
from transformers import DynamicCache

from lookahead.generation.prefixes import BLOCK, Prefixes
from lookahead.models.names import CACHE


def keep(kept: Prefixes, model: object, ids: list[int], salt: str | None = None) -> None:
    """Let a model read a text behind what is known of it, and keep what it has read."""
    cache, cached = kept.take(ids, salt)
    model(torch.tensor([ids[cached:]]), **{CACHE: cache}, use_cache=True)  # type: ignore[operator]
    kept.keep(ids, cache, salt)


@pytest.mark.usefixtures("augmented")
def test_texts_are_plain_ones() -> None:
    model = tiny_model("llama")
    kept, ids, found = Prefixes(model), prompts(1, 40)["input_ids"][0].tolist(), []
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
        kept.keep(ours[0].tolist(), cache)
        ids = [*ours[0].tolist()[: -3 if turn == 2 else None], 5, 6, 7]
    assert found[0] == 0 and found == sorted(found) and len(set(found)) > 3


@torch.no_grad()
def test_a_common_beginning_is_kept_once() -> None:
    model = counting_model()
    kept = Prefixes(model)
    texts = [[5] * 3 * BLOCK + [last] * BLOCK for last in (1, 2, 3)]
    sizes = []
    for ids in texts:
        keep(kept, model, ids)
        sizes.append(kept.bytes)
    assert sizes == [sizes[0], sizes[0] * 5 // 4, sizes[0] * 6 // 4]
    for ids in texts:
        longer = [*ids, 9, 9]
        cache, cached = kept.take(longer)
        assert cached == cache.get_seq_length() == 4 * BLOCK
        expected = model(torch.tensor([longer])).logits[0, -1]
        torch.testing.assert_close(model(torch.tensor([longer[cached:]]), **{CACHE: cache}).logits[0, -1], expected)
    assert kept.take(texts[0])[1] == 3 * BLOCK, "the last token is read"
    assert kept.take([5] * 50)[1] == 3 * BLOCK and kept.take([5] * BLOCK)[1] == 0 and kept.take([7] * 50)[1] == 0


@torch.no_grad()
def test_several_rows_begin_alike() -> None:
    model = counting_model()
    kept, ids = Prefixes(model), [*range(3, 3 + 2 * BLOCK)]
    keep(kept, model, ids)
    cache = kept.cache(kept.find([*ids, 3]), 3)
    nexts = torch.tensor([[4], [5], [6]])
    expected = model(torch.cat([torch.tensor([ids]).expand(3, -1), nexts], 1)).logits[:, -1]
    torch.testing.assert_close(model(nexts, **{CACHE: cache}).logits[:, -1], expected)


@torch.no_grad()
def test_bounds() -> None:
    model = counting_model()
    kept = Prefixes(model)
    keep(kept, model, [4] * 2 * BLOCK)
    kept.most_bytes = 2 * kept.bytes
    for first in (5, 4, 6):
        keep(kept, model, [first] * (2 * BLOCK + 1))
    assert kept.bytes == kept.most_bytes
    lost, used, new = (len(kept.find([first] * 100)) for first in (5, 4, 6))
    assert (lost, used, new) == (0, 2, 2), "what was unused for longest goes"
    keep(kept, model, [7] * 4 * BLOCK)
    assert [len(kept.find([first] * 100)) for first in (4, 6, 7)] == [0, 0, 4]
    keep(kept, model, [7] * 3 * BLOCK + [8] * BLOCK)
    assert [len(kept.find([7] * 3 * BLOCK + [last] * 20)) for last in (7, 8)] == [3, 4], "the end of a text goes first"
    kept.clear()
    assert not kept.bytes and not kept.find([7] * 100)


@torch.no_grad()
def test_texts_of_another_salt_share_nothing() -> None:
    model = counting_model()
    kept, ids = Prefixes(model), [5] * 3 * BLOCK
    keep(kept, model, ids, "a")
    assert [len(kept.find(ids, salt)) for salt in (None, "a", "b")] == [0, 2, 0]


def test_what_is_not_kept() -> None:
    model = tiny_model("mistral")
    assert Prefixes(model).take([1] * 30) == (None, 0), "a window"
    assert Prefixes(tiny_model("llama"), 0).take([1] * 30) == (None, 0)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not Prefixes(fresh_model("llama", rope_parameters=dynamic)).keeps, "frequencies that change with the length"
    kept = Prefixes(model)
    kept.keep([1] * 30, DynamicCache())
    assert kept.keeps, "there is nothing yet"
    kept.keep([1] * 30, DynamicCache(config=model.config))
    assert not kept.keeps

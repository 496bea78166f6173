"""The proposer for vLLM, told what vLLM tells: rows that move, end, and wait."""

import random
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.integrations.vllm import LookaheadProposer


def proposer(most: int = 5, length: int = 64, rows: int = 4) -> LookaheadProposer:
    speculative = SimpleNamespace(num_speculative_tokens=most)
    model, scheduler = SimpleNamespace(max_model_len=length), SimpleNamespace(max_num_seqs=rows)
    parts = {"speculative_config": speculative, "model_config": model, "scheduler_config": scheduler}
    return LookaheadProposer(SimpleNamespace(**parts))


def asked(proposer: LookaheadProposer, texts: list[list[int]], sampled: list[list[int]]) -> list[list[int]]:
    table = np.full((len(texts) + 2, 80), 99, np.int32)  # what lies behind a text is stale
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts] + [0, 0], np.int32)
    return proposer.propose(sampled, lengths, table, slot_mappings=None)


def test_a_repetition_is_drafted() -> None:
    ours = proposer()
    assert asked(ours, [[1, 2, 3, 4, 5, 6, 1, 2, 3]], [[3]]) == [[4, 5, 6, 1, 2]]
    assert asked(ours, [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4]], [[4]])[0][:2] == [5, 6]


def test_what_others_wrote_is_drafted() -> None:
    ours = proposer()
    asked(ours, [[10, 11, 12, 13, 14]], [[12, 13, 14]])
    assert asked(ours, [[30, 31, 11, 12], [41, 12, 13]], [[12], [13]]) == [[13, 14], [14]]
    assert asked(ours, [[9, 10], [10, 11]], [[10], [11]]) == [[], [12, 13]]  # 11 after 10 was in a prompt


def test_waiting_and_full_rows_get_nothing() -> None:
    ours = proposer(length=10)
    text = [1, 2, 1, 2, 1, 2, 1, 2, 1]
    assert asked(ours, [text, text, [*text, 2]], [[], [1], [2]]) == [[], [2], []]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_rows_may_move_and_end(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randint(1, 6)
    ours = proposer(most, rows=3)
    texts = [[rng.randrange(4) for _ in range(rng.randint(2, 6))] for _ in range(rng.randint(1, 5))]
    for _ in range(12):
        rng.shuffle(texts)
        if len(texts) > 1 and rng.random() < 0.2:
            texts.pop()
        sampled = [[rng.randrange(4) for _ in range(rng.randint(0, 3))] for _ in texts]
        texts = [text + new for text, new in zip(texts, sampled, strict=True)]
        drafts = asked(ours, texts, sampled)
        assert len(drafts) == len(texts)
        for text, new, draft in zip(texts, sampled, drafts, strict=True):
            assert len(draft) <= max(0, min(most, 64 - len(text)))
            assert all(type(token) is int and 0 <= token < 4 for token in draft)
            assert new or not draft
        assert len(ours._requests) <= 6
        held = [tuple(request.text) for request in ours._requests.values()]
        for text, new in zip(texts, sampled, strict=True):
            assert not new or len(text) >= 64 or tuple(text) in held

"""Scores and logits that are noted for each written token."""

import weakref

import torch
from transformers import GenerationConfig

from lookahead.verify.records import Records


def test_lines_go_as_their_batch_is_put_together() -> None:
    """So no score is in memory twice at the end of a call."""
    config = GenerationConfig(output_scores=True, return_dict_in_generate=True)
    records = Records(config, batch=2)
    lines = {(row, index): torch.full((4,), 10.0 * row + index) for row in range(2) for index in range(3)}
    expected = [torch.stack([lines[row, index] for row in range(2)]) for index in range(3)]
    alive = [weakref.ref(line) for line in lines.values()]
    for (row, index), line in lines.items():
        records.note(row, index, line, line)
    del line
    lines.clear()
    assert records.of("logits") is None and records.taken("logits") is None
    taken = records.taken("scores")
    assert taken is not None and all(torch.equal(one, other) for one, other in zip(taken, expected, strict=True))
    assert all(line() is None for line in alive) and records.taken("scores") is None

"""Many calls in one process: 100,000 tokens, no difference from plain decoding, and memory that does not grow."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import counting_hybrid
from helpers.models import counting_model, fresh_model, prompts, run

from lookahead import Jacobi, Lookahead
from lookahead._per_model import resident_bytes, trim
from lookahead.draft.memory import exchange

TOKENS = 100_000
STRATEGIES = [
    None,
    Lookahead(window_size=7, ngram_size=4, verification_set_size=7, seed=0),
    Lookahead(nodes=16, seed=1),
    Jacobi(mode="hybrid", block_size=6, seed=2),
]


def _resident() -> int:
    """Bytes of this process that are in memory, without those that its heap keeps for later."""
    trim()
    return resident_bytes()


def _measured(models: list[Any]) -> tuple[int, int, int]:
    """Resident bytes, objects that the collector knows, and bytes in tensors.

    Without what drafts have learnt: that has a bound, which this many tokens do not reach.
    """
    for model in models:
        exchange(model)
    gc.collect()
    known = gc.get_objects()
    tensors = [found for found in known if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return _resident(), len(known), sum(found.nbytes for found in tensors)


@pytest.mark.conformance
@pytest.mark.usefixtures("augmented")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_a_hundred_thousand_tokens() -> None:
    """Greedy and sampled, automatic and fixed, trees and chains, texts of all lengths."""
    models: list[tuple[Any, int]] = [
        (fresh_model("llama"), 24),
        (counting_model(), 24),
        (fresh_model("mistral"), 12),
        (counting_hybrid("lfm2"), 4),
    ]
    rng = random.Random(0)
    written, call, marks = 0, 0, []
    while written < TOKENS:
        model, batch = models[call % len(models)]
        settings: dict[str, Any] = {
            "max_new_tokens": rng.choice([3, 40, 80]),
            "do_sample": bool(call // len(models) % 2),
            "eos_token_id": [rng.randrange(48)] if call % 3 == 0 else None,
        }
        strategy = STRATEGIES[call // 2 % len(STRATEGIES)]
        inputs = prompts(batch, rng.choice([4, 12, 30]), seed=call)
        plain, state = run(model, inputs, seed=call, **settings)
        ours, ours_state = run(model, inputs, seed=call, use_lookahead=True, lookahead_strategy=strategy, **settings)
        assert torch.equal(ours, plain), f"call {call} differs"
        assert torch.equal(ours_state, state), f"call {call} drew otherwise"
        written += plain[:, inputs["input_ids"].shape[1] :].numel()
        call += 1
        if written >= (len(marks) + 1) * TOKENS // 4:
            marks.append(_measured([model for model, _ in models]))
    (first, objects, tensors), (last, objects_after, tensors_after) = marks[0], marks[-1]
    assert call > 50
    assert last - first < 32 * 2**20, f"resident memory grew by {(last - first) >> 20} MiB"
    assert objects_after - objects < 0.05 * objects, f"{objects_after - objects} more objects than after a quarter"
    assert tensors_after - tensors < 2**20, f"tensors hold {tensors_after - tensors} bytes more"

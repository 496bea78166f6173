"""What a call leaves in the process's memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import fresh_model, prompts

from lookahead.runtime import heap

_CALLS = """
import gc, sys, torch, lookahead
from transformers import LlamaConfig, LlamaForCausalLM
gc.disable()
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, eos_token_id=None,
    num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=4096, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
lookahead.augment_all()
settings = {"use_lookahead": True} if sys.argv[1] == "ours" else {}
for index in range(int(sys.argv[2])):
    ids = torch.randint(500, (1, 3000), generator=torch.Generator().manual_seed(index))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **settings)
print(4096 * int(open("/proc/self/statm").read().split()[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_twenty_calls_with_long_prompts_leave_no_more_than_plain_ones() -> None:
    """With the garbage collector off, to within 5 %."""
    taken = {}
    for who in ("plain", "ours"):
        command = [sys.executable, "-c", _CALLS, who, "20"]
        taken[who] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken["ours"] <= 1.05 * taken["plain"]


@pytest.mark.usefixtures("augmented")
def test_what_a_long_call_frees_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda: trimmed.append)
    model = fresh_model("llama")
    model.generate(**prompts(1, 9), max_new_tokens=4, use_lookahead=True)
    assert not trimmed, "a short one leaves too little"
    monkeypatch.setattr(heap, "_LARGE", 1)
    model.generate(**prompts(1, 9), max_new_tokens=4, use_lookahead=True)
    assert trimmed == [0]


def test_a_c_library_without_such_a_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_trim", lambda: None)
    heap.hand_back(1 << 40)

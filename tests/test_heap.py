"""What a call leaves in the process's memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import fresh_model, prompts

from lookahead import _per_model as heap
from lookahead import release

_CALLS = """
import gc, sys, torch, lookahead
from transformers import LlamaConfig, LlamaForCausalLM
gc.disable()
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, eos_token_id=None,
    num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=4096, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
lookahead.augment_all()
strategies = {"automatic": lookahead.Lookahead(), "fixed": lookahead.Lookahead(nodes=24, pack=False, traces=False)}
settings = {} if sys.argv[1] == "plain" else {"lookahead_strategy": strategies[sys.argv[1]]}
calls, length, written = map(int, sys.argv[2:5])
for index in range(calls):
    ids = torch.randint(500, (1, length), generator=torch.Generator().manual_seed(index))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=written, do_sample=written > 8, **settings)
print(4096 * int(open("/proc/self/statm").read().split()[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize(
    ("who", "calls", "length", "written"), [("automatic", 20, 3000, 8), ("fixed", 24, 200, 100)], ids=["long", "short"]
)
def test_many_calls_leave_no_more_than_plain_ones(who: str, calls: int, length: int, written: int) -> None:
    """With the garbage collector off, to within 5 %."""
    taken = {}
    for each in ("plain", who):
        command = [sys.executable, "-c", _CALLS, each, *map(str, (calls, length, written))]
        taken[each] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken[who] <= 1.05 * taken["plain"]


@pytest.mark.usefixtures("augmented")
def test_what_a_long_call_frees_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda: trimmed.append)
    monkeypatch.setattr(heap, "_resident", 1 << 50)
    model = fresh_model("llama")
    model.generate(**prompts(1, 9), max_new_tokens=4, use_lookahead=True)
    assert not trimmed, "a short one leaves too little"
    monkeypatch.setattr(heap, "_LARGE", 1)
    model.generate(**prompts(1, 9), max_new_tokens=4, use_lookahead=True)
    assert trimmed == [0]


def test_what_many_short_calls_leave_goes_back_once_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does what is released."""
    trimmed: list[int] = []
    resident = 10_000
    monkeypatch.setattr(heap, "_trim", lambda: trimmed.append)
    monkeypatch.setattr(heap, "_resident", resident)
    monkeypatch.setattr(heap, "resident_bytes", lambda: resident)
    for resident, times in ((10_100, 0), (10_300, 1), (10_400, 1), (10_600, 2)):  # noqa: B007
        heap.hand_back(0)
        assert len(trimmed) == times
    trimmed.clear()
    release(fresh_model("llama"))
    assert trimmed == [0]


def test_a_c_library_without_such_a_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_trim", lambda: None)
    heap.hand_back(1 << 40)
    heap.trim()

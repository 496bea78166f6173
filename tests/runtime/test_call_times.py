"""What takes memory to make passes faster is made for calls that passes make long, not for those with long prompts."""

from typing import Any

import pytest
from helpers.models import fresh_model, prompts
from helpers.packing import AT_ONCE, packs

from lookahead import Lookahead
from lookahead.runtime import packing
from lookahead.runtime.packing import CallTimes, call_times, packing_of
from lookahead.runtime.tracing import schedule as tracing
from lookahead.runtime.tracing.schedule import Upgrades

pytestmark = pytest.mark.usefixtures("augmented")


def test_passes_count_where_they_are_most_of_the_time() -> None:
    """And older calls count less."""
    times = CallTimes()
    assert times.passes_count, "nothing is known yet"
    times.see(0, 400.0)
    for _ in range(20):
        times.see(5, 30.0)
    assert not times.passes_count
    for _ in range(10):
        times.see(5, 30.0)
    assert times.passes_count
    times = CallTimes()
    for _ in range(50):
        times.see(0, 400.0)
        times.see(5, 100.0)
    for _ in range(30):
        times.see(0, 10.0)
        times.see(5, 100.0)
    assert times.passes_count


@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("prompt_ms", [1e6, 1e-6])
def test_neither_traces_nor_packed_weights_for_long_prompts(prompt_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AT_ONCE.items():
        monkeypatch.setattr(packing, name, value)
    see = Upgrades.see

    def slow(self: Upgrades, nodes: int, ms: float, written: int) -> None:
        see(self, nodes, ms if nodes else prompt_ms, written)

    monkeypatch.setattr(Upgrades, "see", slow)
    model = fresh_model("llama").float()
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "use_lookahead": True}
    for _ in range(3):
        model.generate(**prompts(1), lookahead_strategy=Lookahead(nodes=3), **settings)
    dear = prompt_ms > 1.0
    assert call_times(model).passes_count != dear
    assert bool(tracing._kept.of(model)[-1].made) != dear
    assert bool(packing_of(model).weights) == (not dear and packs(model.dtype))

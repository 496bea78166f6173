"""Automatic mode: the text is plain decoding's whatever the sources, the curve and the batch."""

from typing import Any

import pytest
from helpers.automatic import FLAT, NAMES, USUAL, Oracle, drafted, nodes_of
from helpers.models import VOCAB, counting_model, tiny_model
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from lookahead import Lookahead
from lookahead.draft.context import RowContext
from lookahead.draft.latency import NODES, StepTimes

pytestmark = pytest.mark.usefixtures("augmented")

EACH = [(name,) for name in NAMES]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5, "top_k": 8}])
@pytest.mark.parametrize("strategy", [Lookahead(), Lookahead(nodes=12), Lookahead(sources=NAMES, tuning=FLAT)])
def test_plain_decodings_text(batch: int, sampled: dict[str, Any], strategy: Lookahead) -> None:
    """Chaotic and repetitive, batched with padding."""
    for model in (tiny_model("llama"), counting_model(sharpness=6.0)):
        drafted(model, strategy, batch, max_new_tokens=24, **sampled)


@pytest.mark.parametrize("sources", EACH, ids=str)
@pytest.mark.parametrize(("nodes", "batch"), [(1, 1), (5, 3), (40, 1), (None, 1), (None, 3)])
def test_each_source_alone(sources: tuple[str, ...], nodes: int | None, batch: int) -> None:
    strategy = Lookahead(sources=sources, nodes=nodes, tuning=None if nodes else FLAT, seed=1)
    stats = drafted(counting_model(), strategy, batch)
    assert set(stats.sources) <= set(sources)
    if batch == 1:
        drafted(tiny_model("llama"), strategy, do_sample=True, max_new_tokens=24)


@examples(8)
@given(
    st.lists(st.floats(0.05, 20.0), min_size=len(NODES), max_size=len(NODES)),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_text_never_depends_on_tuning(ms: list[float], batch: int, sample: bool, seed: int) -> None:
    times = StepTimes()
    for nodes, value in zip(NODES, ms, strict=True):
        times.add(nodes, 64, value)
    for model in (tiny_model("llama"), counting_model(sharpness=6.0)):
        drafted(model, Lookahead(tuning=times, sources=NAMES, seed=seed), batch, do_sample=sample, max_new_tokens=25)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("nodes", [None, 6])
def test_a_source_of_the_users_own(batch: int, nodes: int | None) -> None:
    made: list[Oracle] = []

    def oracle(row: RowContext) -> Oracle:
        made.append(Oracle(row))
        return made[-1]

    strategy = Lookahead(sources=(oracle, "suffix"), nodes=nodes, tuning=FLAT if nodes is None else None)
    stats = drafted(counting_model(), strategy, batch, max_new_tokens=200 if nodes is None else 40)
    assert len(made) == batch and all(source.passes for source in made)
    assert set(stats.sources) == {"oracle"}
    assert stats.mean_acceptance_length > 4
    drafted(tiny_model("llama"), strategy, batch, do_sample=True)


def test_a_source_that_is_always_wrong_is_soon_left_alone() -> None:
    """It asks for eight tokens a node and keeps none; on a curve that costs, nothing of it is drafted in the end."""

    class Wrong(Oracle):
        name = "wrong"
        priors = (0.3,) * 8

        def propose(self, state: int) -> list[tuple[int, int]]:
            return [(VOCAB - 1 - rank, rank) for rank in range(8)]

    stats = drafted(counting_model(), Lookahead(sources=(Wrong,), tuning=USUAL, stats="detailed"), max_new_tokens=120)
    assert stats.accepted == 0
    tail = nodes_of(stats)[-30:]
    assert sum(map(sum, tail)) <= 8

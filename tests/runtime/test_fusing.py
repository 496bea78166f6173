"""Operations that stand for several of torch's in a trace: the same bits, and nothing where they do not fit."""

from typing import Any

import pytest
import torch
from helpers.models import fresh_model
from helpers.ordered import Pass, passes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lookahead import _native
from lookahead.runtime.ordered_attention import obstacle
from lookahead.runtime.packed_layers import Invariance, Packed
from lookahead.runtime.tracing import fusing, record
from lookahead.runtime.tracing.replay import Kind

LANES = fusing._lanes() if _native.speedups is not None and _native.operations() else 0
pytestmark = pytest.mark.skipif(not LANES, reason="torch takes no operations in C, or adds in another order")
DTYPES = [torch.float32, torch.bfloat16]
TREE = Kind(batch=1, single=False, masked=True, packed=False)


@settings(max_examples=80, deadline=None)
@given(st.integers(16, 3000), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 9999))
def test_norms_have_torchs_bits(width: int, rows: int, dtype: torch.dtype, apart: bool, seed: int) -> None:
    torch.manual_seed(seed)
    states = 3.0 * torch.randn(2, rows, 3, width)
    states = states.to(dtype).transpose(1, 2) if apart else states.to(dtype)
    weight = torch.randn(width).to(dtype)
    ours = torch.ops.lookahead.normed(states.contiguous(), weight, 1e-6, LANES, 0)
    assert torch.equal(ours, fusing._norm(states, weight, 1e-6))
    ours = torch.ops.lookahead.normed(states.contiguous(), weight, 1e-6, LANES, 1)  # weights less 1
    assert torch.equal(ours, fusing._norm(states.float(), 1.0 + weight.float(), 1e-6).to(dtype))


def rotary(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As transformers' models turn states."""
    left, right = states.chunk(2, -1)
    return states * cosines + torch.cat([-right, left], -1) * sines


@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(1, most) for most in (3, 5, 40)), st.sampled_from([2, 6, 64]), st.sampled_from(DTYPES), st.booleans()
)
def test_rotary_positions_have_torchs_bits(
    batch: int, heads: int, nodes: int, channels: int, dtype: torch.dtype, alike: bool
) -> None:
    states = torch.randn(batch, nodes, heads, 3 * channels).to(dtype).transpose(1, 2)[..., channels:-channels]
    cosines, sines = (torch.randn(1 if alike else batch, 1, nodes, channels).to(dtype) for _ in range(2))
    ours = torch.ops.lookahead.rotated(states, cosines, sines)
    assert torch.equal(ours, rotary(states, cosines, sines))


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@settings(max_examples=40, deadline=None)
@given(passes(), st.booleans())
def test_attention_without_python_is_the_same(given: Pass, apart: bool) -> None:
    query = given.query.transpose(1, 2).contiguous().transpose(1, 2) if apart else given.query
    states = query, given.key, given.value, given.mask, given.sequences
    assert torch.equal(torch.ops.lookahead.attended(*states, given.scale, 0).transpose(1, 2), given.ours())


def test_what_does_not_fit_is_answered_with_nothing() -> None:
    rows, weight = torch.randn(2, 3, 16), torch.randn(16)
    operations = torch.ops.lookahead
    for wrong in (
        operations.normed(rows.half(), weight.half(), 1e-5, LANES, 0),
        operations.normed(rows, weight.bfloat16(), 1e-5, LANES, 0),
        operations.normed(rows, weight[:8], 1e-5, LANES, 0),
        operations.normed(rows[..., ::2], weight[:8], 1e-5, LANES, 0),
        operations.normed(rows.transpose(0, 1), weight, 1e-5, LANES, 0),
        operations.normed(torch.tensor(1.0), weight, 1e-5, LANES, 0),
        operations.normed(torch.empty(3, 0), torch.empty(0), 1e-5, LANES, 0),
        operations.rotated(*[torch.empty(1, 1, 1, 1026)] * 3),
        operations.rotated(rows[None], rows[None], rows[None]),
        operations.rotated(rows[None], rows[None, :1, :2], rows[None, :1]),
        operations.rotated(rows[None, ..., :15], rows[None, :1, :, :15], rows[None, :1, :, :15]),
        operations.attended(*[rows[None]] * 4, torch.zeros(1, 7).int(), 1.0, 0),
        operations.attended(*[rows[None].bfloat16()] * 4, torch.zeros(1, 7).int(), 1.0, 0),
        operations.attended(*[rows[None].bfloat16()] * 4, torch.zeros(1, 7), 1.0, 0),
        operations.attended(rows[None].half(), *[rows[None].bfloat16()] * 3, torch.zeros(1, 8).int(), 1.0, 0),
    ):
        assert wrong.shape == (0,)
    assert not operations.normed(torch.empty(0, 16), weight, 1e-5, LANES, 0).numel()


def recorded(
    monkeypatch: pytest.MonkeyPatch, model: Any, packed: Packed | None = None, kind: Kind = TREE
) -> tuple[Any, Any]:
    """A trace's function of a model's pass, and the graph it was made from."""
    graphs = []
    traced = record._traced
    monkeypatch.setattr(record, "_traced", lambda *given: graphs.append(traced(*given)) or graphs[-1])
    return record.record(model, kind, (), packed).function, graphs[-1]


def kinds(graph: Any) -> list[str]:
    return [node.kind() for node in graph.nodes()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_traces_have_fewer_operations(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm and every rotation of a model that has such; a model without is left with its own."""
    model = fresh_model(name).to(dtype)
    function, graph = recorded(monkeypatch, model)
    found = kinds(function.graph)
    assert len(found) < 0.8 * len(kinds(graph))
    layers = model.config.num_hidden_layers
    rotations = 0 if name == "gpt2" else 2 * layers
    assert found.count("lookahead::rotated") == rotations
    norms = {"llama": 2, "qwen3": 4, "gemma3": 6}.get(name)
    assert found.count("lookahead::normed") == (0 if norms is None else norms * layers + 1)
    assert "aten::rsqrt" not in found


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("kind", [TREE, Kind(batch=1, single=True, masked=False, packed=False)])
@pytest.mark.parametrize("turns", [0, 100])
def test_nodes_with_turns_are_attended_to_in_python(turns: int, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama").bfloat16()
    function, _ = recorded(monkeypatch, model, Packed({}, Invariance({}, turns)), kind)
    found, layers = kinds(function.graph), model.config.num_hidden_layers
    assert found.count("lookahead::attend") == (layers if turns else 0)
    assert found.count("lookahead::attended") == (0 if turns else layers)


@pytest.mark.parametrize(
    "wrong", ["lookahead::normed(%weight, %weight, %number, %lanes, %less)", "aten::mul(%rows, %weight)"]
)
def test_what_says_something_else_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is the tracer's own then."""
    right = "lookahead::normed(%dense, %weight, %number, %lanes, %less)"
    monkeypatch.setattr(fusing, "_NORMED", fusing._NORMED.replace(right, wrong))
    function, graph = recorded(monkeypatch, fresh_model("llama").bfloat16())
    assert str(function.graph) == str(graph)


def test_a_torch_without_such_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "CLEANED", ("cse", "no_such_pass"))
    function, graph = recorded(monkeypatch, fresh_model("llama").bfloat16())
    assert str(function.graph) == str(graph)


def test_nothing_where_the_order_of_sums_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "_LANES", ())
    assert not fusing._lanes()
    monkeypatch.setattr(fusing, "found_once", lambda *given: 0)
    assert fusing.fused(None, turns=False, masked=True) == []
    monkeypatch.setattr(_native, "speedups", None)
    assert fusing.fused(None, turns=False, masked=True) == []

"""What rows cost in a few linear layers, by a clock that the test moves; how many such layers are given at a time."""

from typing import Any

import pytest
import torch
from torch import nn

from lookahead.runtime import row_costs as module
from lookahead.runtime.layer_trials import RowRange
from lookahead.runtime.packed_layers import Invariance, Packed, limited_linear, packed_twin
from lookahead.runtime.row_costs import row_costs


class Clock:
    """A linear layer takes a millisecond a row; the first of a size, and each third one, take longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.sizes, self.weights = 0.0, list[int](), list[int]()
        monkeypatch.setattr(module, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(module, "linear", self.linear)

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        late = 1.0 if len(rows) not in self.sizes or len(self.sizes) % 3 == 2 else 0.0
        self.sizes.append(len(rows))
        self.weights.append(weight.data_ptr())
        self.seconds += 1e-3 * len(rows) + late


def layers(count: int, **settings: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 4, bias=False, **settings) for _ in range(count)))


def test_all_layers_are_told_by_some(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    model = nn.Sequential(layers(30), nn.Linear(8, 30), nn.Linear(6, 10))  # 960 weights, 240 and 60
    assert row_costs(model) == pytest.approx({rows: rows * 1260 / 32 for rows in (1, 4, 16)})
    assert row_costs(model, 3) == pytest.approx({nodes: 3 * nodes * 1260 / 32 for nodes in (1, 4, 16)})
    clock.weights[18:] = []
    assert len(set(clock.weights)) == len(clock.weights) == 18, "none twice: its weights would be in the cache"


def test_large_layers_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "_BYTES", 300)
    assert row_costs(layers(30)) is not None
    assert clock.sizes == [1] * 3 + [4] * 3 + [16] * 3


def test_too_few_plain_layers_at_hand_tell_nothing() -> None:
    class Other(nn.Linear):
        pass

    assert all(row_costs(layers(count)) is None for count in (0, 1, 5))
    assert row_costs(layers(9, device="meta")) is None
    assert row_costs(nn.Sequential(*(Other(8, 4) for _ in range(9)))) is None
    assert row_costs(layers(9).to(torch.bfloat16)) is not None


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("limits", [RowRange(2, 3), RowRange(2, 4), RowRange(1, 2), RowRange(4, 4)])
def test_a_layer_is_given_no_other_numbers_of_rows(rows: int, limits: RowRange) -> None:
    layer, given = nn.Linear(16, 5), torch.randn(1, rows, 16)
    torch.testing.assert_close(limited_linear(given, layer.weight, layer.bias, limits), layer(given))


def test_a_twin_limits_those_layers_that_need_it() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    twin = packed_twin(model, Packed({}, Invariance({16: RowRange(2, 3), 8: RowRange()})))
    assert [type(layer).__name__ for layer in twin] == ["TwinLinear", "Linear"]
    given = torch.randn(7, 16)
    torch.testing.assert_close(twin(given), model(given))
    assert type(model[0]) is nn.Linear
    assert twin(given[:0]).shape == (0, 4)

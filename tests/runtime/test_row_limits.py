"""RowRange that linear layers are given at a time: found by trial, kept by the layers of a twin."""

import pytest
import torch
from torch import Tensor, nn

from lookahead.runtime import row_limits
from lookahead.runtime.packed_layers import Invariance, Packed, RowRange, limited_linear, packed_twin


def given_to(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Linear layers whose sums follow the number of rows as on some machine."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = (rows[:, None] * weight).sum(-1)
        return (
            outputs
            + {"alike": 0, "one apart": len(rows) == 1, "many apart": len(rows) > 24, "all apart": len(rows)}[kernel]
        )

    monkeypatch.setattr(row_limits, "linear", linear)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("alike", RowRange(1, 64)), ("one apart", RowRange(2, 64)), ("many apart", RowRange(1, 24)), ("all apart", None)],
)
def test_limits_are_those_within_which_rows_are_alike(
    monkeypatch: pytest.MonkeyPatch, kernel: str, expected: RowRange | None
) -> None:
    given_to(monkeypatch, kernel)
    assert row_limits.rows_of_layer(nn.Linear(16, 40)) == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("limits", [RowRange(2, 3), RowRange(2, 4), RowRange(1, 2), RowRange(4, 4)])
def test_a_layer_is_given_no_other_numbers_of_rows(rows: int, limits: RowRange) -> None:
    layer, given = nn.Linear(16, 5), torch.randn(1, rows, 16)
    torch.testing.assert_close(limited_linear(given, layer.weight, layer.bias, limits), layer(given))


def test_a_twin_limits_those_layers_that_need_it() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    twin = packed_twin(model, Packed({}, Invariance({16: RowRange(2, 3), 8: RowRange()})))
    assert [type(layer).__name__ for layer in twin] == ["LimitedLinear", "Linear"]
    given = torch.randn(7, 16)
    torch.testing.assert_close(twin(given), model(given))
    assert type(model[0]) is nn.Linear
    assert twin(given[:0]).shape == (0, 4)

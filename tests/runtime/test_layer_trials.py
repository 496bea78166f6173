"""Limits of rows that linear layers are given at a time, as trials find them."""

import pytest
from torch import Tensor, nn

from lookahead.runtime import layer_trials
from lookahead.runtime.layer_trials import RowRange


def given_to(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Linear layers whose sums follow the number of rows as on some machine."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = (rows[:, None] * weight).sum(-1)
        return (
            outputs
            + {"alike": 0, "one apart": len(rows) == 1, "many apart": len(rows) > 24, "all apart": len(rows)}[kernel]
        )

    monkeypatch.setattr(layer_trials, "linear", linear)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("alike", RowRange(1, 64)), ("one apart", RowRange(2, 64)), ("many apart", RowRange(1, 24)), ("all apart", None)],
)
def test_limits_are_those_within_which_rows_are_alike(
    monkeypatch: pytest.MonkeyPatch, kernel: str, expected: RowRange | None
) -> None:
    given_to(monkeypatch, kernel)
    assert layer_trials.rows_of_layer(nn.Linear(16, 40)) == expected

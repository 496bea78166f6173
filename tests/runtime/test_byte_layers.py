"""Our kernel for products of bytes: it gives what oneDNN's gives, to the last bit, whatever is beside a row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lookahead.runtime import quantised_layers
from lookahead.runtime.byte_layers import in_fours, product_of_bytes
from lookahead.runtime.layer_trials import COLUMNS

BF16, NONE = torch.bfloat16, torch.empty(0)
BUILT = pytest.mark.skipif(
    in_fours(torch.zeros(COLUMNS, 4, dtype=torch.int8)) is None, reason="this processor has no such kernel"
)
GIVEN = {
    "rows": torch.ones(3, 8, dtype=BF16),
    "weight": torch.zeros(2, 2, COLUMNS, dtype=torch.int32),
    "scales": torch.ones(2 * COLUMNS),
    "bias": torch.zeros(2 * COLUMNS, dtype=BF16),
}


def numbers_of(outputs: int, inputs: int) -> Tensor:
    return torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(inputs)).to(torch.int8)


def onednn(rows: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    packed = torch.ops.onednn.qlinear_prepack(numbers, None)
    outputs: Tensor = quantised_layers._kernels().product(rows, packed, scales, bias, 1e-30)
    return outputs.to(rows.dtype)


@BUILT
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 32), (20, 64), (576, 96), (1540, 32), (4096, 160)])
def test_outputs_are_those_of_onednn(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Of rows of all sizes, one of zeros, and one whose numbers lie between two steps."""
    numbers, scales, bias = numbers_of(outputs, inputs), torch.rand(outputs), torch.randn(outputs).to(BF16)
    rows = torch.randn(50, inputs) * torch.logspace(-20, 20, 50)[:, None]
    rows[3] = 0.0
    rows[4] = torch.arange(inputs).remainder(255).sub(127).add(0.5).clamp(-127, 127)
    rows, packed = rows.to(dtype), in_fours(numbers)
    assert packed is not None
    for count in (1, 2, 11, 12, 13, 25, 50):
        right = onednn(rows[:count], numbers, scales, bias)
        assert torch.equal(product_of_bytes(rows[:count], packed, scales, bias), right)


@BUILT
def test_the_largest_sums_fit() -> None:
    """Of as many inputs as the kernel takes, all at their largest."""
    numbers = torch.full((COLUMNS, 1 << 16), -128, dtype=torch.int8)
    packed = in_fours(numbers)
    assert packed is not None and in_fours(torch.zeros(COLUMNS, (1 << 16) + 4, dtype=torch.int8)) is None
    outputs = product_of_bytes(torch.full((2, 1 << 16), 127.0), packed, torch.ones(COLUMNS), NONE)
    assert outputs.eq(-128.0 * 127.0 * (1 << 16)).all()


@BUILT
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(number: float) -> None:
    rows = torch.ones(3, 64, dtype=BF16)
    rows[1, 5] = number
    packed = in_fours(numbers_of(COLUMNS, 64))
    assert packed is not None
    outputs = product_of_bytes(rows, packed, torch.ones(COLUMNS), NONE)
    assert not outputs[1].isfinite().any() and outputs[[0, 2]].isfinite().all()


@BUILT
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", GIVEN["rows"].half()),
        ("rows", GIVEN["rows"][:0]),
        ("rows", GIVEN["rows"][0]),
        ("rows", GIVEN["rows"].T),
        ("rows", GIVEN["rows"][:, :4]),
        ("rows", GIVEN["rows"][:, :4].contiguous()),
        ("weight", GIVEN["weight"][0]),
        ("weight", GIVEN["weight"].float()),
        ("weight", GIVEN["weight"][:, :, :16].contiguous()),
        ("weight", GIVEN["weight"][:1]),
        ("scales", GIVEN["scales"].to(BF16)),
        ("scales", GIVEN["scales"][:32]),
        ("scales", GIVEN["scales"][None]),
        ("bias", GIVEN["bias"].float()),
        ("bias", GIVEN["bias"][:32]),
    ],
)
def test_what_does_not_fit_has_no_outputs(name: str, wrong: Any) -> None:
    multiplied = torch.ops.lookahead.multiplied_bytes
    assert multiplied(*GIVEN.values()).shape == (3, 64)
    assert multiplied(*(GIVEN | {name: wrong}).values()).shape == (0,)


@pytest.mark.parametrize("shape", [(33, 8), (32, 6)])
def test_weights_that_it_does_not_take(shape: tuple[int, int]) -> None:
    assert in_fours(torch.zeros(shape, dtype=torch.int8)) is None

"""Linear layers whose rows have the bits of a single one: the kernel, the limits that say so, and packed weights."""

from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from torch import Tensor, nn
from torch.nn.functional import linear

from lookahead import Lookahead, _native
from lookahead.models.traits import ModelTraits
from lookahead.runtime import layer_trials
from lookahead.runtime.layer_trials import COLUMNS, Chains, RowRange, chains_of, in_chains, in_columns, rows_of_alike
from lookahead.runtime.packed_layers import Invariance, Packed, packed_twin, parts_of
from lookahead.runtime.tracing.schedule import traces_for
from lookahead.support.bits import Texts, bits_of

NONE = torch.empty(0).bfloat16()


def layer_of(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


IN_CHAINS = pytest.mark.skipif(chains_of(layer_of(1088, 40)) is None, reason="linear layers add in another order here")


@IN_CHAINS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (512, 33), (576, 96), (1120, 40), (2048, 640)])
@torch.no_grad()
def test_rows_have_the_bits_of_a_single_one_or_of_several(inputs: int, outputs: int, bias: bool) -> None:
    """Packed or not, beside others or not; where products cancel each other, so that roundings are left."""
    layer, rows = layer_of(inputs, outputs, bias), torch.randn(30, inputs).bfloat16()
    half = inputs // 2
    rows[:15, half : 2 * half] = rows[:15, :half].flip(1)
    layer.weight[: outputs // 2, half : 2 * half] = -layer.weight[: outputs // 2, :half].flip(1)
    chains = chains_of(layer)
    assert chains == ((512, 512) if inputs <= 1024 else (512, 1024))
    weights = [layer.weight, in_columns(layer.weight)] if outputs % COLUMNS == 0 else [layer.weight]
    for beside, chain in enumerate(chains, 1):
        right = torch.cat([linear(part, layer.weight, layer.bias) for part in rows.split(beside)])
        for weight in weights:
            for count in (1, 2, 7, 12, 13, 30):
                assert torch.equal(in_chains(rows[:count], weight, layer.bias, chain), right[:count])


def test_what_fits_no_layer_has_no_outputs() -> None:
    assert _native.operations()
    rows, weight = torch.ones(3, 64).bfloat16(), torch.ones(32, 64).bfloat16()
    given: list[Any] = [
        (rows.float(), weight, NONE),
        (rows, weight.float(), NONE),
        (rows[:, :62], weight, NONE),
        (rows[:, :62].contiguous(), weight, NONE),
        (rows.T, weight, NONE),
        (rows[:0], weight, NONE),
        (rows[0], weight, NONE),
        (rows, weight, NONE.float()),
        (rows, weight, torch.ones(31).bfloat16()),
        (rows, in_columns(weight)[:, :31], NONE),
        (rows, in_columns(weight)[:, :31].contiguous(), NONE),
        (rows, weight.T, NONE),
    ]
    for each in given:
        assert torch.ops.lookahead.multiplied(*each, 512).numel() == 0
    assert all(torch.ops.lookahead.multiplied(rows, weight, NONE, chain).numel() == 0 for chain in (0, -2, 511))


@pytest.mark.parametrize(
    ("least", "chains", "expected"),
    [
        ([1, 1], True, RowRange(1, 64)),
        ([1, 2], True, RowRange(chain=512)),
        ([1, 2], False, RowRange(2, 64)),
        ([1, None], True, RowRange(chain=512)),
        ([1, None], False, None),
    ],
)
def test_layers_add_in_chains_where_a_single_row_is_apart(
    least: list[Any], chains: bool, expected: RowRange | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer_of(1100, outputs) for outputs in (8, 16)]
    found = {layer: None if each is None else [each, 64] for layer, each in zip(layers, least, strict=True)}
    monkeypatch.setattr(layer_trials, "found_once", lambda _kind, _about, find: found[find.args[0]])
    monkeypatch.setattr(layer_trials, "chains_of", lambda _layer: Chains(512, 1024) if chains else None)
    assert rows_of_alike(layers, False) == expected
    if expected is not None and expected.chain:
        assert rows_of_alike(layers, True) == RowRange(chain=1024)


def given_to(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Linear layers whose sums follow the number of rows as on some machine."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        apart = {"alike": 0, "one apart": len(rows) == 1, "many apart": len(rows) > 24, "all apart": len(rows)}
        return (rows[:, None] * weight).sum(-1) + apart[kernel]

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


def test_only_what_the_kernel_reads_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_trials, "found_once", lambda *_: (512, 512))
    assert chains_of(layer_of(64, 32).float()) is None
    monkeypatch.setattr(_native, "operations", lambda: False)
    assert chains_of(layer_of(64, 32)) is None


@IN_CHAINS
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize("outputs", [64, 40])
@torch.no_grad()
def test_packed_layers_are_in_columns_or_read_as_they_lie(outputs: int, beside: int) -> None:
    """Those whose outputs fill no columns are packed as oneDNN does. A single row adds as several where it has to."""
    model, rows = nn.Sequential(layer_of(1120, outputs)), torch.randn(1, 10, 1120).bfloat16()
    rows[..., 560:], model[0].weight[:, 560:] = rows[..., :560].flip(2), -model[0].weight[:, :560].flip(1)
    parts = parts_of((model[0],), single=False)
    assert next(iter(parts.values())).weight.ndim == (3 if outputs == 64 else 2)
    right = torch.cat([model(part) for part in rows.split(beside, 1)], 1)
    twin = packed_twin(model, Packed(parts, Invariance({1120: RowRange(chain=512 * beside)})))
    assert torch.equal(twin(rows), right)
    assert torch.equal(twin(rows.mT.contiguous().mT), right)  # which lies in another order
    assert torch.equal(torch.cat([twin(row) for row in rows.split(1, 1)], 1), right)


@IN_CHAINS
@pytest.mark.usefixtures("augmented", "no_grad")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_with_wide_layers_writes_plain_decodings_text(batch: int) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 1344, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = fresh_model("llama", **sizes).bfloat16()
    bits = bits_of(model, ModelTraits.of(model), "tree", texts=Texts(batch))
    assert bits.keeps == "plain" and bits.limits is not None and bits.limits.rows[1344].chain
    for sampled in (False, True):
        settings = {"max_new_tokens": 40, "do_sample": sampled, "output_logits": True}
        same_as_plain(model, prompts(batch, 12), Lookahead(repeatable=True), tolerance=0.0, **settings)
    limits = [Invariance({1344: RowRange(chain=chain)}) for chain in (512, 1024)]
    assert (
        len({id(traces_for(model, packed=Packed({}, each))) for each in limits}) == 2
    )  # one of them may be left alone

"""Attention, experts and captures on a CUDA device; skipped where there is none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.graphs import attended, chunked, counting
from helpers.models import fresh_model, successor_model
from helpers.threads import together
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lookahead import Lookahead
from lookahead.runtime import split_attention
from lookahead.runtime.cuda_graphs import executor as static
from lookahead.runtime.forward import TreeForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("augmented"),
]


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [64, 80, 128, 256])
@pytest.mark.parametrize("slots", [8320, 8331, 32896])
def test_split_attention(dtype: torch.dtype, channels: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over long histories it is split, by either kernel, and as exact as in one piece; chunks of which a row sees
    nothing count for nothing."""
    splits, plans = (counting(monkeypatch, split_attention, name) for name in ("_split", "_can_plan"))
    for batch, heads, nodes in ((1, 32, 1), (2, 32, 1), (1, 8, 8), (2, 32, 64)):
        generator = torch.Generator("cuda").manual_seed(nodes)
        query = torch.randn(batch, heads, nodes, channels, device="cuda", generator=generator).to(dtype)
        states = torch.randn(2, batch, 8, slots + 64, channels, device="cuda", generator=generator).to(dtype)
        key, value = states[:, :, :, :slots]
        hidden = torch.rand(batch, 1, nodes, slots, device="cuda", generator=generator) < 0.2
        hidden[..., slots // 4 : slots // 2] = True
        hidden[:, :, 0, 64:] = True
        hidden[..., 0] = False
        mask = torch.zeros(hidden.shape, dtype=dtype, device="cuda").masked_fill_(hidden, torch.finfo(dtype).min)
        with torch.no_grad():
            split, planned = (
                attended(query, key, value, mask, planned=planned).transpose(1, 2) for planned in (False, True)
            )
            with chunked(slots):
                whole = attended(query, key, value, mask).transpose(1, 2)
            given = [tensor.double() for tensor in (query, key, value, mask)]
            exact = torch.nn.functional.scaled_dot_product_attention(*given[:3], given[3], enable_gqa=True)
        assert split.isfinite().all() and planned.isfinite().all()
        off = [(output.double() - exact).abs().max().item() for output in (split, planned, whole)]
        assert max(off[:2]) <= 2 * off[2] + torch.finfo(dtype).eps
    assert splits and plans
    assert not split_attention._no_plan


@pytest.mark.parametrize("length", [8192, 8200])
def test_long_texts(length: int, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose attention is split write plain decoding's text."""
    splits = counting(monkeypatch, split_attention, "_split")
    model = fresh_model("llama", max_position_embeddings=16384).float().cuda()
    settings = {"max_new_tokens": 48, "do_sample": False, "attention_mask": torch.ones_like(ids(length))}
    plain = model.generate(ids(length), **settings)
    for graphs in (None, False):
        ours = model.generate(ids(length), **settings, lookahead_strategy=Lookahead(seed=0, static=graphs))
        assert torch.equal(plain, ours)
    assert splits
    assert made[-2].route == "cuda graphs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_that_no_rounding_changes(dtype: torch.dtype, made: list[Any]) -> None:
    """A model that is sure of every token, in the dtypes that large models have."""
    model = successor_model({token: (7 * token + 5) % 48 for token in range(48)}).to("cuda", dtype)
    settings = {"max_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(ids(12))}
    plain = model.generate(ids(12), **settings)
    for _ in range(2):
        ours = model.generate(ids(12), **settings, lookahead_strategy=Lookahead(seed=0))
        assert torch.equal(plain, ours)
        assert made[-1].route == "cuda graphs"


def test_experts_by_the_width_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide passes gather no weights."""
    kernels, sizes = ALL_EXPERTS_FUNCTIONS._global_mapping, {"grouped_mm": set[int](), "batched_mm": set[int]()}

    def noting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def noted(module: Any, states: Tensor, index: Tensor, weights: Tensor) -> Any:
            sizes[name].add(index.numel())
            return kernel(module, states, index, weights)

        return noted

    for name in sizes:
        monkeypatch.setitem(kernels, name, noting(name, kernels[name]))
    model = fresh_model("mixtral").to("cuda", torch.bfloat16)
    mask = torch.ones_like(ids(12))
    model.generate(ids(12), attention_mask=mask, max_new_tokens=40, do_sample=False, use_lookahead=True)
    assert max(sizes["batched_mm"]) <= 4
    assert max(sizes["grouped_mm"]) > 4


class Breaking:
    """Lets captures fail: in the middle, by Python's or by CUDA's doing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        call = TreeForward.call

        def breaking(forward: TreeForward, *args: Any, **kwargs: Any) -> Any:
            outputs = call(forward, *args, **kwargs)
            if torch.cuda.is_current_stream_capturing():
                if way == "python":
                    raise KeyError("in a capture")
                outputs.logits.max().item()
            return outputs

        monkeypatch.setattr(TreeForward, "call", breaking)


@pytest.mark.parametrize("way", ["python", "host read"])
def test_a_failed_capture_leaves_nothing(way: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream, allocator and generator are as before; the text is written without graphs, and others are captured."""
    settings = {"max_new_tokens": 40, "attention_mask": torch.ones_like(ids(12))}
    model, stream = fresh_model("llama").cuda(), torch.cuda.current_stream()
    plain = model.generate(ids(12), **settings, do_sample=False)
    with monkeypatch.context() as patch:
        Breaking(patch, way)
        ours = model.generate(ids(12), **settings, do_sample=False, lookahead_strategy=Lookahead(seed=0))
    assert torch.equal(plain, ours)
    assert made[-1].route == "static"
    assert "could not be captured" in made[-1].executor.reason
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(8, device="cuda").sum().item()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before  # allocated for everybody, and not for a capture
    other = fresh_model("llama", seed=1).cuda()
    for sample in (True, False):
        torch.cuda.manual_seed(3)
        plain = other.generate(ids(12), **settings, do_sample=sample)
        torch.cuda.manual_seed(3)
        ours = other.generate(ids(12), **settings, do_sample=sample, lookahead_strategy=Lookahead(seed=0))
        assert torch.equal(plain, ours)
    assert made[-1].route == "cuda graphs"


def test_captures_do_not_empty_everybodys_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs of a call share a pool, for which memory is freed once."""
    captures, emptied = counting(monkeypatch, static, "capture"), counting(monkeypatch, torch.cuda, "empty_cache")
    model = fresh_model("llama").cuda()
    mask = torch.ones_like(ids(12))
    model.generate(ids(12), attention_mask=mask, max_new_tokens=60, do_sample=False, use_lookahead=True)
    assert len(captures) >= 2
    assert len(emptied) <= 1


def test_sampling_in_threads() -> None:
    """One thread draws while another captures."""
    model = fresh_model("llama").cuda()
    settings = {"max_new_tokens": 60, "do_sample": True, "attention_mask": torch.ones_like(ids(12))}

    def work(batch: int) -> None:
        inputs = ids(12, batch).expand(batch, -1)
        mask = torch.ones_like(inputs)
        for _ in range(3):
            model.generate(inputs, **settings | {"attention_mask": mask}, lookahead_strategy=Lookahead(seed=0))

    assert together(*(partial(work, batch) for batch in range(1, 5))) == [None] * 4

"""Bounds on the time steps of Mamba-2 layers: kept in a prompt's pass, lifted in passes that continue a text."""

import sys
from typing import Any

import pytest
import torch
from helpers.hybrids import fresh_hybrid, hybrid
from helpers.models import prompts

from jacobi import Path, TokenTree
from lookahead.models.families.mamba2 import CONTINUING, bound_error, unbounded_scans
from lookahead.models.families.overrides import overriding
from lookahead.runtime.session import bare_chain
from lookahead.support import route as support

NARROW = (0.01, 0.1)


@pytest.mark.parametrize(
    ("name", "fields", "scans"),
    [
        ("bamba", {}, 0),
        ("bamba", {"time_step_limit": NARROW}, 1),
        ("mamba2", {"time_step_limit": NARROW}, 1),
        ("granitemoehybrid", {"time_step_limit": NARROW}, 1),
        ("nemotron_h", {}, 1),
        ("zamba2", {}, 1),
        ("qwen3_next", {}, 0),
    ],
)
def test_bounds_that_matter(name: str, fields: dict[str, Any], scans: int) -> None:
    """A bound is lifted, so that several tokens give what they give one by one."""
    model = fresh_hybrid(name, **fields)
    assert len(unbounded_scans(model)) == scans
    assert bound_error(model) is None
    assert support.route(model)[0] == "chain"


@pytest.mark.parametrize("name", ["bamba", "nemotron_h"])
@pytest.mark.parametrize("chunk", [2, 5, 64])
def test_chains_longer_than_chunks(name: str, chunk: int) -> None:
    """Pass for pass against one token after the other, in two rows, the second padded."""
    field = "chunk_size" if name == "nemotron_h" else "mamba_chunk_size"
    model = fresh_hybrid(name, **{field: chunk}, **({"time_step_limit": NARROW} if name == "bamba" else {}))
    text, prompt = prompts(2, 80, seed=4, ragged=False)["input_ids"].tolist(), prompts(2, 6)
    with torch.no_grad():
        with bare_chain(model, prompt["input_ids"], prompt["attention_mask"]) as chain:
            alone = []
            for place in range(80):
                alone.append(chain.forward([TokenTree(row[place]) for row in text]).logits)
                chain.keep([Path([0], [0])] * 2)
            states = chain.states()
        with bare_chain(model, prompt["input_ids"], prompt["attention_mask"]) as chain:
            ours = []
            for start, kept, rejected in [(0, 3, 0), (3, 1, 6), (4, 5, 3), (9, 70, 1), (79, 1, 0)]:
                drafts = [row[start : start + kept] + [1] * rejected for row in text]
                ours.append(chain.forward([TokenTree.chain(row[0], row[1:]) for row in drafts]).logits[:, :kept])
                chain.keep([Path(list(range(kept)), [0] * kept)] * 2)
            left = chain.states()
    torch.testing.assert_close(torch.cat(ours, 1), torch.cat(alone, 1), atol=1e-3, rtol=1e-3)
    for got, expected in zip(left, states, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_only_passes_that_continue() -> None:
    """Outside of them, and afterwards, the scan is transformers' own."""
    model = hybrid("nemotron_h")
    (override,) = unbounded_scans(model)
    home, own = override.owner, override.owner.mamba2_chunk_scan
    assert home is sys.modules["transformers.models.nemotron_h.modeling_nemotron_h"]
    inputs = prompts(1, 20)["input_ids"]
    with torch.no_grad():
        plain = model(inputs).logits
        with overriding([override], lambda: None):  # another thread's
            torch.testing.assert_close(model(inputs).logits, plain, atol=0, rtol=0)
        with overriding([override], lambda: CONTINUING):
            assert not torch.equal(model(inputs).logits, plain)
        torch.testing.assert_close(model(inputs).logits, plain, atol=0, rtol=0)
    assert home.mamba2_chunk_scan is own


def test_a_bound_that_cannot_be_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may keep it in another place: then the model is handed over, whatever the self-test sees."""
    model = fresh_hybrid("nemotron_h")
    monkeypatch.delattr(sys.modules[type(model).__module__], "mamba2_chunk_scan")
    route, reason = support.route(model)
    assert route == "plain"
    assert reason is not None
    assert reason.endswith(
        "and its NemotronHMamba2Mixer keeps time steps between 0.001 and inf in passes over several tokens, and not "
        "one by one"
    )

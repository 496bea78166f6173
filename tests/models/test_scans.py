"""Scans over drafts: outputs and states at every node are those of one token after the other along its path."""

import sys

import pytest
import torch
from helpers.hybrids import fresh_hybrid, hybrid
from helpers.models import prompts
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5

from jacobi import Path, TokenTree
from lookahead.models.families.overrides import overriding
from lookahead.models.families.scans import Scans, bound_error, scans_of
from lookahead.runtime.session import bare_chain
from lookahead.support import route as support

NARROW = (0.01, 0.1)


def scans_over(parents: list[list[int]]) -> Scans:
    """The scans of a pass over trees of one width."""
    trees = [TokenTree(0) for _ in parents]
    for tree, above in zip(trees, parents, strict=True):
        for node, parent in enumerate(above[1:], 1):
            assert tree.add(parent, node) == node
    return Scans.over(trees, torch.device("cpu"))


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


@given(
    seed=st.integers(0, 2**31),
    trees=st.integers(1, 9).flatmap(
        lambda width: st.lists(
            st.tuples(*(st.integers(-1 if node == 0 else 0, node - 1) for node in range(width))).map(list),
            min_size=1,
            max_size=3,
        )
    ),
    family=st.sampled_from(["delta", "channels", "mamba"]),
    groups=st.sampled_from([1, 2]),
    strength=st.sampled_from([0.1, 30.0]),
)
def test_trees(seed: int, trees: list[list[int]], family: str, groups: int, strength: float) -> None:
    """Against transformers' own step for one token, from each parent's state, however strong the decays."""
    generator = torch.Generator().manual_seed(seed)
    (batch, width), heads, size = (len(trees), len(trees[0])), 4, 8
    state = numbers(generator, batch, heads, size, size)
    keys, queries = (numbers(generator, batch, width, heads // groups, size) for _ in range(2))
    values, beta = (
        numbers(generator, batch, width, heads, size),
        2 * torch.rand(batch, width, heads, generator=generator),
    )
    decays = -strength * torch.rand(batch, width, heads, *([size] if family == "channels" else []), generator=generator)
    scans, home = (
        scans_over(trees),
        {"delta": modeling_qwen3_5, "channels": modeling_kimi_linear}.get(family, modeling_bamba),
    )
    if family == "channels":
        keys, queries = (part.repeat_interleave(groups, dim=2) for part in (keys, queries))
    model, held = hybrid({"delta": "qwen3_5", "channels": "kimi_linear"}.get(family, "bamba")), state.clone()
    ours: Tensor
    with overriding(scans_of(model), lambda: scans):
        if family == "mamba":
            rates, skip = -torch.ones(heads), numbers(generator, heads)
            ours, left = home.mamba2_chunk_scan(
                values,
                -decays,
                rates,
                keys,
                queries,
                chunk_size=64,
                D=skip,
                initial_states=held,
                return_final_states=True,
            )
        else:
            scan = home.chunk_kimi_delta_attention if family == "channels" else home.torch_chunk_gated_delta_rule
            ours, left = scan(
                queries,
                keys,
                values,
                g=decays,
                beta=beta,
                initial_state=held,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
    assert left is held
    torch.testing.assert_close(held, state, atol=0, rtol=0)

    if family == "delta":  # older versions are given as many keys as values
        keys, queries = (part.repeat_interleave(groups, dim=2) for part in (keys, queries))

    def step(row: int, node: int, before: Tensor) -> tuple[Tensor, Tensor]:
        one = slice(row, row + 1), slice(node, node + 1)
        if family == "mamba":
            after = before.clone()
            wide = (heads, size)
            out = home.mamba2_selective_state_update(
                after,
                values[one][:, 0],
                -decays[one][:, 0, :, None].expand(-1, *wide),
                rates[:, None, None].expand(*wide, size),
                keys[one][:, 0],
                queries[one][:, 0],
                skip[:, None].expand(wide),
            )
            return out[0], after
        scan = getattr(home, "recurrent_kimi_delta_attention", None) or home.torch_recurrent_gated_delta_rule
        out, after = scan(
            queries[one],
            keys[one],
            values[one],
            g=decays[one],
            beta=beta[one],
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0, 0], after

    states: list[list[Tensor]] = []
    for row, tree in enumerate(trees):
        behind: list[Tensor] = []
        for node, parent in enumerate(tree):
            out, after = step(row, node, behind[parent] if parent >= 0 else state[row : row + 1])
            torch.testing.assert_close(ours[row, node], out, atol=2e-4, rtol=2e-4)
            behind.append(after)
        states.append(behind)
    for last in range(width):
        held.copy_(state)
        scans.keep(torch.tensor([last] * batch))
        expected = torch.cat([behind[last] for behind in states])
        torch.testing.assert_close(held, expected, atol=2e-4, rtol=2e-4)
        held.copy_(state)
        scans.keep(torch.tensor([-1] + [last] * (batch - 1)))
        torch.testing.assert_close(held, torch.cat([state[:1], expected[1:]]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["bamba", "mamba2", "granitemoehybrid"])
def test_bounds(name: str) -> None:
    """A bound on time steps is lifted, so that several tokens give what they give one by one."""
    model = fresh_hybrid(name, time_step_limit=NARROW)
    assert bound_error(model) is None
    assert support.verdict(model)[0] == ("chain" if name == "mamba2" else "tree")


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
    overrides = scans_of(model)
    (home,) = {override.owner for override in overrides}
    own = home.mamba2_chunk_scan
    assert home is sys.modules["transformers.models.nemotron_h.modeling_nemotron_h"]
    inputs = prompts(1, 20)["input_ids"]
    with torch.no_grad():
        plain = model(inputs).logits
        scans = scans_over([list(range(-1, 19))])
        for seen in (None, scans):  # another thread's pass; one that continues nothing
            with overriding(overrides, lambda seen=seen: seen):
                torch.testing.assert_close(model(inputs).logits, plain, atol=0, rtol=0)
    assert not scans.layers
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

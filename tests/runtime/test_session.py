"""Passes outside of ``generate``: scores as plain forward passes give them, after any history."""

import pytest
import torch
from helpers.models import prompts, tiny_model
from transformers import DynamicCache

from jacobi import TokenTree
from lookahead.models.names import CACHE
from lookahead.runtime.cuda_graphs.executor import GraphExecutor
from lookahead.runtime.session import bare_model


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seen", [0, 8])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_against_plain_passes(name: str, seen: int, static: bool) -> None:
    """Each branch scores as the same tokens do in a plain pass over prompt and branch; the past is only read."""
    model, ids = tiny_model(name), prompts(2, ragged=False)["input_ids"]
    past = DynamicCache()
    if seen:
        model(input_ids=ids[:, :seen], **{CACHE: past}, use_cache=True)
    branches = [[3, 5, 7], [3, 4]]
    tree = TokenTree.from_paths(3, [branch[1:] for branch in branches])
    with bare_model(model, ids[:, seen:], 16, static=static, past=past if seen else None) as fused:
        assert isinstance(fused.executor, GraphExecutor) == static
        logits = fused.forward([tree, tree]).logits
    for branch, nodes in zip(branches, [[0, 1, 2], [0, 3]], strict=True):
        plain = model(input_ids=torch.cat([ids, torch.tensor([branch, branch])], dim=1)).logits
        torch.testing.assert_close(logits[:, nodes], plain[:, ids.shape[1] :])
    assert past.get_seq_length() == seen

"""A small model inside a larger one: the same text, at the larger one's sizes."""

from typing import Any

import pytest
import torch
import typer

from benchmarks.embedding import Shape, embedded


@pytest.mark.parametrize("shape", [Shape(384, 7, 6, 2, 900), Shape(384, 9, 12, 4, 768)])
def test_the_larger_model_writes_the_same_text(loaded: tuple[Any, Any], shape: Shape) -> None:
    small, tokenizer = loaded
    large = embedded(small, shape, torch.float64)
    inputs = tokenizer("def area(width, height):\n", return_tensors="pt")
    with torch.no_grad():
        logits = [model(inputs["input_ids"]).logits.double() for model in (small.double(), large)]
    small.float()
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)  # norms are computed in float32
    assert large.config.num_hidden_layers == len(large.model.layers) == shape.layers
    assert large.model.layers[-1].mlp.up_proj.weight.shape == (shape.feed_forward, shape.hidden)


def test_a_shape_that_is_too_small_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(typer.BadParameter, match="cannot hold 6 layers"):
        embedded(loaded[0], Shape(384, 4, 6, 2, 900), torch.float32)

"""A small model inside a larger one: the same text, at the larger one's sizes."""

from typing import Any

import pytest
import torch
import typer

from benchmarks.real_cost import Shape, disturbed, embedded, embedded_head
from lookahead.bundled import BUNDLED_EAGLE
from lookahead.eagle import Eagle, EagleHead


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


def test_the_larger_head_says_the_same(loaded: tuple[Any, Any]) -> None:
    """Beside the larger model: the same tree of the same text, pass by pass."""
    small, tokenizer = loaded
    shape, head = Shape(384, 7, 6, 2, 1100), EagleHead.from_pretrained(BUNDLED_EAGLE, model=small)
    large = embedded(small, shape, torch.float32)
    large.generation_config = small.generation_config
    inputs = tokenizer("def area(width, height):\n", return_tensors="pt")
    runs = []
    for model, its in ((small, head), (large, embedded_head(head, small, shape, torch.float32))):
        strategy = Eagle(its, tree="eagle-2", total_tokens=12, depth=3, top_k=3)
        settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
        out = model.generate(**inputs, **settings, custom_generate=strategy)
        runs.append((out.sequences.tolist(), out.stats.histogram))
    assert runs[0] == runs[1]
    assert sum(count for tokens, count in runs[0][1].items() if tokens > 1) > 2


def test_a_shape_that_is_too_small_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(typer.BadParameter, match="cannot hold 6 layers"):
        embedded(loaded[0], Shape(384, 4, 6, 2, 900), torch.float32)


def test_a_disturbed_copy_is_often_right(loaded: tuple[Any, Any]) -> None:
    """The more noise, the less often; the model itself stays as it is."""
    small, tokenizer = loaded
    ids = tokenizer("def area(width, height):\n    return width * height\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = small(ids).logits
        shares = [(disturbed(small, noise)(ids).logits.argmax(-1) == own.argmax(-1)).float().mean() for noise in (0, 1)]
        assert shares[0] == 1.0 > shares[1]
        assert torch.equal(small(ids).logits, own)

"""What a model keeps of its passes, and what is returned, are plain tensors: none is of inference mode."""

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from lookahead import Lookahead
from lookahead.models.code_safety import is_safe
from lookahead.models.names import CACHE

pytestmark = pytest.mark.usefixtures("augmented")


class Keeping(nn.Module):
    """A layer that keeps what passes through it, in every way that a model may."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("sizes", None, persistent=False)
        self.last: Tensor | None = None
        self.by_width: dict[int, Tensor] = {}
        self.all: list[Tensor] = []
        self.pair: tuple[Tensor, dict[str, Tensor]] | None = None

    def forward(self, states: Tensor) -> Tensor:
        """As the layer inside."""
        states = self.inner(states)
        self.sizes, self.last = states.norm(dim=-1), states
        self.by_width[states.shape[1]] = states
        self.all.append(states)
        self.pair = states, {"norm": self.sizes}
        return states

    def kept(self) -> list[Tensor]:
        """All of it."""
        assert self.last is not None
        assert self.pair is not None
        return [self.sizes, self.last, *self.by_width.values(), *self.all, self.pair[0], *self.pair[1].values()]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """:class:`Keeping` counts as a class of transformers'."""
    monkeypatch.setattr(Keeping, "__module__", "transformers.models.keeping")
    monkeypatch.setattr(Keeping.forward, "__module__", "transformers.models.keeping")


@pytest.mark.usefixtures("known")
def test_nothing_stays_on_the_model() -> None:
    """What a model keeps of a pass can be trained with and written into afterwards."""
    model = fresh_model("llama")
    keeping = model.model.norm = Keeping(model.model.norm)
    with torch.no_grad():
        assert is_safe(model)
    model.generate(**prompts(1), max_new_tokens=20, use_lookahead=True)
    assert not any(tensor.is_inference() for tensor in keeping.kept())
    assert keeping.pair is not None
    assert keeping.pair[0] is keeping.last is keeping.all[-1]  # shared as before
    for tensor in keeping.kept():
        tensor.add_(1.0)
    weight = torch.ones_like(keeping.last, requires_grad=True)
    (weight * keeping.last).sum().backward()
    assert weight.grad is not None


@pytest.mark.usefixtures("known")
def test_not_after_an_error_either() -> None:
    """A call that breaks off leaves as little."""
    model = fresh_model("llama")
    keeping = model.model.norm = Keeping(model.model.norm)

    def broken(_ids: Tensor, scores: Tensor) -> Tensor:
        if len(keeping.all) > 12:
            raise KeyError("broken")
        return scores

    with pytest.raises(KeyError, match="broken"):
        model.generate(**prompts(1), max_new_tokens=20, use_lookahead=True, logits_processor=[broken])
    assert not any(tensor.is_inference() for tensor in keeping.kept())


def test_what_is_returned_can_be_used() -> None:
    """Scores and a cache that grew in the middle of a pass are plain tensors; plain decoding goes on from the cache."""
    model = fresh_model("llama", max_position_embeddings=4096)
    cache = DynamicCache(config=model.config)
    settings = {"max_new_tokens": 200, "output_scores": True, "output_logits": True}
    output = same_as_plain(model, prompts(1), Lookahead(window_size=3, seed=0), **settings)
    for tensor in (*output.scores, *output.logits):
        tensor.add_(1.0)
    inputs = prompts(1)
    ids = model.generate(**inputs, max_new_tokens=30, **{CACHE: cache}, use_lookahead=True)
    for layer in cache.layers:
        assert not layer.keys.is_inference()
        assert not layer.values.is_inference()
    mask = torch.ones_like(ids)
    longer = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, **{CACHE: cache})
    assert longer.tolist() == model.generate(**inputs, max_new_tokens=35).tolist()


def test_dynamic_rope_past_its_limit() -> None:
    """Frequencies that change with the text's length are buffers made in a pass; plain passes follow it in the call."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for _ in range(2):  # the same text from the same state of the model
        model = fresh_model("llama", max_position_embeddings=20, rope_parameters=rope)
        same_as_plain(model, prompts(1), max_new_tokens=30)


def test_hooks_get_plain_tensors() -> None:
    """Whoever watches a layer can go on with what was seen."""
    model = fresh_model("llama")
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        model.generate(**prompts(1), max_new_tokens=20, use_lookahead=True)
    finally:
        handle.remove()
    assert len(seen) > 1
    assert not any(tensor.is_inference() for tensor in seen)


def test_what_was_on_the_model_before() -> None:
    """Neither a tensor of the user's, of whatever mode, nor a dict that cannot be written is touched."""
    model = fresh_model("llama")
    with torch.inference_mode():
        own = torch.ones(3)
    model.memory, model.own, model.both = BaseModelOutput(last_hidden_state=torch.zeros(1)), own, [own]
    same_as_plain(model, prompts(1), max_new_tokens=16)
    assert model.own is own
    assert model.both[0] is own

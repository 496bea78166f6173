"""What only a CUDA device can show; skipped where there is none."""

import pytest
import torch
from conftest import fresh_model

from lookahead import Lookahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("augmented"),
]


@pytest.mark.parametrize("name", ["llama", "llama_mha", "mistral", "gpt2"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_same_text_on_the_gpu(name: str, batch: int, sample: bool) -> None:
    """float64 texts equal plain decoding's, greedy and sampled, and the device's generator ends in the same state."""
    model = fresh_model(name).cuda()
    ids = torch.randint(1, 48, (batch, 12), generator=torch.Generator().manual_seed(0)).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "do_sample": sample}
    torch.cuda.manual_seed(1)
    plain = model.generate(ids, **settings)
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    ours = model.generate(ids, **settings, lookahead_strategy=Lookahead(seed=0))
    assert torch.equal(plain, ours)
    assert torch.equal(state, torch.cuda.get_rng_state())

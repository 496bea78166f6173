"""Assistants that transformers ships: heads like ours, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from helpers.refusals import refuses

from lookahead import Lookahead
from lookahead.heads.block.head import BlockHead
from lookahead.heads.block.strategy import Block


@pytest.mark.usefixtures("augmented")
def test_muse_glimmers_is_a_block_drafter(tmp_path: Path) -> None:
    """As transformers computes it, on a text longer than its window; and it drafts here as well."""
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="transformers is older")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 4, "target_layer_ids": [0, 2]}
    torch.manual_seed(0)
    config = muse.MuseGlimmerAssistantConfig(**sizes, mask_token_id=47, sliding_window=5)
    assistant = muse.MuseGlimmerAssistantModel(config).double().eval()
    assistant.save_pretrained(tmp_path)
    model = fresh_model("llama", num_hidden_layers=4)
    features, embed = torch.randn(1, 9, 64, dtype=torch.float64), model.get_input_embeddings()
    given: dict[str, Any] = {"attention_mask": torch.ones(1, 13, dtype=torch.long)}
    given |= {"position_ids": torch.arange(13)[None], "context_hidden_states": features}
    for head in (BlockHead.of(assistant), BlockHead.from_pretrained(tmp_path, model=model)):
        cache = muse.modeling_muse_glimmer_assistant.DFlashCache(config=config)
        cache.set_previous_accepted_tokens(9)
        with torch.no_grad():
            block = embed(torch.tensor([[3, 47, 47, 47]]))
            theirs = assistant(noise_embeds=block, cache=cache, **given).last_hidden_state
            places = torch.arange(9)[None]
            text = head.network.remember(features, places)
            ours = head.network(torch.tensor([[3]]), torch.tensor([[9]]), text, places, embed)[:, 0]
        torch.testing.assert_close(ours, theirs)
        assert head.read_as == ((1, 3), False)
    for batch, sample in ((1, False), (3, True)):
        assert same_as_plain(model, prompts(batch), Block(assistant), do_sample=sample, max_new_tokens=20).stats.steps
    assert isinstance(Lookahead().assisted(assistant), Block)


def test_gemmas_is_refused_by_name() -> None:
    gemma = pytest.importorskip("transformers.models.gemma4_assistant", reason="transformers is older")
    shape: dict[str, Any] = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}
    shape |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2}
    shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = gemma.Gemma4AssistantConfig(text_config=shape, backbone_hidden_size=32, num_centroids=8)
    assistant, model = gemma.Gemma4AssistantForCausalLM(config), fresh_model("llama")
    refuses("gemma4_assistant reads the model's keys", Lookahead(draft_model=assistant).check, model)

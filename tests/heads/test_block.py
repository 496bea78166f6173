"""Block drafters: files, what they compute, and texts that stay plain decoding's."""

from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.block import KINDS, random_network, write_head
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain

from lookahead.heads.block.head import BlockHead
from lookahead.heads.block.strategy import Block

LAYOUTS = [
    *(("dflash", "z-lab"), ("dflash", "speculators"), ("anchor first", "deepspec"), ("jetspec", "z-lab")),
    *(("vanilla", "deepspec"), ("vanilla", "specforge"), ("gated", "deepspec"), ("gated", "speculators")),
    *(("rnn", "deepspec"), ("rnn", "speculators"), ("small vocabulary", "speculators")),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_drafters_are_read_as_they_were_written(kind: str, layout: str, tmp_path: FilePath) -> None:
    network = random_network(kind)
    model = fresh_model("llama", num_hidden_layers=5)
    head = BlockHead.from_pretrained(write_head(tmp_path / "theirs", network, layout), model=model)
    head.save_pretrained(tmp_path / "ours")
    for read in (head, BlockHead.from_pretrained(tmp_path / "ours", model=model)):
        expected, found = network.state_dict(), read.network.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        sizes = read.facts() | {"base_model": None, "max_positions": 2048}
        assert sizes == {**vars(network.sizes)}


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_change(kind: str) -> None:
    model, head = fresh_model("llama", num_hidden_layers=5), BlockHead(random_network(kind))
    chain, alone = Block(head, tree="chain"), Block(head, nodes=8, seed=0, sources=("block",))
    for batch, sample, strategy in ((1, False, chain), (3, True, chain), (1, True, alone), (3, False, alone), (3, True, Block(head))):
        settings: dict[str, Any] = {"do_sample": sample, "max_new_tokens": 20, "eos_token_id": [5, 6], "output_scores": True}
        output = same_as_plain(model, prompts(batch), strategy, **settings)
        assert output.stats.steps

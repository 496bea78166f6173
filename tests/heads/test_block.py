"""Block drafters: files, what they compute, and texts that stay plain decoding's."""

import random
from pathlib import Path as FilePath
from typing import Any, cast

import pytest
import torch
from helpers.block import KINDS, OUTPUT_LINES, depth_of, random_network, write_head
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain, successor_model
from torch import Tensor
from torch.nn.functional import silu

from jacobi import Path as Walk
from lookahead.heads.block.head import BlockHead
from lookahead.heads.block.network import BlockNetwork
from lookahead.heads.block.strategy import Block, BlockCandidates, Found

LAYOUTS = [
    *(("dflash", "z-lab"), ("dflash", "speculators"), ("anchor first", "deepspec"), ("jetspec", "z-lab")),
    *(("vanilla", "deepspec"), ("vanilla", "specforge"), ("gated", "deepspec"), ("gated", "speculators")),
    *(("rnn", "deepspec"), *((kind, "speculators") for kind in ("rnn", "small vocabulary", OUTPUT_LINES))),
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
        sizes = read.facts() | {"base_model": None}
        assert sizes == {**vars(network.sizes)}


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_change(kind: str) -> None:
    model, head = fresh_model("llama", num_hidden_layers=5), BlockHead(random_network(kind))
    chain, alone = Block(head, tree="chain"), Block(head, nodes=8, seed=0, sources=("block",))
    settings: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [5, 6], "output_scores": True}
    runs = (1, False, chain), (3, True, chain), (1, True, alone), (3, False, alone), (3, True, Block(head))
    for batch, sample, strategy in runs:
        assert same_as_plain(model, prompts(batch), strategy, do_sample=sample, **settings).stats.steps


def naive(network: BlockNetwork, features: Tensor, anchor: int, embed: Any) -> Tensor:
    """What comes out of the block behind a text of these ``features``, ``[slot, hidden]``: key by key, from nothing."""
    sizes, given = network.sizes, dict(network.state_dict())
    size, start = sizes.head_size, len(features)

    def normed(states: Tensor, name: str) -> Tensor:
        return states / (states.pow(2).mean(-1, keepdim=True) + sizes.eps).sqrt() * given[f"{name}.weight"]

    def turned(states: Tensor, position: int) -> Tensor:
        angles = position * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
        first, second = states[:, : size // 2], states[:, size // 2 :]
        parts = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(parts, -1)

    text = normed(features @ given["fc.weight"].T, "hidden_norm")
    table = given.get("embed_tokens.weight", embed.weight)
    states = table[[anchor] + [sizes.mask_token] * (sizes.block_size - 1)] * (sizes.input_scale or 1.0)
    for layer, (window, causal) in enumerate(sizes.sights):
        at = f"layers.{layer}."
        inputs = torch.cat([text, normed(states, f"{at}input_layernorm")])
        queries, keys, values = (
            (inputs @ given[f"{at}self_attn.{part}_proj.weight"].T).unflatten(1, (-1, size)) for part in "qkv"
        )
        seen = []
        for slot in range(sizes.block_size):
            here = start + slot
            query = turned(normed(queries[here], f"{at}self_attn.q_norm"), here)
            near = [place for place in range(len(inputs)) if window is None or abs(here - place) < window]
            shown = [place for place in near if place < start or not causal or place <= here]
            found = torch.stack([turned(normed(keys[place], f"{at}self_attn.k_norm"), place) for place in shown])
            shared = found.repeat_interleave(sizes.heads // sizes.key_heads, 1)
            weights = (torch.einsum("hd,phd->hp", query, shared) / size**0.5).softmax(-1)
            held = values[shown].repeat_interleave(sizes.heads // sizes.key_heads, 1)
            seen.append(torch.einsum("hp,phd->hd", weights, held).flatten())
        states = states + torch.stack(seen) @ given[f"{at}self_attn.o_proj.weight"].T
        inputs = normed(states, f"{at}post_attention_layernorm")
        gate, up = (inputs @ given[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        states = states + (silu(gate) * up) @ given[f"{at}mlp.down_proj.weight"].T
    return normed(states, "norm")


def naive_scores(network: BlockNetwork, hidden: Tensor, path: list[int], output: Any) -> Tensor:
    """Scores ``[token]`` of the slot behind a ``path`` from the anchor on, by one slot's states after the other."""
    given, rank = dict(network.state_dict()), network.sizes.rank
    slots = hidden[network.sizes.block_size - depth_of(network) :]
    lines = output.weight if network.d2t is None else output.weight[network.scored()]
    scores = slots[len(path) - 1] @ given.get("lm_head.weight", lines).T
    if (cap := network.sizes.softcap) is not None:
        scores = cap * (scores / cap).tanh()
    scores = scores.log_softmax(-1)
    if network.sizes.markov is None:
        return scores
    first, state = given["markov_head.markov_w1.weight"], torch.zeros(rank).double()
    for slot, token in enumerate(path):
        vector = first[token]
        if network.sizes.markov == "gated":
            weight, bias = (given[f"markov_head.gate_proj.{each}"] for each in ("weight", "bias"))
            vector = (weight @ torch.cat([slots[slot], vector]) + bias).sigmoid() * vector
        elif network.sizes.markov == "rnn":
            weight, bias = (given[f"markov_head.joint_proj.{each}"] for each in ("weight", "bias"))
            keep, new, out = (weight @ torch.cat([state, vector, slots[slot]]) + bias).split(rank)
            state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
            vector = out.tanh()
    return scores + given["markov_head.markov_w2.weight"] @ vector


class Noted:
    """Hidden states of a last pass, random, as taps have them."""

    def __init__(self) -> None:
        self.now = torch.zeros(0)

    def passed(self, batch: int, nodes: int) -> None:
        self.now = torch.randn(2, batch, nodes, 32, dtype=torch.float64)

    def of(self, tap: str) -> Tensor:
        return self.now[("layer.1", "layer.3").index(tap)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_a_text_is_the_text(kind: str) -> None:
    """Whatever was accepted, in whatever company: a block says what it says from scratch, behind every token."""
    network, rng, noted = random_network(kind), random.Random(3), cast(Any, Noted())
    model = fresh_model("llama", num_hidden_layers=5)
    embed, output, batch = model.get_input_embeddings(), model.lm_head, 3
    candidates = BlockCandidates(BlockHead(network, (1, 3), network.sizes.anchor_first), model, noted, batch, VOCAB)
    torch.manual_seed(0)
    noted.passed(batch, 9)
    texts, roots = [noted.now[:, row, -length:] for row, length in enumerate((9, 4, 7))], [0] * batch
    for row, text in enumerate(texts):
        candidates.start(row, [1] * text.shape[1])
    for step in range(7):
        for row in range(batch):
            if step and (step + row) % 3 == 0:
                continue  # it writes nothing in this pass
            nodes = [0] if not step else sorted(rng.sample(range(6), rng.randint(1, 4)))
            tokens = [rng.randrange(VOCAB) for _ in nodes]
            if step:
                texts[row] = torch.cat([texts[row], noted.now[:, row, nodes]], dim=1)
            candidates.write(row, Walk(nodes, tokens))
            roots[row] = tokens[-1]
        if step not in (1, 2):  # nobody asks
            for row in range(batch):
                found = candidates.of(row)
                assert found is not None and len(found.tokens) == depth_of(network)
                with torch.no_grad():
                    hidden = naive(network, torch.cat(list(texts[row]), -1), roots[row], embed)
                    check_behind(network, hidden, found, roots[row], output)
        noted.passed(batch, 6)


def check_behind(network: BlockNetwork, hidden: Tensor, found: Found, root: int, output: Any) -> None:
    ids = torch.arange(VOCAB) if network.d2t is None else network.scored()
    path = [root]
    for depth in range(len(found.tokens)):
        known = {path[-1]} if network.sizes.markov == "rnn" or not depth else {*found.after(depth - 1, path[-2])[0][:5]}
        for token in known:
            tokens, scores, odds = found.after(depth, int(token))
            expected = naive_scores(network, hidden, [*path[:-1], int(token)], output)
            lines = [int((ids == int(each)).nonzero()) for each in tokens]
            torch.testing.assert_close(torch.from_numpy(scores), expected[lines].float(), atol=1e-4, rtol=1e-4)
            if token == path[-1]:
                assert tokens[0] == ids[expected.argmax()]
            if network.confidence_head is not None:
                given = hidden[depth + network.sizes.block_size - depth_of(network)]
                if network.sizes.confidence > 32:
                    given = torch.cat([given, network.markov_head.markov_w1.weight[int(token)]])
                weight, bias = network.confidence_head["proj"].weight[0], network.confidence_head["proj"].bias
                assert odds == pytest.approx(float(weight @ given + bias), abs=1e-4)
        path.append(int(found.after(depth, path[-1])[0][0]))


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("first", [True, False], ids=["anchor-first", "fill-in"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_pair_scores_that_are_the_models_are_accepted_whole(first: bool, sample: bool) -> None:
    """A model whose next token depends on its last one alone, and a Markov head that has its logits."""
    model = successor_model({token: (token * 5 + 1) % VOCAB for token in range(VOCAB)})
    torch.manual_seed(5)
    sizes = {"hidden_size": VOCAB, "target_size": VOCAB, "rank": VOCAB, "markov": "vanilla", "confidence": 0}
    network = random_network("anchor first", feature_layers=(0, 1), block_size=6, anchor_first=first, **sizes)
    with torch.no_grad():
        if sample:  # a model that draws
            model.lm_head.weight.copy_(torch.randn(VOCAB, VOCAB) * 0.5)
        network.norm.weight.zero_()
        network.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        tokens = torch.arange(VOCAB)[:, None]
        network.markov_head.markov_w2.weight.copy_(model(tokens).logits[:, 0].T)
    strategy = Block(BlockHead(network, (0, 1), first), tree="chain")
    for batch in (1, 3):
        settings = {"do_sample": sample, "max_new_tokens": 1 + 8 * (sizes_depth := depth_of(network) + 1)}
        output = same_as_plain(model, prompts(batch), strategy, **settings)
        assert sizes_depth == 7 - (not first) and output.stats.steps == 9, "the prompt's pass, and eight whole blocks"

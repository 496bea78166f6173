"""A draft model as a source: what it says, what stays in its cache, and how deep it is right."""

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.automatic import FLAT
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model

from jacobi import Path, TokenTree
from lookahead import Lookahead
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.runtime.attention import grouped_attention
from lookahead.sources.draft_model import BEST, DraftModelSource
from lookahead.sources.draft_texts import DraftPasses, DraftTexts
from lookahead.sources.perturbed import BINS
from lookahead.sources.vocabularies import SameVocabulary

pytestmark = pytest.mark.usefixtures("augmented")

SAME = SameVocabulary(VOCAB, VOCAB)


@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("mistral", 3), ("gemma3", 3), ("gpt2", 1)])
def test_a_draft_models_cache_is_the_texts(name: str, batch: int) -> None:
    """After any sequence of questions and texts it says what it says without a cache."""
    model, rng = tiny_model(name), random.Random(batch)

    def drawn(least: int, most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]

    for _ in range(2):
        with ExitStack() as stack, grouped_attention(), torch.no_grad():
            shared = DraftTexts(model, SAME, batch, 40, stack.callback)
            passes = [DraftPasses(shared, row) for row in range(batch)]
            texts = [drawn(1, 9) for _ in range(batch)]
            for each, text in zip(passes, texts, strict=True):
                each.start(text)
            branches: list[list[tuple[int, ...]]] = [[()] for _ in range(batch)]
            while max(map(len, texts)) < 40:
                for row in range(batch):
                    if rng.random() < 0.2 and len(branches[row]) > 1:
                        continue  # this one waits for the others
                    kept = rng.choice(branches[row]) if rng.random() < 0.6 else ()
                    new = [*kept, *drawn(1, 2)]
                    passes[row].write(Path([], new))
                    texts[row] += new
                    branches[row] = [()]
                for _ in range(rng.randint(0, 3)):  # levels
                    rows = rng.sample(range(batch), rng.randint(1, batch))
                    asked = {row: [(*rng.choice(branches[row]), *drawn(1, 1)) for _ in range(3)] for row in rows}
                    for row, answers in shared.after(asked).items():
                        for branch, said in zip(asked[row], answers, strict=True):
                            logits = model(torch.tensor([[*texts[row], *branch]])).logits[0, -1]
                            assert said is not None
                            tokens, values = said
                            assert len(tokens) == min(BEST, VOCAB)
                            assert tokens[0] == logits.argmax()
                            torch.testing.assert_close(logits[tokens.tolist()].float(), torch.tensor(values))
                        branches[row] += asked[row]


@pytest.mark.parametrize("settings", [{"nodes": 6}, {"tuning": FLAT}], ids=["fixed", "automatic"])
def test_all_sequences_are_asked_about_in_one_pass_a_level(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of different depths end at different levels."""
    asked: list[int] = []
    after = DraftTexts.after
    monkeypatch.setattr(DraftTexts, "after", lambda self, given: (asked.append(len(given)), after(self, given))[1])
    model = fresh_model("llama", 3)
    strategy = Lookahead(seed=0, draft_model=model, sources=("draft",), **settings)
    stats = same_as_plain(model, prompts(3), strategy, max_new_tokens=30, top_k=0, eos_token_id=None).stats
    assert stats.mean_acceptance_length > 3
    assert asked[:2] == [3, 3]
    assert len(asked) < 0.6 * sum(asked)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_that_drafts_for_itself_is_right_to_the_end(
    sample: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass keeps a path that ends where its tree does, and writes one token more."""
    ends: list[bool] = []
    learn = AutomaticDrafter.learn

    def watched(self: Any, tree: TokenTree, greedy: Any, path: Any, successors: Any = None) -> None:
        ends.append(not tree.children[path.nodes[-1]])
        learn(self, tree, greedy, path, successors)

    monkeypatch.setattr(AutomaticDrafter, "learn", watched)
    model = fresh_model("llama", 3)
    strategy = Lookahead(nodes=6, seed=0, draft_model=model, sources=("draft",))
    settings = {"do_sample": sample, "max_new_tokens": 40, "top_k": 0}
    output = same_as_plain(model, prompts(batch), strategy, **settings)
    assert all(ends)
    assert output.stats.mean_acceptance_length > 3
    assert set(output.stats.sources) == {"draft"}


@pytest.mark.parametrize("draft", ["gpt2", "mistral", "gemma3"])
def test_texts_do_not_change(draft: str) -> None:
    fixed, automatic = ({"draft_model": tiny_model(draft)} | more for more in ({"nodes": 9, "seed": 1}, {}))
    for batch, sample, how in ((1, False, fixed), (1, True, automatic), (3, False, automatic), (3, True, fixed)):
        settings = {"do_sample": sample, "max_new_tokens": 30, "eos_token_id": [5, 6], "output_scores": True}
        same_as_plain(tiny_model("llama"), prompts(batch), Lookahead(**how), **settings)


def test_a_draft_model_may_end_before_the_text() -> None:
    """Positions that it does not have are not asked about, and what it drafted until then stays right."""
    model = fresh_model("gpt2", 1)
    draft = fresh_model("gpt2", 1, n_positions=26)
    draft.load_state_dict({**model.state_dict(), "transformer.wpe.weight": model.transformer.wpe.weight[:26]})
    strategy = Lookahead(nodes=6, seed=0, draft_model=draft, sources=("draft",))
    output = same_as_plain(model, prompts(1), strategy, max_new_tokens=40)
    assert 5 < output.stats.accepted < 15
    same_as_plain(model, prompts(1, 30), strategy, max_new_tokens=20)


def test_a_model_with_more_tokens_drafts_for_one_with_fewer() -> None:
    """Vocabularies may be padded: what the model does not have is neither proposed nor fed."""
    small, large = tiny_model("llama"), fresh_model("llama", 2, vocab_size=64)
    for model, draft in ((small, large), (large, small)):
        for sample in (False, True):
            strategy = Lookahead(nodes=8, seed=0, draft_model=draft, sources=("draft",))
            same_as_plain(model, prompts(2), strategy, max_new_tokens=30, do_sample=sample)


def test_a_copy_that_rounds_by_what_else_is_in_a_pass() -> None:
    """As quantised activations do: it says a little else in every pass, and drafts all the same."""
    model, draft = fresh_model("llama", 3), fresh_model("llama", 3)

    def quantised(module: Any, args: Any) -> tuple[torch.Tensor]:
        step = args[0].abs().max() / 31
        return ((args[0] / step).round() * step,)

    for layer in draft.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(quantised)
    strategy = Lookahead(nodes=6, seed=0, draft_model=draft, sources=("draft",))
    for batch in (1, 3):
        stats = same_as_plain(model, prompts(batch), strategy, max_new_tokens=30, eos_token_id=None).stats
        assert stats.mean_acceptance_length > 2


def test_kinds_fit_their_priors() -> None:
    with ExitStack() as stack:
        source = DraftModelSource(DraftPasses(DraftTexts(tiny_model("llama"), SAME, 1, 4, stack.callback), 0), None)
        with grouped_attention(), torch.no_grad():
            source.start([1, 2, 3], None)
            source.learn(TokenTree(0), Path([0], [4]), None)
            (offer,) = source.expand([()])
    assert offer
    assert len(source.priors) == 2 * BINS
    assert offer[0][1] < BINS <= offer[1][1] < 2 * BINS
    assert source.spent_ms > 0.0


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_the_ecosystems_own_doors(sample: bool) -> None:
    """``assistant_model`` and ``assistant_early_exit`` beside ``use_lookahead``; without it they are transformers'."""
    model, settings = fresh_model("llama", 1, num_hidden_layers=3), {"do_sample": sample, "max_new_tokens": 30}
    plain = run(model, prompts(1), **settings)
    strategy = Lookahead(nodes=8, seed=0)
    for assistant in ({"assistant_model": tiny_model("mistral")}, {"assistant_early_exit": 2}):
        given = settings | assistant | {"use_lookahead": True, "return_dict_in_generate": True}
        output, state = run(model, prompts(1), **given, lookahead_strategy=strategy)
        assert output.sequences.tolist() == plain[0].tolist()
        assert torch.equal(state, plain[1])
        assert "draft" in output.stats.sources
        assert output.stats.accepted > 3
    same = run(model, prompts(1), do_sample=False, max_new_tokens=30, assistant_model=tiny_model("llama_mha"))[0]
    assert sample or same.tolist() == plain[0].tolist()


def test_the_first_layers_share_the_models_weights() -> None:
    from lookahead.models.early_exit import early_exit

    model = fresh_model("llama", 1, num_hidden_layers=3)
    exit_ = early_exit(model, 2)
    assert exit_ is early_exit(model, 2)
    assert len(exit_.model.layers) == 2 == exit_.config.num_hidden_layers
    assert len(model.model.layers) == 3 == model.config.num_hidden_layers
    ids = prompts(1)["input_ids"]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[2]
        expected = model.lm_head(model.model.norm(states))
        torch.testing.assert_close(exit_(ids).logits, expected)
        model.lm_head.weight.mul_(2.0)
        torch.testing.assert_close(early_exit(model, 2)(ids).logits, 2 * expected)
    assert {id(p) for p in exit_.parameters()} <= {id(p) for p in model.parameters()}

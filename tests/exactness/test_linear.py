"""Recurrent and hybrid models: which take chains, that the text is plain decoding's, and what is left behind."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.hybrids import CHAIN, PLAIN, REPLAYED, SCANNED, counting_hybrid, fresh_hybrid, hybrid, known
from helpers.marks import few
from helpers.medusa import counting_heads
from helpers.models import judged, prompts, run, same_as_plain, same_caches
from helpers.refusals import refuses
from transformers import DynamicCache, GenerationConfig, StaticCache

from jacobi import LookaheadError, Path, TokenTree, Wants
from lookahead import Jacobi, Lookahead, Medusa
from lookahead.draft.latency import StepTimes
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.forward import Prompt
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.session import bare_chain
from lookahead.support import route as support
from lookahead.tuning import sweep

pytestmark = pytest.mark.usefixtures("augmented")

# Recurrent layers compute in float32, and in another order for several tokens.
same = partial(same_as_plain, tolerance=1e-3, max_new_tokens=24)
# Delta rule, both kinds in a layer, convolutions; windows, which are given one branch.
FEW = ["qwen3_next", "falcon_h1", "lfm2", "inkling"]


@pytest.mark.parametrize("name", known(CHAIN | PLAIN))
def test_families(name: str) -> None:
    """Those take chains for which several tokens that continue a state give what they give one by one, also after the
    state was restored; they are known by the test, not by their names."""
    route, reason = support.verdict(hybrid(name))
    assert route == ("tree" if name in SCANNED else "chain" if name in CHAIN else "plain"), reason
    if name not in SCANNED:
        assert ("a recurrent state cannot follow a tree" if name in CHAIN else "cannot follow a tree, and") in str(
            reason
        )


@pytest.mark.parametrize("name", known(CHAIN))
@pytest.mark.parametrize("sample", few([False, True], True), ids=["greedy", "sample"])
def test_same_text(name: str, sample: bool) -> None:
    """Drafts that are nearly always wrong: every pass is cut short."""
    output = same(hybrid(name), prompts(1), Lookahead(nodes=5, seed=1), do_sample=sample)
    assert output.stats.drafted > 0
    assert (output.stats.fed_again > 0) == (name in REPLAYED)


@pytest.mark.parametrize("name", few(known(CHAIN), *FEW))
def test_text_that_repeats(name: str, passes: Callable[[Any], list[int]]) -> None:
    """Fewer passes than tokens, by more than a third."""
    model = counting_hybrid(name)
    assert support.route(model)[0] == ("tree" if name in SCANNED else "chain")
    seen = passes(model)
    plain, _ = run(model, prompts(1), max_new_tokens=60, do_sample=False)
    count = len(seen)
    output = same(model, prompts(1), Lookahead(nodes=8, seed=1), max_new_tokens=60)
    assert plain[0, -14:-7].tolist() == plain[0, -7:].tolist()
    assert output.stats.mean_acceptance_length >= 1.5
    assert len(seen) - 2 * count <= 60 / 1.5 + 1  # one more for the cache that is returned


@pytest.mark.parametrize("name", known(FEW))
@pytest.mark.parametrize("sample", few([False, True], True), ids=["greedy", "sample"])
def test_batches(name: str, sample: bool) -> None:
    """Rows of different lengths advance together, finished ones along with the others."""
    for model in (hybrid(name), counting_hybrid(name)):
        output = same(model, prompts(3), Lookahead(nodes=4, seed=1), do_sample=sample)
        assert output.stats.steps <= 25
        same(model, prompts(3), Lookahead(nodes=4), do_sample=sample, eos_token_id=[3, 11], output_scores=True)


@pytest.mark.parametrize("name", few(known(FEW), "falcon_h1", "lfm2"))
@pytest.mark.parametrize(
    "strategy",
    [
        None,
        Lookahead(window_size=4, ngram_size=3, verification_set_size=4, seed=1),
        Lookahead(sources=("pool",), nodes=4, seed=1),
        Jacobi(block_size=4, seed=1),
        Jacobi(mode="hybrid", block_size=4, seed=1),
        Jacobi(mode="jacobi", block_size=4, blocks=2, spawn_ratio=0.5, tails=4, seed=1),
    ],
    ids=["automatic", "wng", "pool", "sliding", "jacobi-hybrid", "blocks"],
)
def test_strategies(name: str, strategy: Any) -> None:
    """Whatever the drafts come from; a window has no place in a chain, and n-grams come from the text then."""
    for model in (hybrid(name), counting_hybrid(name)):
        output = same(model, prompts(1), strategy, max_new_tokens=40)
        assert not output.stats.plain
    if strategy is not None and strategy.name == "lookahead":
        assert output.stats.mean_acceptance_length >= 1.5


@pytest.mark.parametrize("name", known(FEW))
def test_going_on_from_a_cache(name: str) -> None:
    """What one call leaves, the next one continues, in plain decoding and with chains, in every order."""
    model = counting_hybrid(name)
    inputs = prompts(1)
    texts = []
    for first in (False, True):
        for second in (False, True):
            settings: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
            drafts = {"use_lookahead": True, "lookahead_strategy": Lookahead(nodes=6, seed=1)}
            start = model.generate(**inputs, max_new_tokens=17, **settings, **(drafts if first else {}))
            following = {
                "input_ids": start.sequences,
                "attention_mask": torch.ones_like(start.sequences),
                CACHE: start[CACHE],
            }
            end = model.generate(**following, max_new_tokens=12, **settings, **(drafts if second else {}))
            assert end[CACHE] is start[CACHE]
            texts.append((end.sequences.tolist(), end[CACHE]))
    for text, cache in texts[1:]:
        assert text == texts[0][0]
        same_caches(cache, texts[0][1], 1e-4)


@pytest.mark.parametrize("name", known(PLAIN))
def test_handed_over(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Plain decoding's text, a warning that names the reason, once a model, and statistics that say so."""
    model = judged(fresh_hybrid(name))
    with caplog.at_level(logging.WARNING, "lookahead"):
        output = same(model, prompts(1), max_new_tokens=8)
        same(model, prompts(1), Lookahead(window_size=3, ngram_size=3, verification_set_size=2), max_new_tokens=8)
        same(model, prompts(1), Jacobi(stats="none"), do_sample=True, max_new_tokens=8)
    messages = [record.message for record in caplog.records if record.name == "lookahead"]
    assert len(messages) == 1
    assert type(model).__name__ in messages[0]
    assert "plain decoding goes on" in messages[0]
    ((reason, calls),) = output.stats.plain.items()
    assert calls == 1
    assert reason in messages[0]
    assert "transformers' own loop" in output.stats.explain()
    assert (output.stats + output.stats).plain == {reason: 2}
    assert model.generate(**prompts(1), max_new_tokens=3, use_lookahead=True).shape == (1, 15)


def test_caches_that_cannot_go_back(passes: Callable[[Any], list[int]]) -> None:
    """Refused by name before any pass."""
    model = hybrid("qwen3_next")
    support.route(model)
    seen = passes(model)
    settings = {"max_new_tokens": 8, "use_lookahead": True}
    for given, message in (
        ({CACHE: StaticCache(config=model.config, max_cache_len=64)}, "A StaticCache cannot take .* a DynamicCache"),
        ({CACHE: DynamicCache(config=model.config, offloading=True)}, "An offloaded cache cannot take rejected tokens"),
        ({"lookahead_strategy": Lookahead(static=True)}, "static=True cannot be used"),
    ):
        refuses(message, model.generate, **prompts(1), **given, **settings)
    assert seen == []
    cache = run(hybrid("lfm2"), prompts(1), max_new_tokens=2, return_dict_in_generate=True)[0][CACHE]
    other = fresh_hybrid("lfm2", num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"])
    support.route(other)
    with pytest.raises(LookaheadError, match="the cache of another model: it has 2 layers, this model 3"):
        other.generate(**prompts(1, 20), **{CACHE: cache}, **settings)


def test_branches_are_refused() -> None:
    """As are rows that keep different numbers of tokens."""
    prompt = prompts(2, ragged=False)["input_ids"]
    with torch.no_grad(), bare_chain(hybrid("lfm2"), prompt) as chain:
        with pytest.raises(LookaheadError, match="Row 1's draft branches: expected a chain"):
            chain.forward([TokenTree.chain(1, [2]), TokenTree.from_paths(1, [[2], [3]])])
        chain.forward([TokenTree.chain(1, [2, 3]), TokenTree.chain(1, [2])])
        refuses(r"kept \[1, 2\] tokens of a pass", chain.keep, [Path([0, 1], [2, 9]), Path([0], [9])])


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_passes_that_are_not_decided(name: str) -> None:
    """They can be run again from the same place, as tuning does."""
    with torch.no_grad(), bare_chain(hybrid(name), prompts(1)["input_ids"]) as chain:
        chain.hold()
        tree = TokenTree.chain(5, [6, 7, 8])
        first = chain.forward([tree]).logits
        chain.forward([TokenTree(4)])
        torch.testing.assert_close(chain.forward([tree]).logits, first)


def test_passes_over_one_token_record_no_past() -> None:
    """Only what may be taken back is kept; the rest costs what plain decoding's passes do."""
    with torch.no_grad(), bare_chain(hybrid("inkling"), prompts(1)["input_ids"]) as chain:
        for tokens, records in (([5], False), ([5, 6, 7], True), ([8], False)):
            chain.forward([TokenTree.chain(tokens[0], tokens[1:])])
            assert {layer.record_past for layer in chain._cache.layers if hasattr(layer, "record_past")} == {records}
            chain.keep([Path([0], [8])])


def test_what_is_fed_again_is_bounded() -> None:
    """Where every draft is wrong, and scans are not known, a pass without one comes at last."""
    model = hybrid("zaya")
    inputs = prompts(1)["input_ids"]
    cache = DynamicCache(config=model.config)
    chain = LinearModel(model, ModelTraits.of(model), Prompt(inputs, GenerationConfig(), {}, cache, 0), Wants())
    with torch.no_grad():
        chain.prefill()
        chain.keep([Path([0], [0])])
        most = 0
        while chain.room() is None:
            chain.forward([TokenTree.chain(3, [4])])
            chain.keep([Path([0], [3])])
            most = max(most, chain.again)
        assert chain.room() == [0]
        assert chain.again == most == 64
        assert chain.context == 12 + 64
        chain.forward([TokenTree(3)])
        chain.keep([Path([0], [3])])
    assert (chain.again, chain.context, chain.room()) == (0, 12 + 65, None)
    assert int(cache.get_seq_length()) == chain.context


def test_tuning() -> None:
    """The curve of chains; there is none for a model that takes nothing but single tokens."""
    times = sweep(counting_hybrid("lfm2"), nodes=(1, 2, 4), contexts=(16,), seconds=0.01, save=False)
    assert isinstance(times, StepTimes)
    assert times.ms(2, 16) > 0
    with pytest.raises(LookaheadError, match=r"no passes to measure.*falls back to plain decoding"):
        sweep(hybrid("jamba"), nodes=(1, 2), contexts=(16,), seconds=0.01, save=False)


@pytest.mark.parametrize("sources", [None, ("heads", "suffix")], ids=["fixed", "automatic"])
def test_medusa(sources: tuple[str, ...] | None) -> None:
    """The heads' tree, or the chain of every head's best candidate, or the heads as one source among others."""
    heads = counting_heads(48, 3, 7, 1.0)
    for name in ("qwen3_next", "mamba2"):
        model = counting_hybrid(name)
        for sample in (False, True):
            strategy = Medusa(heads, sources=sources, seed=1)
            output = same(model, prompts(1), strategy, do_sample=sample, max_new_tokens=40)
            assert output.stats.mean_acceptance_length >= 1.5
    lossy = Medusa(heads, acceptance="typical")
    with pytest.raises(LookaheadError, match="the rows of this model can only advance together: got 2 rows"):
        model.generate(**prompts(2), do_sample=True, max_new_tokens=8, use_lookahead=True, lookahead_strategy=lossy)


def test_coarse_numbers() -> None:
    """In bfloat16 a mistake hides behind rounding, so what was found in float32 has the say."""
    for name, way in (("qwen3_next", "tree"), ("nemotron_h", "tree"), ("mamba2", "chain")):
        assert support.verdict(fresh_hybrid(name, dtype=torch.bfloat16))[0] == way


def test_a_state_of_the_models_own() -> None:
    """RecurrentGemma keeps its states on its modules: a test between two turns must not disturb them."""
    turns = []
    for tested in (False, True):
        model = fresh_hybrid("recurrent_gemma")
        first = run(model, prompts(1), max_new_tokens=5, return_dict_in_generate=True)[0]
        if tested:
            assert support.verdict(model)[0] == "plain"
        following = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
        try:
            again = run(model, following, **{CACHE: first[CACHE]}, max_new_tokens=20)[0]
        except RuntimeError as error:
            assert not tested
            pytest.skip(f"plain decoding of this transformers has no second turn here: {error}")
        turns.append(again.tolist())
    assert turns[0] == turns[1]

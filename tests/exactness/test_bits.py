"""Texts in bfloat16: the same each time, and plain decoding's where this machine's kernels allow it, bit by bit."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, run
from helpers.packing import AT_ONCE
from helpers.refusals import refuses
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead import Jacobi, Lookahead
from lookahead.models.traits import ModelTraits
from lookahead.runtime import ordered_attention, packing
from lookahead.runtime.layer_trials import RowRange
from lookahead.runtime.session import bare_model
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import trace_now, traces_to_measure
from lookahead.scheduling.scheduler import Scheduler
from lookahead.support import bits
from lookahead.support.bits import bits_of

pytestmark = pytest.mark.usefixtures("augmented", "batches_draft")
LIKE_LLAMA = ("llama", "llama_mha", "mistral", "qwen2", "qwen2_mixed", "qwen3", "gemma3", "cohere2", "olmo2", "phi3")
IN_16_BITS = [*((name, torch.bfloat16) for name in LIKE_LLAMA), ("llama", torch.float16), ("qwen3", torch.float16)]
SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "initializer_range": 0.06}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0}


def half(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model in 16 bits, large enough for the kernels of real ones; skips where none of them keeps a row's bits."""
    model = fresh_model(name, **SIZES).to(dtype)
    with torch.no_grad():
        try:
            bits_of(model, ModelTraits.of(model), "tree", True)
        except LookaheadError as error:
            pytest.skip(str(error))
    return model


def written(model: PreTrainedModel, inputs: dict[str, Any], strategy: Any = None, **settings: Any) -> Any:
    settings = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True} | settings
    return run(model, inputs, use_lookahead=strategy is not None, lookahead_strategy=strategy, **settings)[0]


def equal(one: Any, other: Any) -> bool:
    """Whether two calls wrote the same by the same logits."""
    same = all(torch.equal(*pair) for pair in zip(one.logits, other.logits, strict=True))
    return same and torch.equal(one.sequences, other.sequences)


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "dtype"), IN_16_BITS)
def test_the_same_call_writes_the_same(name: str, dtype: torch.dtype, batch: int, sampled: dict[str, Any]) -> None:
    """Whatever trees are drafted, and by which strategy: a node's numbers depend on its text alone."""
    model, given = half(name, dtype), prompts(batch, 70)
    first, *others = [
        written(model, given, strategy, **sampled)
        for strategy in (
            Lookahead(repeatable=True),
            Lookahead(repeatable=True, nodes=1),
            Lookahead(repeatable=True, nodes=13, seed=2),
            Lookahead(repeatable=True, window_size=4, ngram_size=3),
            Jacobi(repeatable=True, block_size=6),
        )
    ]
    assert all(equal(first, other) for other in others)
    assert first.stats.repeatable


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "dtype"), IN_16_BITS)
def test_the_text_is_plain_generates(name: str, dtype: torch.dtype, batch: int, sampled: dict[str, Any]) -> None:
    model, given = half(name, dtype), prompts(batch, 40)
    ours = written(model, given, Lookahead(repeatable=True, nodes=9), **sampled)
    if ours.stats.bits.keys() != {"plain"}:
        pytest.skip(f"this machine's kernels keep {ours.stats.bits}")
    assert equal(ours, written(model, given, **sampled))


def test_by_other_attention_the_text_is_not_plain_generates() -> None:
    model = half("llama")
    model.set_attn_implementation("eager")
    told = written(model, prompts(1, 40), Lookahead(repeatable=True, attention="sdpa")).stats
    assert told.bits.keys() == {"repeatable"}


def test_after_some_positions_attention_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = half("llama"), prompts(1, 40)
    monkeypatch.setattr(bits, "how_singly", lambda *_, **__: 0)
    monkeypatch.setattr(bits, "_TURNS", 52)
    calls = [written(model, given, Lookahead(repeatable=True, nodes=nodes)) for nodes in (1, 7, 20)]
    assert all(equal(calls[0], other) for other in calls[1:])


@pytest.mark.usefixtures("passes_count")
def test_packed_and_traced_passes_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = half("llama"), prompts(1, 40)
    strategy = Lookahead(repeatable=True, nodes=9, remember=False)
    as_it_lies = written(model, given, strategy)
    for name, value in AT_ONCE.items():
        monkeypatch.setattr(packing, name, value)
    packed = written(model, given, strategy)
    assert equal(as_it_lies, packed)
    with torch.no_grad():
        limits = bits_of(model, ModelTraits.of(model), "tree", True).limits
        assert limits is not None and bool(packing.packing_of(model).weights) == packing.packs_alike(model, limits)
        layers = packing.layers_of(model, packs=True, limits=limits)
        passes = [[TokenTree.chain(3, [4] * nodes)] for nodes in (0, 5)]
        traces = traces_to_measure(model, layers)
        traced = partial(TracedExecutor, traces)
        with bare_model(model, given["input_ids"], 64, traced=traced, packed=layers) as view:
            before = [view.forward(trees).logits for trees in passes]
            trace_now(model, view, passes)
            assert traces.made and all(map(torch.equal, before, [view.forward(trees).logits for trees in passes]))


def test_requests_are_alike_alone_and_together() -> None:
    """By themselves, eight at once, drafted or not, and with a beginning of the prompt kept from another one. Where
    none is kept, texts are plain ones if kernels allow it."""
    model, more, padded = half("llama"), SAMPLED | {"max_new_tokens": 16}, prompts(3, 20)
    texts = [prompts(1, 71, seed=int(length > 9))["input_ids"][:, :length] for length in (5, 9, 30, 71)]
    asked = [{"input_ids": ids} for ids in texts] + [{name: given[2:] for name, given in padded.items()}]

    def answers(rows: int, prefix_bytes: int = 0) -> list[Any]:
        with Scheduler(model, rows, Lookahead(repeatable=True), prefix_bytes) as scheduler:
            tickets = [scheduler.submit(seed=at, **given, **more) for at, given in enumerate(asked)]
            tickets += [scheduler.submit(seed=3, use_lookahead=False, **asked[3], **more)]
            scheduler.run()
        return [ticket.result().tolist() for ticket in tickets]

    assert (together := answers(8)) == answers(3) == answers(1)
    assert answers(1, 1 << 26) == answers(8, 1 << 26)
    with torch.no_grad():
        limits = bits_of(model, ModelTraits.of(model), "tree", True).limits
    plain = [run(model, given, seed=at, **more)[0].tolist() for at, given in enumerate(asked)]
    assert together == [*plain, plain[3]] or (limits is not None and not limits.singly)


def test_a_request_may_give_more_than_a_text() -> None:
    """Positions are the caller's, by a scheduler as by a call."""
    model, ids = half("llama"), prompts(1, 20)["input_ids"]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "position_ids": torch.arange(7, 27)[None]}
    with Scheduler(model, rows=2, strategy=(strategy := Lookahead(repeatable=True))) as scheduler:
        ticket = scheduler.submit(input_ids=ids, **settings)
        scheduler.run()
    alone = model.generate(ids, use_lookahead=True, lookahead_strategy=strategy, **settings)
    assert ticket.result().tolist() == alone.tolist()


def test_what_cannot_be_kept_is_refused_before_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half("llama")
    for change, told in (
        ({"verification": "rejection"}, "what is accepted depends on drafts"),
        ({"attention": "eager"}, "is code of its own"),
    ):
        with pytest.raises(LookaheadError, match=f"repeatable=True cannot be kept: .*{told}"):
            written(model, prompts(1), Lookahead(repeatable=True, **change), **SAMPLED)
    with pytest.raises(LookaheadError, match="positions turn 8 channels"):
        written(fresh_model("qwen3").to(torch.bfloat16), prompts(1), Lookahead(repeatable=True))
    experts = fresh_model("mixtral").to(torch.bfloat16)
    refuses("is multiplied by code of its own", written, experts, prompts(1), Lookahead(repeatable=True))
    monkeypatch.setattr(bits, "rows_of_all", lambda *_, **__: None)
    refuses("linear layers give other outputs", written, model, prompts(1), Lookahead(repeatable=True))
    refuses(r"repeatable=\) must be True or False: got 'yes'", Lookahead, repeatable="yes")


@pytest.mark.parametrize(
    ("rows", "singly", "wanted", "keeps", "why"),
    [
        (RowRange(1, 64), 0, None, "repeatable", "single token adds in another order"),
        (RowRange(1, 64), 0, True, "plain", "after 512 positions"),
        (RowRange(1, 64), 1, None, "plain", "None"),
        (RowRange(2, 64), 1, True, "repeatable", "one row than for two"),
        (None, 1, None, None, "other numbers of rows"),
    ],
)
def test_a_call_keeps_what_kernels_allow(
    monkeypatch: pytest.MonkeyPatch, rows: RowRange | None, singly: int, wanted: Any, keeps: str | None, why: str
) -> None:
    model = half("llama")
    monkeypatch.setattr(bits, "rows_of_all", lambda *_, **__: rows and {256: rows})
    monkeypatch.setattr(bits, "how_singly", lambda *_, **__: singly)
    monkeypatch.setattr(bits, "computed_dtype", lambda dtype: dtype)
    monkeypatch.setattr(bits, "packs_alike", lambda *_: True)
    with torch.no_grad():
        found = bits_of(model, ModelTraits.of(model), "tree", wanted)
    assert found.keeps == keeps and why in str(found.reason)
    model.float()
    assert bits_of(model, ModelTraits.of(model), "tree", obstacle="passes are static").keeps == "plain"


def test_without_instructions_for_it_speed_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half("llama")
    monkeypatch.setattr(bits, "computed_dtype", lambda dtype: torch.float32)
    with torch.no_grad():
        found = bits_of(model, ModelTraits.of(model), "tree")
    assert found.keeps is None and "no instructions for bfloat16" in str(found.reason)
    assert bits_of(model, ModelTraits.of(model), "tree", False).reason == "repeatable=False"


def test_attention_of_another_kind_is_found_by_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose values have other channels, or that makes masks of its own, takes the promise back."""
    model = half("llama")
    monkeypatch.setattr(ordered_attention, "_left_out", set())
    monkeypatch.setattr(ordered_attention, "serves", lambda *given: False)
    refuses("cannot be kept: LlamaAttention attends with", written, model, prompts(1), Lookahead(repeatable=True))
    told = written(model, prompts(1), Lookahead(repeatable=None)).stats
    assert not told.repeatable
    with torch.no_grad(), pytest.raises(LookaheadError, match="LlamaAttention"):
        bits_of(model, ModelTraits.of(model), "tree", True)

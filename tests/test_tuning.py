"""``lookahead.tune`` and the step-time curve: what it learns, recommends and keeps; no wrong argument or file harms."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.curves import key_of
from helpers.hybrids import hybrid
from helpers.models import counting_model, fresh_model, judged, letters_tokenizer, tiny_model
from helpers.refusals import refuses
from transformers import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lookahead
from jacobi import LookaheadError
from lookahead import Lookahead, tuning
from lookahead.chat_format import CHAT_PROMPTS, PROMPTS
from lookahead.draft.latency import StepTimes
from lookahead.generation.curves import step_times
from lookahead.models.compat import expert_registries
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.tracing.schedule import traces_for
from lookahead.runtime.tree import TreeModel
from lookahead.sources.recycling import BEST


def test_sweep(curves: Path) -> None:
    model = counting_model()
    told: list[float] = []
    state = torch.get_rng_state()
    times = tuning.sweep(model, nodes=(1, 4, 16), contexts=(20, 300), seconds=0.02, report=told.append)
    assert torch.equal(torch.get_rng_state(), state), "no draw of the user's"
    for context in (20, 300):
        assert all(times.weight(nodes, context) > 0 and times.ms(nodes, context) > 0 for nodes in (1, 4, 16))
        assert times.weight(64, context) == 0
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 6
    assert all(0.0 <= share <= 1.0 for share in told)
    assert list(curves.iterdir()) == [key_of(model)], "the curve and no leftovers"
    saved = tuning.cached(model)
    assert saved is not None and saved.to_dict() == times.to_dict()
    assert saved.about == tuning.describe(model)


def test_sweep_of_traced_passes(curves: Path) -> None:
    """They have a curve of their own, which calls take that have traces."""
    model = fresh_model("llama")
    tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01)
    times = tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert len(list(curves.iterdir())) == 2
    saved = tuning.cached(model, traced=True)
    assert saved is not None and saved.to_dict() == times.to_dict()
    own = tuning.cached(model)
    assert own is not None and own.about | {"executor": "traced"} == saved.about
    with torch.no_grad():
        traces = traces_for(model)
    assert traces is not None and {kind.single for kind in traces.made} == {True, False}
    assert step_times(model, 1, {}, traces=traces).curve(64, 8) == times.curve(64, 8)
    assert step_times(model, 1, {}).curve(64, 8) == own.curve(64, 8)
    traces.made = {kind: trace for kind, trace in traces.made.items() if kind.single}
    assert not step_times(model, 1, {}, traces=traces).knows_single, "a mixture is learnt from passes"


def test_sweep_where_traces_turn_out_to_be_wrong(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved as traced that was not; and what was found wrong is not made again."""
    model = fresh_model("llama")
    measure = tuning._measure

    def failing(*args: Any) -> Any:
        with torch.no_grad():
            found = traces_for(model)
        assert found is not None
        found.fail("wrong")
        return measure(*args)

    monkeypatch.setattr(tuning, "_measure", failing)
    for _ in range(2):
        refuses("cannot be traced: wrong", tuning.sweep, model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert not curves.exists()


def test_sweep_of_what_cannot_be_traced(curves: Path) -> None:
    model = tiny_model("llama")
    hook = model.model.register_forward_hook(lambda *_: None)
    with pytest.raises(LookaheadError, match="cannot be traced: code other than"):
        tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    hook.remove()
    for name in ("lfm2", "zaya"):
        with pytest.raises(LookaheadError, match=r"cannot be traced: .* recurrent"):
            tuning.sweep(hybrid(name), nodes=(1, 4), contexts=(20,), seconds=0.01, traced=True)
    assert not curves.exists()


def test_sweep_without_saving_and_with_a_batch(curves: Path) -> None:
    times = tuning.sweep(counting_model(), batch=3, nodes=(1, 8), contexts=(20,), seconds=0.01, save=False)
    assert times.about["batch"] == 3
    assert times.ms(8, 20) > 0.0
    assert not curves.exists()


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma3"])
def test_sweep_of_models_with_few_positions_and_windows(name: str, curves: Path) -> None:
    """Contexts that the model has no positions for are left out, or shortened if none is left."""
    times = tuning.sweep(tiny_model(name), nodes=(1, 16), contexts=(30, 10_000), seconds=0.01)
    assert {context for context, _ in times._mean} == {0}
    times = tuning.sweep(tiny_model(name), nodes=(1, 16), contexts=(10_000,), seconds=0.01)
    assert times.ms(16, 1) > 0.0


def test_sweep_of_a_gpt2_with_all_sizes(curves: Path) -> None:
    """More nodes than positions: the tree is flat."""
    assert tuning.sweep(tiny_model("gpt2"), seconds=0.01).ms(128, 1) > 0.0


def test_sweep_refuses_what_lookahead_refuses(curves: Path) -> None:
    model = fresh_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(LookaheadError):
        tuning.sweep(model, seconds=0.01)
    assert not curves.exists()


def test_passes_with_static_shapes_have_a_curve_of_their_own() -> None:
    model = tiny_model("llama")
    assert tuning.describe(model, static=True)["executor"] == "static"
    assert tuning.describe(model, static=False)["executor"] == "eager"
    assert tuning.describe(hybrid("zaya"))["executor"] == "chain"
    assert tuning.describe(model, static=False) == tuning.describe(model, static=None), "as on any CPU"
    measured = tuning.sweep(model, static=True, nodes=(1, 4), contexts=(16,), seconds=0.01)
    assert measured.ms(4, 16) > 0.0
    assert tuning.cached(model) is None
    kept = tuning.cached(model, static=True)
    assert kept is not None and kept.ms(4, 16) == measured.ms(4, 16)
    memory: dict[Any, StepTimes] = {}
    step_times(model, 1, memory)
    assert step_times(model, 1, memory, static=True) is not next(iter(memory.values()))


@pytest.mark.parametrize("name", ["llama", "lfm2", "inkling"])
def test_passes_are_measured_as_decodes_run_them(name: str, curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many next tokens gathered, and under the same kernels."""
    model = fresh_model(name) if name == "llama" else hybrid(name)
    seen: set[tuple[bool, int]] = set()

    def noting(run: Any, self: Any, trees: Any, *how: Any) -> Any:
        wrapped = [hasattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "lookahead_original")]
        wrapped += [hasattr(registry["grouped_mm"], "lookahead_original") for registry in expert_registries()]
        seen.add((all(wrapped), max(tree.top_k for tree in trees)))
        return run(self, trees, *how)

    for kind, name_of_pass in ((TreeModel, "launch"), (LinearModel, "forward")):
        run = getattr(kind, name_of_pass)
        monkeypatch.setattr(kind, name_of_pass, lambda self, trees, *how, run=run: noting(run, self, trees, *how))
    inputs = torch.arange(1, 21)[None] % 7
    model.generate(inputs, max_new_tokens=20, do_sample=False, custom_generate=Lookahead(nodes=4))
    in_a_decode, seen = seen - {(True, 0)}, set()  # where nothing more can be drafted, nothing is gathered
    tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, save=False)
    assert seen == in_a_decode == {(True, BEST)}


def test_what_is_not_typical_is_not_measured(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph's first passes warm up, capture and compare."""
    model, run = judged(fresh_model("llama")), TreeModel.forward
    warm, timed = dict.fromkeys((1, 4), 0), []

    def forward(self: TreeModel, trees: Any) -> Any:
        nodes = len(trees[0])
        warm[nodes] += 1
        timed.append(warm[nodes] > 3)
        return run(self, trees)

    monkeypatch.setattr(TreeModel, "forward", forward)
    monkeypatch.setattr(TreeModel, "typical", property(lambda self: timed[-1]))
    tuning.sweep(model, nodes=(1, 4), contexts=(20,), seconds=0.01, save=False)
    assert timed[:8] == [False, False, False, True] * 2 and all(timed[8:])


@pytest.mark.parametrize(
    ("executor", "second"), [("cuda graphs", {"traced": False}), ("traced", {"traced": True}), ("chain", None)]
)
def test_speeds_are_against_eager_passes(executor: str, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the passes of longer decodes."""
    made: list[dict[str, Any]] = []

    def noting(model: Any, **settings: Any) -> StepTimes:
        made.append({name: settings[name] for name in ("static", "traced") if name in settings})
        return StepTimes()

    monkeypatch.setattr(tuning, "sweep", noting)
    monkeypatch.setattr(tuning, "describe", lambda _: {"executor": executor})
    monkeypatch.setattr(tuning, "untraceable", lambda _: None if executor == "traced" else "it is not")
    times, own = tuning.sweep_all(fresh_model("llama"), 64)
    assert made == [{"static": False}, *([second] if second else [])]
    assert (times is own) == (second is None)


TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
SHORT: dict[str, Any] = {"seconds": 0.4, "new_tokens": 4}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The prompts that were decoded."""
    seen: list[list[int]] = []
    generate = GenerationMixin.generate

    def noting(self: Any, inputs: Any, **settings: Any) -> Any:
        seen.append(inputs[0].tolist())
        return generate(self, inputs, **settings)

    monkeypatch.setattr(GenerationMixin, "generate", noting)
    yield seen


def test_what_is_found(curves: Path, asked: list[list[int]]) -> None:
    model, told = counting_model(), []
    state = torch.get_rng_state()
    found = lookahead.tune(
        model, prompts=[[1, 2, 3]], seconds=3, new_tokens=8, batch=2, report=lambda *at: told.append(at)
    )
    assert torch.equal(torch.get_rng_state(), state), "no draw of the user's"
    assert isinstance(found.curve, StepTimes) and found.curve.about["batch"] == 2
    assert set(curves.iterdir()) == set(found.saved) and found.saved
    assert found.curve.to_dict() in [StepTimes.load(file).to_dict() for file in found.saved]
    assert (found.context, asked[0]) == (3 + 4, [1, 2, 3])
    assert len(found.budgets) + len(found.published) + found.left_out == len(tuning.SIZES)
    for row in (*found.budgets, *found.published):
        cost = found.curve.ms(round(row["drafted"]) + 1, 7) / found.plain_curve.ms(1, 7)
        assert row["S"] >= 1.0 and row["speedup"] == pytest.approx(row["S"] / cost)
    best = tuning.best(found.budgets)
    assert found.nodes == (best["nodes"] if best["drafted"] and best["speedup"] > 1.0 else 0)
    best = tuning.best(found.published)
    sizes = {name: getattr(found, name) for name in ("window_size", "ngram_size", "verification_set_size")}
    assert sizes.items() <= best.items()
    for stage in ("passes", "drafts"):
        shares = [share for name, share in told if name == stage]
        assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 3
    assert [name for name, _ in told] == sorted((name for name, _ in told), reverse=True), "passes come first"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.nodes = 3  # type: ignore[misc]
    settings = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(torch.tensor([[1, 2, 3]]), **settings)
    for strategy in (Lookahead(tuning=found.curve), Lookahead(**sizes)):
        assert torch.equal(model.generate(torch.tensor([[1, 2, 3]]), custom_generate=strategy, **settings), plain)


def test_nothing_is_recommended_that_was_not_drafted(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is up after the prompt, traced passes alone promise a speedup."""
    drafted = {"nodes": 4, "drafted": 2.0, "speedup": 0.7}
    assert tuning.best([drafted, {"nodes": 8, "drafted": 0.0, "speedup": 1.2}]) is drafted
    assert tuning.best([drafted, {"nodes": 8, "drafted": 1.0, "speedup": 0.8}])["nodes"] == 8
    monkeypatch.setattr(tuning, "_acceptance", lambda *given: (1.5, 0.0))
    curves = [StepTimes(about=tuning.describe(fresh_model("llama"))) for _ in range(2)]
    for curve, ms in zip(curves, (1.0, 2.0), strict=True):
        curve.put(1, 7, ms)
    monkeypatch.setattr(tuning, "sweep_all", lambda *given, **settings: curves)
    found = lookahead.tune(fresh_model("llama"), prompts=[[1, 2, 3]], new_tokens=8)
    assert found.nodes == 0 and found.budgets[0]["speedup"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "prompts",
    [
        [[3, 4, 5]],
        [(3, 4, 5)],
        [[[3, 4, 5]]],
        torch.tensor([[3, 4, 5]]),
        [torch.tensor([3, 4, 5])],
        [np.array([3, 4, 5])],
    ],
)
def test_token_ids_in_any_shape(prompts: Any, curves: Path, asked: list[list[int]]) -> None:
    lookahead.tune(fresh_model("llama"), prompts=prompts, **SHORT)
    assert {tuple(ids) for ids in asked} == {(3, 4, 5)}


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("raw", [False, True])
def test_texts_in_the_template(template: str | None, raw: bool, curves: Path, asked: list[list[int]]) -> None:
    model, tokenizer = fresh_model("llama"), letters_tokenizer()
    tokenizer.chat_template = template
    lookahead.tune(model, tokenizer, prompts=["abc"], raw=raw, **SHORT)
    text = "<abc>" if template and not raw else "abc"
    assert asked[0] == tokenizer(text)["input_ids"]
    asked.clear()
    lookahead.tune(model, tokenizer, raw=raw, **SHORT)
    first = CHAT_PROMPTS[0] if template and not raw else PROMPTS[0]
    assert asked[0] == tokenizer(f"<{first}>" if template and not raw else first)["input_ids"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "None where a tokenizer is given: got None"),
        ({"prompts": []}, r"prompts must be a list of texts, or of lists of token ids.*: got \[\]"),
        ({"prompts": "abc"}, "prompts must be a list of texts.*: got 'abc'"),
        ({"prompts": {"input_ids": [[1]]}}, "prompts must be a list of texts.*: got {'input_ids'"),
        ({"prompts": ["abc"]}, "a text where a tokenizer is given: got 'abc'"),
        ({"prompts": [1, 2]}, "A prompt must be a list of token ids.*: got 1"),
        ({"prompts": [[1.5]]}, r"A prompt must be a list of token ids.*: got \[1.5\]"),
        ({"prompts": [[]]}, "The prompt is empty"),
        ({"prompts": [[1], [4_000]], "new_tokens": 8}, "Token id 4000 is outside the vocabulary"),
        ({"prompts": [[1]], "seconds": 0}, "seconds must be a number above 0: got 0"),
        ({"prompts": [[1]], "seconds": float("nan")}, "seconds must be a number above 0: got nan"),
        ({"prompts": [[1]], "seconds": "3"}, "seconds must be a number above 0: got '3'"),
        ({"prompts": [[1]], "new_tokens": 1.5}, "new_tokens must be a whole number above 0: got 1.5"),
        ({"prompts": [[1]], "batch": True}, "batch must be a whole number above 0: got True"),
        ({"prompts": [[1]], "model": "folder"}, "model must be a loaded model.*: got 'folder'"),
        ({"prompts": [[1] * 60], "new_tokens": 30}, "A prompt of 60 tokens with 30 new ones.*past the model's 64"),
        ({"prompts": [[1] * 65]}, "The prompt reaches position 64"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sweep_all", lambda *args, **settings: pytest.fail("passes were measured"))
    model = given.pop("model", tiny_model("gpt2"))
    refuses(message, lookahead.tune, model, **given)


def test_a_model_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sweep_all", lambda *args, **settings: pytest.fail("passes were measured"))
    with pytest.raises(LookaheadError, match=r"training mode.*call model.eval\(\)"):
        lookahead.tune(fresh_model("gpt2").train(), prompts=[[1]], new_tokens=8)


def test_the_models_own_settings_do_not_matter(curves: Path) -> None:
    """Drafts are tried greedily, whatever its generation_config says."""
    model = fresh_model("llama")
    wanted = {"num_beams": 4, "do_sample": True, "temperature": 0.5, "max_length": 5, "return_dict_in_generate": False}
    model.generation_config.update(**wanted)
    assert lookahead.tune(model, prompts=[[1, 2, 3]], **SHORT).budgets[0]["S"] >= 1.0
    assert wanted.items() <= model.generation_config.to_dict().items()


def test_where_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "file" / "curves"))
    assert lookahead.tune(fresh_model("llama"), prompts=[[1, 2, 3]], **SHORT).saved == ()

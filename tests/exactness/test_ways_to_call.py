"""Every way to ask for lookahead: custom_generate, the patch, dicts, configs, pipelines; and none leaves a trace."""

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from helpers.calls import LengthIs, Recorder
from helpers.models import fresh_model, prompts, registries, run, same_outputs, tiny_model
from helpers.refusals import unchanged
from helpers.streaming import Puts
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, pipeline

import lookahead
from lookahead import Jacobi, Lookahead, LookaheadOutput

augmented = pytest.mark.usefixtures("augmented")


def test_custom_generate_needs_no_patch() -> None:
    """A strategy is a ``custom_generate`` callable: nothing of transformers is replaced, the text is the same."""
    sample, validate = GenerationMixin._sample, GenerationMixin._validate_generation_mode
    for strategy in (Lookahead(window_size=7, seed=0), Jacobi()):
        for batch in (1, 3):
            for do_sample in (False, True):
                settings = {"max_new_tokens": 25, "do_sample": do_sample, "eos_token_id": [5, 30]}
                plain, plain_state = run(tiny_model("llama"), prompts(batch), **settings)
                ours, state = run(tiny_model("llama"), prompts(batch), custom_generate=strategy, **settings)
                assert ours.tolist() == plain.tolist()
                assert torch.equal(state, plain_state)
    given = {"custom_generate": Lookahead(), "max_new_tokens": 9, "return_dict_in_generate": True}
    given |= {"output_scores": True, "logits_processor": [Recorder()], "stopping_criteria": [LengthIs(17)]}
    output = tiny_model("llama").generate(**prompts(1), **given)
    assert isinstance(output, LookaheadOutput)
    assert output.stats.emitted == len(output.scores) == 5
    assert GenerationMixin._sample is sample
    assert GenerationMixin._validate_generation_mode is validate
    assert not hasattr(GenerationConfig, "use_lookahead")


@augmented
@pytest.mark.parametrize(
    "strategy",
    [
        {"window_size": 3, "ngram_size": 4},
        {"strategy": "jacobi", "mode": "gauss-seidel", "block_size": 4},
        {"strategy": "jacobi", "initial_guess": [1, 2, 3]},
        Lookahead(window_size=2).to_dict(),
        Jacobi(mode="jacobi", block_size=None).to_dict(),
    ],
    ids=str,
)
def test_a_strategy_as_a_dict(strategy: dict[str, Any]) -> None:
    """As JSON has it; asking for a strategy is asking for lookahead."""
    model = tiny_model("llama")
    output, _ = run(model, prompts(1), lookahead_strategy=strategy, max_new_tokens=15, return_dict_in_generate=True)
    assert isinstance(output, LookaheadOutput)
    assert output.sequences.tolist() == run(model, prompts(1), max_new_tokens=15)[0].tolist()
    assert json.loads(json.dumps(strategy)) == strategy


def asked(output: Any) -> bool:
    """Whether lookahead decoding made this output."""
    return isinstance(output, LookaheadOutput)


@augmented
def test_who_is_asked() -> None:
    """``use_lookahead=False`` overrules everything; a strategy alone is enough; nothing is plain decoding."""
    model = fresh_model("llama")

    def ask(**settings: Any) -> bool:
        output, _ = run(model, prompts(1), return_dict_in_generate=True, max_new_tokens=4, **settings)
        return asked(output)

    assert not ask()
    assert not ask(use_lookahead=False)
    assert not ask(use_lookahead=False, lookahead_strategy=Lookahead())
    assert ask(use_lookahead=True)
    assert ask(lookahead_strategy=Lookahead())
    assert ask(generation_config=GenerationConfig(use_lookahead=True))
    assert ask(generation_config=GenerationConfig(lookahead_strategy={"window_size": 2}))
    assert not ask(generation_config=GenerationConfig(use_lookahead=True), use_lookahead=False)
    model.generation_config.use_lookahead = True
    assert ask()
    assert ask(generation_config=GenerationConfig(max_new_tokens=3))
    assert not ask(use_lookahead=False)
    lookahead.restore_all()
    assert not ask(), "a default on the model means nothing without the patch"


@augmented
def test_a_config_in_json(tmp_path: Any) -> None:
    """A generation config carries both fields through JSON, files and a saved model; an object can be shown, too."""
    settings = {"window_size": 3, "ngram_size": 3, "stats": "detailed"}
    config = GenerationConfig(use_lookahead=True, lookahead_strategy=settings, max_new_tokens=9, do_sample=False)
    copies = [
        GenerationConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        GenerationConfig(**json.loads(config.to_json_string())),
        copy.deepcopy(config),
    ]
    config.save_pretrained(tmp_path)
    copies.append(GenerationConfig.from_pretrained(tmp_path))
    for loaded in copies:
        assert loaded.use_lookahead is True
        assert loaded.lookahead_strategy == settings
        loaded.return_dict_in_generate = True
        output = tiny_model("llama").generate(**prompts(1), generation_config=loaded)
        assert asked(output)
        assert len(output.stats.passes) == output.stats.steps

    config = GenerationConfig(lookahead_strategy=Lookahead(window_size=3), max_new_tokens=5)
    assert "lookahead_strategy" in repr(config)
    assert copy.deepcopy(config).lookahead_strategy == Lookahead(window_size=3)
    assert asked(tiny_model("llama").generate(**prompts(1), generation_config=config, return_dict_in_generate=True))

    model = fresh_model("llama")
    model.generation_config.use_lookahead = True
    model.generation_config.lookahead_strategy = settings
    model.save_pretrained(tmp_path / "model")
    loaded_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    output = loaded_model.generate(**prompts(1), max_new_tokens=5, return_dict_in_generate=True)
    assert asked(output)


@augmented
@pytest.mark.parametrize("when", ["call", "init", "config"])
def test_pipeline(when: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pipeline`` hands ``use_lookahead`` on, given at the call, at the start or in a config; also for a list."""
    calls: list[int] = []
    original = lookahead.patch.generate
    monkeypatch.setattr(lookahead.patch, "generate", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    model = fresh_model("llama").float()
    settings = {"max_new_tokens": 12, "do_sample": False}
    words = ["abc", "hi jk lm", "z"]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(words, **settings)
    assert not calls
    if when == "config":
        settings["generation_config"] = GenerationConfig(use_lookahead=True)
    at_start = {"use_lookahead": True} if when == "init" else {}
    if when == "call":
        settings["use_lookahead"] = True
    ours = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **at_start)(words, **settings)
    assert ours == plain
    assert calls
    calls.clear()
    batched = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=2, **at_start)
    assert batched(words, **settings) == plain
    assert len(calls) == 2


def test_the_patch_can_be_put_on_and_taken_off_at_will() -> None:
    """Once or twice, in any order: afterwards transformers is exactly what it was."""
    mixin, config, tables = dict(vars(GenerationMixin)), set(vars(GenerationConfig)), registries()
    lookahead.restore_all()
    assert dict(vars(GenerationMixin)) == mixin
    for _ in range(2):
        lookahead.augment_all()
        once = dict(vars(GenerationMixin))
        lookahead.augment_all()
        assert dict(vars(GenerationMixin)) == once != mixin
        run(tiny_model("llama"), prompts(1), max_new_tokens=9, use_lookahead=True)
        lookahead.restore_all()
        assert dict(vars(GenerationMixin)) == mixin
        lookahead.restore_all()
        assert dict(vars(GenerationMixin)) == mixin
        assert set(vars(GenerationConfig)) == config
        assert registries() == tables
    with pytest.raises(ValueError, match="use_lookahead"):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=9, use_lookahead=True)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.7, "top_k": 10},
    {"do_sample": True, "num_return_sequences": 2, "output_scores": True},
    {"num_beams": 3},
    {"num_beams": 2, "do_sample": True},
    {"eos_token_id": [3, 4], "repetition_penalty": 1.2, "streamer_new": Puts},
    {"prompt_lookup_num_tokens": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_without_use_lookahead_everything_is_transformers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patched and unpatched calls give the same output, of the same class, from the same code."""
    model, inputs = (
        tiny_model("llama"),
        prompts(1 if {"streamer_new", "prompt_lookup_num_tokens"} & set(settings) else 3),
    )
    given = {"max_new_tokens": 15, "return_dict_in_generate": True} | settings
    before = run(model, inputs, **given)
    lookahead.augment_all()
    monkeypatch.setattr(lookahead.patch, "generate", lambda *_, **__: pytest.fail("ours"))
    after = run(model, inputs, **given)
    assert type(after[0]) is type(before[0])
    same_outputs(after, before, model.dtype, 0.0)


@augmented
def test_nothing_is_left_on_the_model() -> None:
    """No attribute, hook or config field is added by a call."""
    model = fresh_model("gemma3")
    with unchanged(model):
        run(model, prompts(3), max_new_tokens=9, use_lookahead=True, do_sample=True)

"""Where latency curves are kept, and under which key."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.curves import key_of, measured
from helpers.models import F32, fresh_model, tiny_model

from lookahead import tuning
from lookahead.draft.latency import StepTimes
from lookahead.generation import curves
from lookahead.generation.curves import step_times
from lookahead.models.traits import ModelTraits


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert tuning.cache_folder() == tmp_path / "a"
    assert tuning.cache_file({}).parent == tmp_path / "a"
    monkeypatch.setenv("LOOKAHEAD_CACHE", "")
    assert tuning.cache_folder() == tmp_path / "b" / "lookahead"
    monkeypatch.delenv("LOOKAHEAD_CACHE")
    assert tuning.cache_folder() == tmp_path / "b" / "lookahead"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    if os.name != "nt":
        assert tuning.cache_folder() == tmp_path / "c" / ".cache" / "lookahead"


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOOKAHEAD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert tuning.cached(tiny_model("llama")) is None


def test_the_key_is_all_that_the_curve_depends_on() -> None:
    model = tiny_model("llama")
    threads = torch.get_num_threads()
    others = {
        "model": tiny_model("qwen3"),
        "dtype": fresh_model("llama").to(F32),
        "attention": fresh_model("llama", attn_implementation="eager"),
        "layers": fresh_model("llama", num_hidden_layers=1),
        "width": fresh_model("llama", intermediate_size=64),
        "heads": tiny_model("llama_mha"),
        "vocabulary": fresh_model("llama", vocab_size=64),
    }
    others["attention"].set_attn_implementation("eager")
    keys = {name: key_of(other) for name, other in others.items()} | {
        "itself": key_of(model),
        "batch": key_of(model, 2),
    }
    torch.set_num_threads(threads + 1)
    try:
        keys["threads"] = key_of(model)
    finally:
        torch.set_num_threads(threads)
    assert len(set(keys.values())) == len(keys), keys
    assert key_of(model) == keys["itself"]


def test_weights_and_special_tokens_are_not_in_the_key() -> None:
    model = tiny_model("llama")
    assert key_of(fresh_model("llama", seed=5)) == key_of(model)
    assert key_of(fresh_model("llama", eos_token_id=5, bos_token_id=1)) == key_of(model)
    assert key_of(fresh_model("llama", eos_token_id=[5, 6])) == key_of(model)
    assert json.dumps(tuning.describe(model))


def test_saving_a_model_does_not_change_its_key(tmp_path: Path) -> None:
    model = fresh_model("llama")
    before = key_of(model)
    model.save_pretrained(tmp_path)
    assert key_of(model) == before
    loaded = type(model).from_pretrained(tmp_path, dtype=model.dtype)
    assert key_of(loaded) == before


def test_a_saved_curve_is_found_by_later_calls(curves: Path) -> None:
    model = fresh_model("llama")
    assert tuning.cached(model) is None
    curve = measured({1: 1.0, 8: 2.0})
    curve.save(key_of(model))
    found = tuning.cached(model)
    assert found is not None and found.to_dict() == curve.to_dict()
    assert not found.frozen, "it is corrected by the passes"
    assert tuning.cached(model, 2) is None
    memory: dict[Any, StepTimes] = {}
    assert step_times(model, 1, memory).curve(64, 32) == curve.curve(64, 32)
    assert step_times(model, 1, memory) is next(iter(memory.values()))
    assert step_times(model, 2, memory).ms(8, 64) == 0.0
    assert len(memory) == 2


@pytest.mark.parametrize(
    ("device", "static", "steps"), [("cuda", None, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_on_cuda_several_nodes_are_another_kind_of_pass(
    device: str, static: bool | None, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    traits = dataclasses.replace(ModelTraits.of(model), device=torch.device(device))
    monkeypatch.setattr(curves, "dynamic_reason", lambda static, *_: "not asked for" if static is False else None)
    assert step_times(model, 1, {}, static, traits=traits).steps == steps


def test_weights_that_are_read_once_a_row_promise_nothing_of_packed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "computed_dtype", lambda dtype: torch.float32)
    monkeypatch.setattr(curves, "row_costs", lambda model, batch: {1: 20.0, 4: 40.0, 16: 160.0})
    model, memory = fresh_model("llama").to(torch.bfloat16), dict[Any, StepTimes]()
    dense = curves.step_times(model, 1, memory)
    assert dense.curve(0, 8)[7] == pytest.approx(4 * dense.curve(0, 8)[0])
    dense.add(8, 0, 400.0)
    packed = curves.step_times(model, 1, memory, packed=True)
    assert packed.curve(0, 8) == StepTimes().curve(0, 8)
    assert curves.step_times(model, 1, memory) is dense

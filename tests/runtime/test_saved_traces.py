"""Traces that one process leaves to the next: read, compared, made anew where they are broken or another model's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, prompts, same_as_plain
from transformers import LlamaForCausalLM

from lookahead import Lookahead
from lookahead.runtime.layer_trials import RowRange
from lookahead.runtime.packed_layers import Invariance, Packed, groups_of, parts_of
from lookahead.runtime.tracing import record, saved, schedule
from lookahead.runtime.tracing.replay import Kind, Missed, Traces

pytestmark = pytest.mark.usefixtures("augmented", "passes_count", "traced_at_once", "curves")

TREE = Kind(batch=1, single=False, masked=True, packed=False)
TRACES = Traces((torch.float32, "sdpa", (False, False), (), (False, False, False)))


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "file_of", saved.file_of)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """The kinds of passes that are recorded while the test runs."""
    kinds: list[Kind] = []
    traced: Callable[..., Any] = record._traced
    monkeypatch.setattr(record, "_traced", lambda *given: (kinds.append(given[-1]), traced(*given))[1])
    return kinds


def in_a_new_process(**settings: Any) -> Traces:
    """What a fresh model has traced after three calls, whose texts are plain decoding's."""
    model = fresh_model("llama", **settings)
    for _ in range(3):
        same_as_plain(model, prompts(1), Lookahead(nodes=4), max_new_tokens=12)
    found = schedule._kept.of(model)[-1]
    assert found.failure is None and TREE in found.made
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("trace-*.pt"))


def test_a_later_process_records_nothing(curves: Path, recorded: list[Kind]) -> None:
    in_a_new_process()
    assert TREE in recorded and len(files(curves)) == len(recorded)
    recorded.clear()
    assert in_a_new_process().saved[TREE]
    assert not recorded


@pytest.mark.parametrize("broken", [b"", b"PK", "cut", "another model's"])
def test_broken_files_are_made_anew(curves: Path, recorded: list[Kind], broken: bytes | str) -> None:
    in_a_new_process(rms_norm_eps=1e-6)
    whole = {file: file.read_bytes() for file in files(curves)}
    if broken == "another model's":  # which has the same shapes
        in_a_new_process(rms_norm_eps=0.5)
        others = [file.read_bytes() for file in files(curves) if file not in whole]
        contents = dict(zip(whole, others, strict=True))
    else:
        contents = {file: content[: len(content) // 2] for file, content in whole.items()}
        contents = contents if isinstance(broken, str) else dict.fromkeys(whole, broken)
    for file, content in contents.items():
        file.write_bytes(content)
    recorded.clear()
    in_a_new_process(rms_norm_eps=1e-6)
    assert TREE in recorded
    recorded.clear()
    in_a_new_process(rms_norm_eps=1e-6)
    assert not recorded, "what was broken has been written anew"


def test_linear_layers_over_packed_weights(tmp_path: Path, recorded: list[Kind]) -> None:
    """They are a function of their own, which the file holds; within limits it has loops."""
    model = fresh_model("llama").bfloat16()
    parts = {key: part for group in groups_of(model) for key, part in parts_of(group, single=True).items()}
    packed = Packed(parts, Invariance({group[0].in_features: RowRange(2, 8) for group in groups_of(model)}))
    for _ in range(2):
        record.record(model, TREE, (), packed, tmp_path / "trace.pt")
    assert recorded == [TREE]


def test_a_folder_that_cannot_be_written(curves: Path, recorded: list[Kind]) -> None:
    curves.parent.mkdir(exist_ok=True)
    curves.write_text("a file")
    in_a_new_process()
    assert TREE in recorded


def test_a_saved_trace_is_due_at_once(curves: Path) -> None:
    """It costs little: it is not waited for until passes have paid for a new one."""
    in_a_new_process()
    model = fresh_model("llama")
    few = Traces(TRACES.key, missed={TREE: Missed(5, 5.0)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_COST", 35.0)
        patch.setattr(schedule, "_COMPARED", 9.0)
        few.saved[TREE] = True
        assert list(schedule._due(model, few, None)) == [TREE]
        few.saved[TREE] = False
        assert not schedule._due(model, few, None)


def test_each_has_a_file_of_its_own() -> None:
    """Whatever a trace is made of makes another file; weights do not."""
    model = fresh_model("llama")
    limits = Packed({}, Invariance({48: RowRange(1, 8)}))
    half = replace(TRACES, key=(torch.bfloat16, *TRACES.key[1:]))
    found = [
        saved.file_of(model, TRACES, TREE, None),
        saved.file_of(model, TRACES, replace(TREE, single=True), None),
        saved.file_of(model, half, TREE, None),
        saved.file_of(model, TRACES, TREE, limits),
        saved.file_of(fresh_model("llama", rms_norm_eps=0.1), TRACES, TREE, None),
        saved.file_of(fresh_model("llama", num_hidden_layers=1), TRACES, TREE, None),
        saved.file_of(fresh_model("gpt2"), TRACES, TREE, None),
    ]
    assert None not in found and len(set(found)) == len(found)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert saved.file_of(model, TRACES, TREE, None) == found[0]


def test_own_code_is_not_kept() -> None:
    """It may change without another version."""

    class Own(LlamaForCausalLM):
        """A model of somebody's own."""

    model = fresh_model("llama")
    model.__class__ = Own
    assert saved.file_of(model, TRACES, TREE, None) is None

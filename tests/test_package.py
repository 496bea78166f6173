"""The package's face: names are imported when they are used; folders that hold no model are named."""

import ast
import copy
import json
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.models import tiny_model
from helpers.refusals import refuses

import jacobi
import lookahead
from lookahead import bundled, load_model, loading

HOME = Path(lookahead.__file__)


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, lookahead; dir(lookahead); print(sorted({'torch', 'transformers', 'jacobi'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOME.parent.parent)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


def test_type_checkers_see_the_names_that_are_there() -> None:
    """The imports under ``TYPE_CHECKING`` and the table say the same."""
    (block,) = (node for node in ast.parse(HOME.read_text()).body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            assert name.name == name.asname
            seen[name.name] = node.module
    assert seen == lookahead._HOMES


def test_all_names_can_be_imported_at_once() -> None:
    names: dict[str, object] = {}
    exec("from lookahead import *", names)
    assert set(lookahead.__all__) <= names.keys()
    assert set(lookahead.__all__) <= set(dir(lookahead))


@pytest.mark.parametrize("name", lookahead._HOMES)
def test_a_name_is_its_homes(name: str) -> None:
    value = getattr(lookahead, name)
    assert value is getattr(import_module(lookahead._HOMES[name]), name)
    assert vars(lookahead)[name] is value, "looked up once"


def test_documented_modules_are_attributes_and_nothing_else_is_listed() -> None:
    for name in lookahead._MODULES:
        assert getattr(lookahead, name) is import_module(f"lookahead.{name}")
    import_module("lookahead.cli")  # which becomes an attribute, too
    assert dir(lookahead) == sorted({*lookahead.__all__, *lookahead._MODULES})
    assert not {"Any", "import_module", "TYPE_CHECKING", "cli"} & set(dir(lookahead))


def test_the_solvers_names_are_no_modules() -> None:
    """Whichever module is imported first."""
    code = f"""
import importlib, sys
import torch
for home in {list(jacobi._HOMES)}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "jacobi"]:
        del sys.modules[name]
    importlib.import_module("jacobi." + home)
    import jacobi
    print({{type(getattr(jacobi, name)).__name__ for name in jacobi.__all__}})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOME.parent.parent)
    told = ran.stdout.splitlines()
    assert len(told) == len(jacobi._HOMES), ran.stderr
    assert all("function" in line and "module" not in line for line in told), told


def test_other_names_are_missing_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'lookahead' has no attribute 'Lookbehind'"):
        lookahead.Lookbehind  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Lookbehind'"):
        exec("from lookahead import Lookbehind")


def test_settings_and_statistics_can_be_pickled() -> None:
    strategy = lookahead.Lookahead(window_size=3, ngram_size=3, verification_set_size=3)
    assert pickle.loads(pickle.dumps(strategy)) == copy.copy(strategy) == strategy
    stats = lookahead.DecodingStats(steps=2, emitted=3)
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_the_version_has_its_place_in_the_changelog() -> None:
    root, version = HOME.parents[1], lookahead.__version__
    changes = (root / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    assert titles[0] == "[Unreleased]" and re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", titles[1])
    for name in ("Unreleased", version):
        assert f"\n[{name}]: https://" in changes


def test_folders_without_a_model(tmp_path: Any) -> None:
    """Nothing there, no config, no weights, broken weights."""
    refuses("nowhere", load_model, tmp_path / "nowhere")
    refuses(r"holds no config\.json", load_model, tmp_path)
    config = tiny_model("llama").config.to_dict() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    refuses(r"holds no weights: expected .*safetensors", load_model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    refuses("could not be loaded", load_model, tmp_path)
    refuses("is not a folder", load_model, tmp_path / "config.json")


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_go_straight_to_a_device(has_accelerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers needs accelerate for that; without it they are read to the CPU, and moved."""
    model, given = MagicMock(), {}
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: has_accelerate)
    monkeypatch.setattr(
        loading.AutoModelForCausalLM, "from_pretrained", lambda source, **kwargs: given.update(kwargs) or model
    )
    loading.load_weights(bundled.BUNDLED, "auto", "cuda:1")
    assert given == {"dtype": "auto"} | ({"device_map": {"": "cuda:1"}} if has_accelerate else {})
    assert [call.args for call in model.to.call_args_list] == ([] if has_accelerate else [("cuda:1",)])

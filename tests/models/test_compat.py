"""What is relied on inside transformers: a change is named when the patch is put on, and nothing is patched."""

import dataclasses
import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer

import lookahead
from jacobi import LookaheadError
from lookahead.models import compat
from lookahead.models.compat import PRIVATES, Private, check_privates, private_error


def test_this_version_has_all() -> None:
    """Under the patch as well as without."""
    check_privates()
    lookahead.augment_all()
    check_privates()


def _hide(private: Private, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take it away, where it is inherited from too."""
    owner: Any = importlib.import_module(private.home)
    *parents, name = private.path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    for kind in getattr(owner, "__mro__", (owner,)):
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
        if name in vars(kind).get("__annotations__", {}):
            monkeypatch.delitem(kind.__annotations__, name)
    return name


REQUIRED = [private for private in PRIVATES if private.lost is None and not private.home.startswith("torch")]
OPTIONAL = [private for private in PRIVATES if private.lost is not None]


@pytest.mark.parametrize("private", REQUIRED, ids=lambda private: private.path)
def test_missing(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is named, with what is supported; ``generate`` stays what it was."""
    name = _hide(private, monkeypatch)
    before = vars(GenerationMixin).get("_sample")
    with pytest.raises(LookaheadError) as raised:
        lookahead.augment_all()
    told = str(raised.value)
    assert told.startswith(f"This transformers ({transformers.__version__}) has no ")
    assert f".{name}: expected a version from" in told or f"no {name}: expected a version from" in told
    assert vars(GenerationMixin).get("_sample") is before
    assert not hasattr(GenerationConfig, "use_lookahead")


def test_missing_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.nn.modules.module._global_forward_hooks")
    with pytest.raises(LookaheadError, match=r"This torch .* has no _global_forward_hooks: expected a version"):
        check_privates()


@pytest.mark.parametrize("private", OPTIONAL, ids=lambda private: private.path)
def test_optional(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    """This version has them; another one that has not is decoded with."""
    if private.home.startswith("accelerate"):
        pytest.importorskip("accelerate")
    assert private_error(private) is None
    monkeypatch.setattr("importlib.import_module", lambda name: types.ModuleType(name))
    assert private_error(private) == f"no {private.path}"
    monkeypatch.undo()
    monkeypatch.setattr(compat, "PRIVATES", (dataclasses.replace(private, path="gone"),))
    check_privates()


def test_attributes_that_are_set() -> None:
    """An attribute of objects is known by the function that sets it."""
    private = Private("transformers.cache_utils", "Cache.update", sets=("_is_user_defined",))
    assert private_error(private) == "another Cache.update, which does not set _is_user_defined"


def _sample(self: Any, input_ids: Any, generation_config: Any, logits_processor: Any, stopping_criteria: Any) -> None:
    """In another order."""


def _update(self: Any, outputs: Any, model_kwargs: Any, is_encoder_decoder: bool = False) -> None:
    """Without a parameter."""


def _update_layer(self: Any, keys: Any, values: Any) -> None:
    """With other names, which may mean other things."""


@pytest.mark.parametrize(
    ("owner", "name", "changed", "told"),
    [
        (
            GenerationMixin,
            "_sample",
            _sample,
            "another GenerationMixin._sample, whose parameters are (input_ids, generation_config, logits_processor, "
            "stopping_criteria), where (input_ids, logits_processor, stopping_criteria, generation_config, "
            "synced_gpus=, streamer=) are passed",
        ),
        (
            GenerationMixin,
            "_update_model_kwargs_for_generation",
            _update,
            "where (outputs, model_kwargs, is_encoder_decoder=, num_new_tokens=) are passed",
        ),
        (DynamicLayer, "update", _update_layer, "another DynamicLayer.update, whose parameters are (keys, values)"),
        (Cache, "crop", lambda self: None, "another Cache.crop, whose parameters are ()"),
    ],
)
def test_changed(
    owner: Any, name: str, changed: Callable[..., Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Got against expected."""
    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(LookaheadError) as raised:
        lookahead.augment_all()
    assert told in str(raised.value)
    assert "expected a version from 5.20 up, below 5.24" in str(raised.value)

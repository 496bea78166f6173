"""What is relied on inside transformers: a change is named when the patch is put on, and nothing is patched."""

import dataclasses
import importlib
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.refusals import refuses
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer

import lookahead
from jacobi import LookaheadError
from lookahead.models import compat
from lookahead.models.compat import OLDEST, PRIVATES, TOO_NEW, Private, check_privates, private_error
from lookahead.models.names import CACHE


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
    refuses(r"This torch .* has no _global_forward_hooks: expected a version", check_privates)


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
    refuses(rf"{re.escape(told)}.*: expected a version from 5.20 up, below 5.25", lookahead.augment_all)


def test_a_version_that_is_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout nothing else would tell; nothing is patched."""
    before = vars(GenerationMixin).get("_sample")
    for version in ("5.25.0.dev0", "6.0.1"):
        monkeypatch.setattr(compat.transformers, "__version__", version)
        with pytest.raises(LookaheadError) as raised:
            lookahead.augment_all()
        told = f"transformers {version} is newer than this version of lookahead knows: expected a version from 5.20 up"
        assert str(raised.value).startswith(told) and "pip install 'transformers<5.25'" in str(raised.value)
        assert vars(GenerationMixin).get("_sample") is before


def test_the_range_is_that_of_the_package() -> None:
    (oldest, newest), setup = (OLDEST, TOO_NEW), (Path(__file__).parents[2] / "setup.py").read_text()
    assert '"transformers>={}.{},<{}.{}"'.format(*oldest, *newest) in setup
    assert oldest <= tuple(map(int, transformers.__version__.split(".")[:2])) < newest


@pytest.mark.parametrize("home", ["CausalLMOutputWithPast", "GenerateDecoderOnlyOutput", "LlamaForCausalLM.forward"])
def test_a_cache_of_another_name(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and forwards are looked at by name, though ``**kwargs`` would take anything."""
    (private,) = (each for each in PRIVATES if home in each.path)
    named = " ".join("kv" if name == CACHE else name for name in private.named.split())
    path = private.path.replace(f".{CACHE}", ".kv")
    assert private_error(private) is None
    monkeypatch.setattr(compat, "PRIVATES", (dataclasses.replace(private, path=path, named=named),))
    refuses(r"no .*\.kv: expected|another LlamaForCausalLM.forward, .*kv=", check_privates)

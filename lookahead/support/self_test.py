"""Self-test, once per model: does it do with several tokens of a pass what it does with them one by one?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from lookahead._per_model import PerModel
from lookahead.models.code_safety import steps_of
from lookahead.models.conformance import modified, recorded_version, unrecorded
from lookahead.models.traits import ModelTraits
from lookahead.runtime.host_reads import Draws
from lookahead.support.passes import Verdict, layers_verdict, linear_verdict, tree_verdict

_verdicts: PerModel[dict[tuple[Any, ...], str | None]] = PerModel(dict)
_FEWER = "and fewer passes would leave other ones for the text. Drop use_lookahead for this model."


def tree_error(model: PreTrainedModel, traits: ModelTraits, drafts: bool = False) -> str | None:
    """Error in a model's handling of trees: masks, positions, plain decoding's own scores; None = nothing. The rounding
    of one that only ``drafts`` cannot change a text, so that much is let pass."""
    if drafts:
        return _remembered("drafts", model, traits, partial(tree_verdict, drafts=True))
    return _remembered("tree", model, traits, tree_verdict)


def layers_error(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why a tree's cache cannot follow a model: it changes the number of its cache's layers in a pass; None = it does
    not."""
    key, known = _key("layers", model, traits), _verdicts.of(model)
    if key not in known:
        with torch.random.fork_rng([traits.device] if traits.device.type == "cuda" else []):
            known[key] = layers_verdict(model, traits)
    return known[key]


def linear_error(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Error in a model's way of continuing a cached state with several tokens; None = none."""
    return _remembered("linear", model, traits, linear_verdict)


def is_judged(model: PreTrainedModel, traits: ModelTraits) -> bool:
    """True if :func:`linear_error` is known without any pass."""
    return _key("linear", model, traits) in _verdicts.of(model)


def is_on_record(model: PreTrainedModel, traits: ModelTraits, route: str = "tree") -> bool:
    """True if the conformance record answers for a model and a route: by its class, on a CPU, unmodified, in the
    recorded versions."""
    return _remembered(f"record of {route}", model, traits, partial(_record_verdict, route=route)) is None


@torch.no_grad()
def _record_verdict(model: PreTrainedModel, traits: ModelTraits, route: str) -> Verdict:
    known = traits.attention in ("sdpa", "eager") and recorded_version() == transformers.__version__
    if model.device.type != "cpu" or not known:
        return "the record is of another device, version or attention", True
    return unrecorded(model, traits, route) or modified(model), True


def _remembered(
    test: str, model: PreTrainedModel, traits: ModelTraits, run: Callable[[PreTrainedModel, ModelTraits], Verdict]
) -> str | None:
    """The verdict of a test that is run once per model, its layers, attention implementation, dtype and device."""
    key, known = _key(test, model, traits), _verdicts.of(model)
    if key not in known:
        device = traits.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            before = _random_states(device)
            error, certain = run(model, traits)
            drew = any(not torch.equal(*pair) for pair in zip(before, _random_states(device), strict=True))
            if error is None and drew and not model.training:  # perhaps another thread did
                with Draws() as draws:
                    error, certain = run(model, traits)
                if error is None and draws.found:  # NLLB-MoE in older versions of transformers
                    error, certain = f"{traits.name} draws random numbers in its passes, {_FEWER}", True
        if not certain:
            return error
        known[key] = error
    return known[key]


def _key(test: str, model: PreTrainedModel, traits: ModelTraits) -> tuple[Any, ...]:
    return test, traits.attention, traits.dtype, model.device.type, hash((_code_of(model), steps_of(model)))


def _code_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Code of a model's passes: modules' classes and modes, and what stands in a ``forward``'s place."""
    parts: list[Any] = []
    kinds: dict[type, Any] = {}
    for module in model.modules():  # hundreds in each call
        own, kind = vars(module), type(module)
        kinds[kind] = getattr(kind, "forward", None)
        parts += kind, module.training
        if "forward" in own:
            parts.append(own["forward"])
    return (*parts, *kinds.values())


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a model's passes may draw from."""
    states = [torch.get_rng_state()]
    return states + [torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

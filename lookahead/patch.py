"""``augment_all`` and ``restore_all``: transformers' ``generate`` learns ``use_lookahead``, reversibly. Two class
fields make ``use_lookahead=`` and ``lookahead_strategy=`` legal wherever a ``GenerationConfig`` goes. Three methods of
``GenerationMixin`` become dispatchers that call the original unless lookahead is asked for: ``_sample`` decodes,
``_assisted_decoding`` does so with the assistant as a draft model, and ``_validate_generation_mode``, run in every
mode, refuses beams and their like beside ``use_lookahead``."""

import threading
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from jacobi import LookaheadError
from lookahead.generation.decode import assisted, generate
from lookahead.models.compat import check_privates
from lookahead.models.conformance import recorded_version
from lookahead.registry import strategy_from
from lookahead.support.call import check_mode
from lookahead.support.route import check_model

_FIELDS = ("use_lookahead", "lookahead_strategy")
_lock = threading.Lock()
# Never emptied: a call that is already inside a dispatcher must get through even if the patch is taken off meanwhile.
_originals: dict[str, Callable[..., Any]] = {}


def _asked(generation_config: GenerationConfig) -> bool:
    """Whether this call asks for lookahead: ``use_lookahead``, or a strategy without ``use_lookahead=False``."""
    use = getattr(generation_config, "use_lookahead", None)
    if use is not None and not isinstance(use, bool):
        raise LookaheadError(f"use_lookahead must be True or False: got {use!r} of type {type(use).__name__}.")
    return use if use is not None else getattr(generation_config, "lookahead_strategy", None) is not None


def _sample(
    self: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    given = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, "streamer": streamer}
    given |= {"generation_config": generation_config, "synced_gpus": synced_gpus}
    if not _asked(generation_config):
        return _originals["_sample"](self, input_ids, **given, **model_kwargs)
    strategy = strategy_from(getattr(generation_config, "lookahead_strategy", None))
    return generate(strategy, self, input_ids, **given, model_kwargs=model_kwargs)


def _assisted_decoding(
    self: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    inputs_tensor: Any = None,  # transformers looks for its name
    **kwargs: Any,
) -> Any:
    given = (input_ids, logits_processor, stopping_criteria, generation_config)
    if not _asked(generation_config):
        return _originals["_assisted_decoding"](self, *given, inputs_tensor=inputs_tensor, **kwargs)
    return _sample(self, *given, **kwargs)


def _validate_generation_mode(
    self: Any, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
) -> None:
    """transformers' own validation, after the modes that lookahead cannot be combined with are refused."""
    if _asked(generation_config):
        strategy = strategy_from(getattr(generation_config, "lookahead_strategy", None))
        check_mode(generation_config)
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            assisted(strategy, generation_config, generation_mode_kwargs).check(self)
            generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
            drafts = ("assistant_model", "assistant_tokenizer")
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k not in drafts}
        if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise LookaheadError(
                f"use_lookahead cannot be combined with generation mode {generation_mode.value!r}: expected greedy "
                "decoding or sampling. Drop use_lookahead."
            )
        check_model(self, attention=strategy.attention)
    _originals["_validate_generation_mode"](self, generation_mode, generation_config, generation_mode_kwargs)


_DISPATCHERS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (_sample, _assisted_decoding, _validate_generation_mode)
}


def augment_all() -> None:
    """Teach ``model.generate`` of every transformers model ``use_lookahead=True`` and ``lookahead_strategy=``.

    Safe to call twice. Calls without ``use_lookahead`` run transformers' own code, untouched.

    Raises:
        LookaheadError: something inside transformers that is relied on is missing or called in another way.
    """
    with _lock:
        if getattr(GenerationMixin, "_sample", None) is _sample:
            return
        check_privates()
        recorded_version()  # reads the record now, and not in the first call
        for name, dispatcher in _DISPATCHERS.items():
            dispatcher.lookahead_original = _originals[name] = getattr(GenerationMixin, name)  # type: ignore[attr-defined]
            setattr(GenerationMixin, name, dispatcher)
        for field in _FIELDS:
            setattr(GenerationConfig, field, None)


def restore_all() -> None:
    """Undo :func:`augment_all`; safe to call twice, and without it."""
    with _lock:
        for name, dispatcher in _DISPATCHERS.items():
            if getattr(GenerationMixin, name, None) is dispatcher:
                setattr(GenerationMixin, name, _originals[name])
        for field in _FIELDS:
            if field in GenerationConfig.__dict__:
                delattr(GenerationConfig, field)

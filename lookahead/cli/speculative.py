"""vLLM's ``--speculative-config``: what drafts, in its words. Texts here are exact, so nothing of it changes one."""

import json
from typing import NamedTuple

from jacobi import LookaheadError

_BESIDE = ("draft_model", "eagle", "eagle3", "medusa", "dflash", "dspark")  # methods that need a model, or a head
_FREE = ("ngram", "ngram_gpu", "suffix")  # that need none
_TAKEN = ("method", "model", "num_speculative_tokens")
_SUFFIX = ("max_tree_depth", "max_spec_factor", "max_cached_requests", "min_token_prob")
_HARMLESS = (
    *("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size", "enforce_eager", "max_model_len"),
    *("attention_backend", "kv_cache_dtype", "draft_sample_method"),
    *(f"suffix_decoding_{name}" for name in _SUFFIX),
)


class Speculation(NamedTuple):
    """What drafts: the model or head in a folder, or the model's own MTP layers; and most nodes of a pass."""

    draft: str | None = None
    mtp: bool = False
    most: int | None = None


def speculation(text: str) -> Speculation:
    """What the JSON of ``--speculative-config`` asks for; a LookaheadError names what is not there, or is wrong."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise LookaheadError(f"--speculative-config is no JSON ({error}): expected an object.") from error
    if not isinstance(given, dict):
        raise LookaheadError(f"--speculative-config must be a JSON object: got {text}.")
    method, model, most = (given.get(name) for name in _TAKEN)
    if unknown := [name for name in given if name not in (*_TAKEN, *_HARMLESS)]:
        known = ", ".join(_TAKEN)
        raise LookaheadError(f"--speculative-config has {', '.join(unknown)}: expected {known}. Drop it.")
    if most is not None and (type(most) is not int or most < 1):
        raise LookaheadError(f"num_speculative_tokens={most!r}: expected a whole number from 1 on.")
    return _drafts(method, model)._replace(most=most)


def _drafts(method: object, model: object) -> Speculation:
    mtp = isinstance(method, str) and (method == "mtp" or method.endswith("_mtp"))
    if not mtp and method not in (None, *_BESIDE, *_FREE):
        raise LookaheadError(f"method={method!r}: expected mtp, {', '.join((*_BESIDE, *_FREE))}.")
    if not isinstance(model, str | None) or (method in _BESIDE and not model):
        raise LookaheadError(f"model={model!r}: expected the folder of what drafts by {method or 'it'}.")
    return Speculation(model if method in (None, *_BESIDE) else None, mtp)

"""Self-test, once per model: does it do with several tokens of a pass what it does with them one by one? A tree is
passed beside its branches alone, linear drafts beside single tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from jacobi import LookaheadError, Path, TokenTree
from lookahead._per_model import PerModel
from lookahead.models.code_safety import steps_of
from lookahead.models.compat import MODEL_ERRORS
from lookahead.models.conformance import modified, recorded_routes, recorded_version, unrecorded
from lookahead.models.families.scans import bound_error, scanned_layers
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.foreign_layers import rounding_layer
from lookahead.runtime.host_reads import Draws
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.session import bare_chain, bare_model, masked_inputs, stepwise

_verdicts: PerModel[dict[tuple[Any, ...], str | None]] = PerModel(dict)
_FEWER = "and fewer passes would leave other ones for the text. Drop use_lookahead for this model."
Verdict = tuple[str | None, bool]  # what is wrong, if anything; whether that is certain
_DRAFTED = 0.5  # of that spread; quantised layers round by what else is in a pass
_SHARP = 1e-3  # of the scores' spread; below it lie other orders of float32 sums, above it mistakes
_PROMPT, _TEXT = 6, 10  # tokens of a text for linear drafts: of its prompt, and up to which it is fed one by one
_LONG = 70  # tokens of a long pass: more than the 64 that many recurrent layers take at once


def tree_error(model: PreTrainedModel, traits: ModelTraits, drafts: bool = False) -> str | None:
    """Error in a model's handling of trees: masks, positions, plain decoding's own scores; None = nothing. The rounding
    of one that only ``drafts`` cannot change a text, so that much is let pass."""
    if drafts:
        return _remembered("drafts", model, traits, partial(tree_verdict, drafts=True))
    return _remembered("tree", model, traits, tree_verdict)


def layers_error(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Why a tree's cache cannot follow a model: a pass changes the number of the cache's layers; None = it can."""
    key, known = _key("layers", model, traits), _verdicts.of(model)
    if key not in known:
        with torch.random.fork_rng([traits.device] if traits.device.type == "cuda" else []):
            known[key] = layers_verdict(model, traits)
    return known[key]


def linear_error(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Error in a model's way of continuing a cached state with several tokens; None = none."""
    return _remembered("linear", model, traits, linear_verdict)


def is_on_record(model: PreTrainedModel, traits: ModelTraits, route: str = "tree") -> bool:
    """True if the conformance record answers for a model and a route: by class, on a CPU, as it was, by version."""
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


def _apart(ours: Tensor, alone: Tensor) -> float | None:
    """Distance of scores, as a share of their spread; None if they are not numbers."""
    finite = ours.isfinite() & alone.isfinite()  # a model may rule tokens out with -inf
    if bool(alone.isnan().any()) or not bool(finite.any()):
        return None
    return ((ours - alone)[finite].abs().max() / (alone[finite].std() + 1e-9)).item()


def _allowed(dtype: torch.dtype) -> float:
    return max(_SHARP, 32 * torch.finfo(dtype).eps)


@torch.no_grad()
def layers_verdict(model: PreTrainedModel, traits: ModelTraits) -> str | None:
    """Error of a pass that changes the number of its cache's layers (Dory appends copies of some); None = none."""
    cache = DynamicCache(config=traits.config)
    before = len(cache.layers)
    ids = torch.tensor([[7 % traits.vocab_size]], device=traits.device)
    try:
        model(**{"decoder_input_ids" if traits.is_encoder_decoder else "input_ids": ids, CACHE: cache}, use_cache=True)
    except (*MODEL_ERRORS, AssertionError):
        return None  # it needs more than a text; decoding will tell
    if not before or len(cache.layers) == before:
        return None
    return f"{traits.name} changes its cache's {before} layers to {len(cache.layers)} in a pass"


@torch.no_grad()
def tree_verdict(model: PreTrainedModel, traits: ModelTraits, drafts: bool = False) -> Verdict:
    """Error in the model's handling of a tree; much less is asked of one that only ``drafts``.

    One pass over four sequences of a causal model, all with the prompt ``abcd``; then two of transformers' own passes
    over ``ei``, after the whole prompt and the padded one::

        abcd  e - f - g - h       both branches
                \\ i - j
        abcd  e - f - g - h       the first alone
        abcd  e - i - j           the second alone
        .bcd  the whole tree again, after padding
    """
    vocab, causal = traits.vocab_size, not traits.is_encoder_decoder
    word = [(7 + 13 * i) % vocab for i in range(8)]
    prompt = torch.tensor([word[:4]] * (4 if causal else 3), device=traits.device)
    left, right = word[5:8], [(token + 1) % vocab for token in word[5:7]]
    trees = [TokenTree.from_paths(word[4], paths) for paths in ([left, right], [left], [right])]
    try:
        inputs = _padded_last(model, prompt) if causal else {}
        with bare_model(model, prompt, 16, **inputs) as view:
            both, *alone = view.forward([*trees, trees[0]][: len(prompt)]).logits.float()
        padded = alone.pop() if causal else None
        if padded is None:  # positions are our own doing there
            alone = [stepwise(model, prompt[:1], tree.tokens)[0] for tree in trees[1:]]
    except (LookaheadError, torch.OutOfMemoryError):
        raise
    except (*MODEL_ERRORS, AssertionError) as error:
        message = f"{traits.name} did not run a pass with a tree mask ({type(error).__name__}: {error})."
        return f"{message} Drop use_lookahead for this model.", True
    together = torch.cat([both[:4], both[:1], both[4:]])
    difference = _apart(together, torch.cat([line[: len(tree)] for line, tree in zip(alone, trees[1:], strict=True)]))
    if difference is None:
        return None, False  # decoding will name the step
    allowed = _DRAFTED if drafts else _allowed(traits.dtype)
    if difference > allowed:
        reason = "model.eval() was not called, or " if model.training else ""
        reason = _rounding(model) or f"{reason}it ignores attention masks or position_ids"
        return (
            f"{traits.name} does not keep the branches of a tree apart: scores differ by {difference:.2g} of their "
            f"spread, allowed {allowed:.2g} ({reason}). Drop use_lookahead for this model."
        ), True
    if padded is None or model.training or drafts:
        return None, True
    if scanned_layers(model, traits.config) and not _keeps_states(model, traits, prompt[:2], trees[0], right):
        return f"{traits.name} does not go on from the states behind a kept branch. Drop use_lookahead.", True
    second = [0, 1 + len(left)]  # the root, and the second branch's first node
    scores = torch.stack([both, padded])[:, second]
    return _fallback_error(model, traits, prompt[[0, -1]], [word[4], right[0]], scores), True


def _keeps_states(
    model: PreTrainedModel, traits: ModelTraits, prompt: Tensor, tree: TokenTree, kept: list[int]
) -> bool:
    """Whether a pass behind a ``kept`` branch of a ``tree``, its last, says what plain passes say. The second of two
    sequences is padded on the left."""
    inputs, path = _padded_last(model, prompt), Path([0, len(tree) - len(kept)], kept[:2])
    try:
        with bare_model(model, prompt, 16, **inputs) as view:
            view.forward([tree, tree])
            view.keep([path, path])
            found = view.forward([TokenTree(kept[1])] * 2).logits[:, 0].float()
    except MODEL_ERRORS:
        return False
    plain = stepwise(model, prompt, [tree.tokens[0], *kept], **inputs)[:, -1]
    return (_apart(found, plain) or 0.0) <= _allowed(traits.dtype)


def _padded_last(model: PreTrainedModel, prompt: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(prompt)
    mask[-1, 0] = 0
    return masked_inputs(ModelTraits.of(model), mask)


def _fallback_error(
    model: PreTrainedModel, traits: ModelTraits, prompt: Tensor, tokens: list[int], scores: Tensor
) -> str | None:
    """Difference of the ``scores`` ``[batch, token, vocab]`` of a tree's path from those of transformers' own passes.
    ``tokens`` are the path's; the last sequence of ``prompt`` ``[batch, token]`` is padded on the left."""
    try:
        plain = stepwise(model, prompt, tokens, **_padded_last(model, prompt))
    except MODEL_ERRORS:
        return None  # it needs more than a text; decoding will tell
    for row, kind in enumerate(("", " in a row that is padded")):
        difference = _apart(scores[row], plain[row])
        if difference is not None and difference > _allowed(traits.dtype):
            reason = _rounding(model) or "it prepares each of its passes in a way of its own"
            return (
                f"{traits.name} says something else in a pass over a tree than in plain passes{kind}: scores differ by "
                f"{difference:.2g} of their spread, allowed {_allowed(traits.dtype):.2g} ({reason}). "
                "Drop use_lookahead for this model."
            )
    return None


def _rounding(model: PreTrainedModel) -> str | None:
    name = rounding_layer(model)
    return name and f"{name} rounds its inputs, and makes much of little; more is let pass in bfloat16"


def linear_obstacle(model: PreTrainedModel, traits: ModelTraits, known: bool) -> str | None:
    """Obstacle to linear drafts, found without any pass of the model, which may be ``known`` to be right otherwise."""
    error = bound_error(model)
    if error is None and not known and _allowed(traits.dtype) > _SHARP and recorded_routes(model) != {"chain"}:
        error = (
            f"in {str(traits.dtype).removeprefix('torch.')} a lost state cannot be told from rounding, and its class "
            "is not among those that were found exact in float32 (docs/models.md)"
        )
    return error


@torch.no_grad()
def linear_verdict(model: PreTrainedModel, traits: ModelTraits) -> Verdict:
    """Error in the model's way of continuing a state with several tokens.

    After one prompt a text is fed token by token, and then as linear drafts, whose scores and last states have to be
    the same (``x`` = rejected, ``()`` = replayed). Behind it stands one long pass, against the same text in two::

        prompt   g   h   i   j   k...   ...k
        prompt   ghxx   (gh)ij   k......k

    There are two sequences, the second padded on the left.
    """
    held = _own_tensors(model)
    try:
        together, alone, left, states = _linear_passes(model, traits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that is not made for it may fail in any way
        return f"it does not continue a cached state with several tokens ({type(error).__name__}: {error})", True
    finally:
        for module, values in zip(model.modules(), held, strict=True):
            vars(module).update(values)
    if [scores.shape for scores in together] != [scores.shape for scores in alone]:
        return "several tokens that continue a cached state give scores of another shape than one by one", True
    told = [_apart(*pair) for pair in zip(together, alone, strict=True)]
    differences = [difference for difference in told if difference is not None]
    if not differences:
        return None, False  # decoding will name the step
    # In a small part of a model a lost state may hardly show in the scores of so short a text.
    for got, expected in zip(left, states, strict=True):
        if got.shape != expected.shape:
            return "several tokens leave a cached state of another shape than one by one", True
        if expected.isfinite().all():
            differences.append(((got - expected).abs().max() / (expected.abs().max() + 1e-9)).item())
    most = _allowed(traits.dtype)
    if max(differences) > most:
        return (
            "several tokens that continue a cached state do not give what they give one by one: scores or states "
            f"differ by {max(differences):.2g} of their spread, allowed {most:.2g}"
        ), True
    return None, True


def _linear_passes(model: PreTrainedModel, traits: ModelTraits) -> list[list[Tensor]]:
    """Scores ``[token, vocab]`` of each sequence in drafted passes and one by one, and states after both."""
    vocab = traits.vocab_size
    limits = [traits.position_table, traits.index_limit, (traits.rope_limit or (None, None))[1]]
    end = max(_TEXT, min([_TEXT + _LONG, *(limit for limit in limits if limit)]))
    word = [(7 + 13 * i + i // vocab) % vocab for i in range(end)]
    wrong = [(token + 1) % vocab for token in word]
    prompt = torch.tensor([word[:_PROMPT]] * 2, device=traits.device)
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    cut, half = _PROMPT + 2, (_TEXT + end + 1) // 2

    def feed(view: LinearModel, first: int, last: int, rejected: int = 0) -> Tensor:
        tokens, kept = word[first:last] + wrong[last : last + rejected], last - first
        scores = view.forward([TokenTree.chain(tokens[0], tokens[1:])] * 2).logits[:, :kept].float()
        view.keep([Path(list(range(kept)), [0] * kept)] * 2)
        return scores

    with bare_chain(model, prompt, mask) as one_by_one:
        drafted = one_by_one.fork()
        alone = [feed(one_by_one, at, at + 1) for at in range(_PROMPT, _TEXT)]
        states = one_by_one.states()
        ours = [feed(drafted, _PROMPT, cut, rejected=2), feed(drafted, cut, _TEXT)]
        left = drafted.states()
        if end > _TEXT:
            alone += [feed(one_by_one, *part) for part in ((_TEXT, half), (half, end)) if part[0] < part[1]]
            ours.append(feed(drafted, _TEXT, end))
            left, states = left + drafted.states(), states + one_by_one.states()
    return [[*torch.cat(ours, dim=1)], [*torch.cat(alone, dim=1)], left, states]


def _own_tensors(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Tensors of modules beside parameters and buffers that may be a state of their own (RecurrentGemma)."""
    of_each = (vars(module).items() for module in model.modules())
    return [{name: value for name, value in own if value is None or isinstance(value, Tensor)} for own in of_each]

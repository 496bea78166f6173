"""Whether a model does with several tokens of a pass what it does with them one by one: tried, once per model."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from jacobi import LookaheadError, Path, TokenTree
from lookahead.models.conformance import modified, recorded_routes, recorded_version, unrecorded
from lookahead.models.families.mamba2 import bound_error
from lookahead.models.limits import index_limit, position_limit
from lookahead.models.traits import ModelTraits, decoder_config, input_device, is_seq2seq, position_table, vocabulary
from lookahead.runtime.encoder_decoder import stepwise
from lookahead.runtime.fallback_steps import PlainPasses
from lookahead.runtime.linear import ChainModel
from lookahead.runtime.session import bare_chain, bare_model, masked_inputs

# A model's verdicts live as long as the model and are stored nowhere else.
_verdicts: "weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], str | None]]"
_verdicts = weakref.WeakKeyDictionary()
_verdicts_lock = threading.Lock()
_FEWER = "and fewer passes would leave other ones for the text. Drop use_lookahead for this model."
_SHARP = 1e-3  # of the scores' spread; below it lie other orders of float32 sums, above it mistakes


def tree_error(model: PreTrainedModel) -> str | None:
    """What is wrong with a model's handling of trees: masks, positions, plain decoding's own scores; None = nothing.

    A root with two branches is compared with each branch alone, and with transformers' own passes.
    """
    return _remembered(model, "tree", _tree_verdict)


def chain_error(model: PreTrainedModel) -> str | None:
    """What is wrong with a model's way of continuing a cached state with several tokens; None = nothing."""
    return _remembered(model, "chain", _chain_verdict)


def is_on_record(model: PreTrainedModel) -> bool:
    """Whether the conformance record answers for a model: its class, on a CPU, unmodified, in the recorded versions."""
    return _remembered(model, "record", _record_verdict) is None


def _record_verdict(model: PreTrainedModel) -> tuple[str | None, bool]:
    if model.device.type != "cpu" or recorded_version() != transformers.__version__:
        return "the record is of another device or version", True
    if decoder_config(model)._attn_implementation not in ("sdpa", "eager"):
        return "the record is of other attention implementations", True
    return unrecorded(model, ModelTraits.of(model)) or modified(model), True


def _remembered(
    model: PreTrainedModel, test: str, run: Callable[[PreTrainedModel], tuple[str | None, bool]]
) -> str | None:
    """The verdict of a test that is run once per model, its layers, attention implementation, dtype and device."""
    key = _key(test, model)
    with _verdicts_lock:
        known = _verdicts.setdefault(model, {})
    if key not in known:
        device = input_device(model)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            before = _random_states(model)
            error, certain = run(model)
            drew = any(not torch.equal(*pair) for pair in zip(before, _random_states(model), strict=True))
        if error is None and drew and not model.training:  # NLLB-MoE in older versions of transformers
            error, certain = f"{type(model).__name__} draws random numbers in its passes, {_FEWER}", True
        if not certain:
            return error
        known[key] = error
    return known[key]


def _key(test: str, model: PreTrainedModel) -> tuple[Any, ...]:
    modules = tuple((type(module), module.training) for module in model.modules())
    return test, str(decoder_config(model)._attn_implementation), model.dtype, model.device.type, hash(modules)


def _random_states(model: PreTrainedModel) -> list[Tensor]:
    """Of the generators that a model's passes may draw from."""
    states = [torch.get_rng_state()]
    device = input_device(model)
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@torch.no_grad()
def _tree_verdict(model: PreTrainedModel) -> tuple[str | None, bool]:
    """What is wrong with the model's handling of a tree, if anything, and whether that can be told for certain.

    One pass over a tree of two branches, beside each of them alone, and of a causal model beside a row that is padded
    on the left; then two of transformers' own passes over the second branch.
    """
    vocab, causal = vocabulary(model), not is_seq2seq(model)
    word = [(7 + 13 * i) % vocab for i in range(8)]
    prompt = torch.tensor([word[:4]] * (4 if causal else 3), device=input_device(model))
    left, right = word[5:8], [(token + 1) % vocab for token in word[5:7]]
    trees = [TokenTree.from_paths(word[4], paths) for paths in ([left, right], [left], [right])]

    name = type(model).__name__
    try:
        inputs = _padded_last(model, prompt) if causal else {}
        with bare_model(model, prompt, 16, **inputs) as fused:
            both, *alone = fused.forward([*trees, trees[0]][: len(prompt)]).logits.float()
        padded = alone.pop() if causal else None
        if padded is None:  # positions are our own doing there
            alone = [stepwise(model, prompt[:1], tree.tokens) for tree in trees[1:]]
    except (LookaheadError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError, AssertionError) as error:
        message = f"{name} did not run a pass with a tree mask ({type(error).__name__}: {error})."
        return f"{message} Drop use_lookahead for this model.", True
    together = torch.cat([both[:4], both[:1], both[4:]])
    apart = torch.cat([line[: len(tree)] for line, tree in zip(alone, trees[1:], strict=True)])
    if _untold(together, apart):
        return None, False  # decoding will name the step
    difference, allowed = _difference(together, apart, model.dtype)
    if difference > allowed:
        reason = "model.eval() was not called, or " if model.training else ""
        return (
            f"{name} does not keep the branches of a tree apart: scores differ by {difference:.2g} of their spread, "
            f"allowed {allowed:.2g} ({reason}it ignores attention masks or position_ids). "
            "Drop use_lookahead for this model."
        ), True
    if padded is None or model.training:
        return None, True
    second = [0, 1 + len(left)]  # the root, and the second branch's first node
    return _plain_error(model, prompt[[0, -1]], [word[4], right[0]], torch.stack([both, padded])[:, second]), True


def _padded_last(model: PreTrainedModel, prompt: Tensor) -> dict[str, Any]:
    """Inputs for ``prompt`` ``[batch, token]``, the last row of which is padded on the left."""
    mask = torch.ones_like(prompt)
    mask[-1, 0] = 0
    return masked_inputs(model, mask)


def _plain_error(model: PreTrainedModel, prompt: Tensor, tokens: list[int], fused: Tensor) -> str | None:
    """How a tree's path differs from transformers' own passes over the same tokens, if it does.

    A row whose numbers are not finite tells nothing.

    Args:
        model: a causal model.
        prompt: ``[batch, token]``; the last row is padded on the left.
        tokens: of the path.
        fused: scores ``[batch, token, vocab]`` that the path's nodes were given.
    """
    inputs = _padded_last(model, prompt)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    text = torch.cat([prompt, torch.tensor([tokens] * len(prompt), device=input_device(model))], dim=1)
    length = prompt.shape[1] + 1
    try:
        model(input_ids=prompt, past_key_values=cache, use_cache=True, **inputs)
        plain = PlainPasses(model, cache, inputs, 1)
        steps = [plain.forward(text[:, : length + step]).logits[:, -1].float() for step in range(len(tokens))]
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError):
        return None  # it needs more than a text; decoding will tell
    for row, kind in enumerate(("", " in a row that is padded")):
        ours, theirs = fused[row], torch.stack([step[row] for step in steps])
        if _untold(ours, theirs):
            continue
        difference, allowed = _difference(ours, theirs, model.dtype)
        if difference > allowed:
            return (
                f"{type(model).__name__} says something else in a pass over a tree than in plain passes{kind}: scores "
                f"differ by {difference:.2g} of their spread, allowed {allowed:.2g} (it prepares each of its "
                "passes in a way of its own). Drop use_lookahead for this model."
            )
    return None


def _untold(ours: Tensor, alone: Tensor) -> bool:
    """Whether scores say nothing, because they are not numbers."""
    return bool(alone.isnan().any()) or not bool((ours.isfinite() & alone.isfinite()).any())


def _difference(ours: Tensor, alone: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """How far scores lie apart, as a share of their spread, and how far they may in this dtype."""
    finite = ours.isfinite() & alone.isfinite()  # a model may rule tokens out with -inf
    difference = (ours - alone)[finite].abs().max() / (alone[finite].std() + 1e-9)
    return difference.item(), max(_SHARP, 32 * torch.finfo(dtype).eps)


_LONG = 70  # tokens of a long pass: more than the 64 that many recurrent layers take at once
_SHORT = 10


@torch.no_grad()
def _chain_verdict(model: PreTrainedModel) -> tuple[str | None, bool]:
    """What is wrong with the model's way of continuing a state with several tokens, and whether that is certain.

    A text is fed token by token; then in passes of which one is kept whole, one is cut short, one feeds again what was
    accepted and is cut short, one is kept whole, and a last one follows on what that has left. Scores have to be the
    same, and the states wherever a pass was kept whole. Then a long pass has to give what several short ones give.
    There are two rows, the second padded on the left.
    """
    error = bound_error(model)
    if error is not None:
        return error, True
    kept_outside = _own_tensors(model)
    try:
        together, apart, left, states = _chain_passes(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that is not made for it may fail in any way
        return f"it does not continue a cached state with several tokens ({type(error).__name__}: {error})", True
    finally:
        _put_back(model, kept_outside)
    difference, allowed, told = 0.0, 0.0, False
    for ours, theirs in zip(together, apart, strict=True):
        if not _untold(ours, theirs):
            told = True
            apart_by, allowed = _difference(ours, theirs, model.dtype)
            difference = max(difference, apart_by)
    if not told:
        return None, False  # decoding will name the step
    # In a small part of a model a lost state may hardly show in the scores of so short a text.
    for got, expected in zip(left, states, strict=True):
        if got.shape != expected.shape:
            return "several tokens leave a cached state of another shape than one by one", True
        if expected.isfinite().all():
            lost = (got - expected).abs().max() / (expected.abs().max() + 1e-9)
            difference = max(difference, lost.item())
    if difference > allowed:
        return (
            "several tokens that continue a cached state do not give what they give one by one: scores or states "
            f"differ by {difference:.2g} of their spread, allowed {allowed:.2g}"
        ), True
    if allowed > _SHARP and recorded_routes(model) != {"chain"}:
        return (
            f"in {str(model.dtype).removeprefix('torch.')} a lost state cannot be told from rounding, and its class is "
            "not among those that were found exact in float32 (docs/models.md)"
        ), True
    return None, True


def _chain_passes(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Scores ``[token, vocab]`` of each row in drafted passes and one by one, and states after both."""
    vocab = vocabulary(model)
    limits = [position_table(model), index_limit(model), (position_limit(model) or (None, None))[1]]
    longest = max(17, min([18 + _LONG, *(limit for limit in limits if limit)]))
    word = [(7 + 13 * i + i // vocab) % vocab for i in range(longest)]
    wrong = [(token + 1) % vocab for token in word]
    prompt = torch.tensor([word[:6]] * 2, device=input_device(model))
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    drafts = [(6, 9, 9), (9, 11, 13), (11, 12, 14), (12, 16, 16), (16, 17, 17)]  # first token, first wrong one, end
    alone: list[Tensor] = []
    states: list[Tensor] = []
    ours: list[Tensor] = []
    left: list[Tensor] = []

    def feed(chain: ChainModel, tokens: list[int], kept: int) -> Tensor:
        scores = chain.forward([TokenTree.chain(tokens[0], tokens[1:])] * 2).logits[:, :kept].float()
        chain.keep([Path(list(range(kept)), [0] * kept)] * 2)
        return scores

    with bare_chain(model, prompt, mask) as chain:
        for place in range(6, 17):
            alone.append(feed(chain, [word[place]], 1))
            if place + 1 in (9, 16, 17):
                states += chain.states()
        for start in range(17, longest, _SHORT):
            part = word[start : start + _SHORT]
            alone.append(feed(chain, part, len(part)))
        states += chain.states()
    with bare_chain(model, prompt, mask) as chain:
        for first, right, end in drafts:
            ours.append(feed(chain, word[first:right] + wrong[right:end], right - first))
            if right == end:
                left += chain.states()
        if longest > 17:
            ours.append(feed(chain, word[17:], longest - 17))
        left += chain.states()
    return [*torch.cat(ours, dim=1)], [*torch.cat(alone, dim=1)], left, states


def _own_tensors(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What modules hold beside parameters and buffers that may be a state of their own (RecurrentGemma)."""
    return [
        {name: value for name, value in vars(module).items() if value is None or isinstance(value, Tensor)}
        for module in model.modules()
    ]


def _put_back(model: PreTrainedModel, held: list[dict[str, Any]]) -> None:
    for module, values in zip(model.modules(), held, strict=True):
        vars(module).update(values)

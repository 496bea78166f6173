"""Passes over linear drafts that are kept, cut short and replayed, beside the same tokens one by one."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import Path, TokenTree
from lookahead.models.conformance import recorded_routes
from lookahead.models.families.mamba2 import bound_error
from lookahead.models.traits import ModelTraits
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.session import bare_chain
from lookahead.support.scores import SHARP, Verdict, allowed, apart

_LONG = 70  # tokens of a long pass: more than the 64 that many recurrent layers take at once
_SHORT = 10


@torch.no_grad()
def linear_verdict(model: PreTrainedModel, traits: ModelTraits) -> Verdict:
    """What is wrong with the model's way of continuing a state with several tokens, and whether that is certain.

    A text is fed token by token, and then as linear drafts, whose scores have to be the same, and the states wherever a
    pass was kept whole (``x`` = rejected, ``()`` = replayed)::

        ghi   jkxx   (jk)lxx   (jkl)mnop   q   and one long pass, where several short ones went before

    There are two sequences, the second padded on the left.
    """
    error = bound_error(model)
    if error is not None:
        return error, True
    held = _own_tensors(model)
    try:
        together, alone, left, states = _passes(model, traits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model that is not made for it may fail in any way
        return f"it does not continue a cached state with several tokens ({type(error).__name__}: {error})", True
    finally:
        _put_back(model, held)
    told = [apart(*pair) for pair in zip(together, alone, strict=True)]
    differences = [difference for difference in told if difference is not None]
    if not differences:
        return None, False  # decoding will name the step
    # In a small part of a model a lost state may hardly show in the scores of so short a text.
    for got, expected in zip(left, states, strict=True):
        if got.shape != expected.shape:
            return "several tokens leave a cached state of another shape than one by one", True
        if expected.isfinite().all():
            differences.append(((got - expected).abs().max() / (expected.abs().max() + 1e-9)).item())
    most = allowed(traits.dtype)
    if max(differences) > most:
        return (
            "several tokens that continue a cached state do not give what they give one by one: scores or states "
            f"differ by {max(differences):.2g} of their spread, allowed {most:.2g}"
        ), True
    if most > SHARP and recorded_routes(model) != {"chain"}:
        return (
            f"in {str(traits.dtype).removeprefix('torch.')} a lost state cannot be told from rounding, and its class "
            "is not among those that were found exact in float32 (docs/models.md)"
        ), True
    return None, True


def _passes(
    model: PreTrainedModel, traits: ModelTraits
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Scores ``[token, vocab]`` of each sequence in drafted passes and one by one, and states after both."""
    vocab = traits.vocab_size
    limits = [traits.position_table, traits.index_limit, (traits.rope_limit or (None, None))[1]]
    longest = max(17, min([18 + _LONG, *(limit for limit in limits if limit)]))
    word = [(7 + 13 * i + i // vocab) % vocab for i in range(longest)]
    wrong = [(token + 1) % vocab for token in word]
    prompt = torch.tensor([word[:6]] * 2, device=traits.device)
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    drafts = [(6, 9, 9), (9, 11, 13), (11, 12, 14), (12, 16, 16), (16, 17, 17)]  # first token, first wrong one, end
    ours: list[Tensor] = []
    alone: list[Tensor] = []
    left: list[Tensor] = []
    states: list[Tensor] = []

    def feed(view: LinearModel, tokens: list[int], kept: int) -> Tensor:
        scores = view.forward([TokenTree.chain(tokens[0], tokens[1:])] * 2).logits[:, :kept].float()
        view.keep([Path(list(range(kept)), [0] * kept)] * 2)
        return scores

    with bare_chain(model, prompt, mask) as view:
        for at in range(6, 17):
            alone.append(feed(view, [word[at]], 1))
            if at + 1 in (9, 16, 17):
                states += view.states()
        for start in range(17, longest, _SHORT):
            part = word[start : start + _SHORT]
            alone.append(feed(view, part, len(part)))
        states += view.states()
    with bare_chain(model, prompt, mask) as view:
        for first, right, end in drafts:
            ours.append(feed(view, word[first:right] + wrong[right:end], right - first))
            if right == end:
                left += view.states()
        if longest > 17:
            ours.append(feed(view, word[17:], longest - 17))
        left += view.states()
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

"""Passes over a tree, beside its branches alone and transformers' own passes over them."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from jacobi import LookaheadError, TokenTree
from lookahead.models.compat import MODEL_ERRORS
from lookahead.models.traits import ModelTraits
from lookahead.runtime.encoder_decoder import stepwise
from lookahead.runtime.fallback_steps import PlainPasses
from lookahead.runtime.session import bare_model, masked_inputs
from lookahead.support.scores import Verdict, allowed, apart


@torch.no_grad()
def tree_verdict(model: PreTrainedModel, traits: ModelTraits) -> Verdict:
    """What is wrong with the model's handling of a tree, if anything, and whether that can be told for certain.

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
            alone = [stepwise(model, prompt[:1], tree.tokens) for tree in trees[1:]]
    except (LookaheadError, torch.OutOfMemoryError):
        raise
    except (*MODEL_ERRORS, AssertionError) as error:
        message = f"{traits.name} did not run a pass with a tree mask ({type(error).__name__}: {error})."
        return f"{message} Drop use_lookahead for this model.", True
    together = torch.cat([both[:4], both[:1], both[4:]])
    difference = apart(together, torch.cat([line[: len(tree)] for line, tree in zip(alone, trees[1:], strict=True)]))
    if difference is None:
        return None, False  # decoding will name the step
    if difference > allowed(traits.dtype):
        reason = "model.eval() was not called, or " if model.training else ""
        return (
            f"{traits.name} does not keep the branches of a tree apart: scores differ by {difference:.2g} of their "
            f"spread, allowed {allowed(traits.dtype):.2g} ({reason}it ignores attention masks or position_ids). "
            "Drop use_lookahead for this model."
        ), True
    if padded is None or model.training:
        return None, True
    second = [0, 1 + len(left)]  # the root, and the second branch's first node
    scores = torch.stack([both, padded])[:, second]
    return _fallback_error(model, traits, prompt[[0, -1]], [word[4], right[0]], scores), True


def _padded_last(model: PreTrainedModel, prompt: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(prompt)
    mask[-1, 0] = 0
    return masked_inputs(ModelTraits.of(model), mask)


def _fallback_error(
    model: PreTrainedModel, traits: ModelTraits, prompt: Tensor, tokens: list[int], scores: Tensor
) -> str | None:
    """How the ``scores`` ``[batch, token, vocab]`` of a tree's path differ from those of transformers' own passes.

    ``tokens`` are the path's; the last sequence of ``prompt`` ``[batch, token]`` is padded on the left.
    """
    inputs = _padded_last(model, prompt)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    text = torch.cat([prompt, torch.tensor([tokens] * len(prompt), device=traits.device)], dim=1)
    length = prompt.shape[1] + 1
    try:
        model(input_ids=prompt, past_key_values=cache, use_cache=True, **inputs)
        plain = PlainPasses(model, cache, inputs, 1)
        steps = [plain.forward(text[:, : length + step]).logits[:, -1].float() for step in range(len(tokens))]
    except MODEL_ERRORS:
        return None  # it needs more than a text; decoding will tell
    for row, kind in enumerate(("", " in a row that is padded")):
        difference = apart(scores[row], torch.stack([step[row] for step in steps]))
        if difference is not None and difference > allowed(traits.dtype):
            return (
                f"{traits.name} says something else in a pass over a tree than in plain passes{kind}: scores "
                f"differ by {difference:.2g} of their spread, allowed {allowed(traits.dtype):.2g} (it prepares each of "
                "its passes in a way of its own). Drop use_lookahead for this model."
            )
    return None

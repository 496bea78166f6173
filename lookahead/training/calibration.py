"""How often each head's candidates are right, counted in texts that the model writes itself."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.compat import last_logits
from lookahead.models.hidden_states import passed
from lookahead.models.output_layer import output_layer, output_sizes, placement
from lookahead.sources.medusa.accuracies import HeadAccuracies
from lookahead.sources.medusa.heads import MedusaHeads

_LOGITS = 1 << 24  # numbers that the heads may make at once: 64 MB in float32
_TIMED = 20  # runs of the heads


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[Sequence[int] | Tensor],
    new_tokens: int = 128,
    ranks: int = 10,
    *,
    temperature: float | None = None,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> HeadAccuracies:
    """Measure how often each candidate of each head is right in texts that the model writes itself.

    The model continues every prompt; one more pass over prompt and text gives all hidden states. At the prompt's last
    token and at every written one, each head's best candidates are compared with the token that really came. A head is
    only asked where its token was written, so later heads have fewer samples, and each is divided by its own.

    Args:
        model: a causal model that lookahead supports, in evaluation mode.
        heads: its heads.
        prompts: token ids, each a sequence or ``[token]``.
        new_tokens: tokens to write at most, for each prompt.
        ranks: how many candidates of each head to look at.
        temperature: write sampled texts, as this temperature gives them, for trees to be used when sampling; None =
            greedy texts.
        seed: of the sampled texts; torch's own generators are left as they are.
        report: told the share that is done, from 0 to 1.

    Raises:
        LookaheadError: before any pass: the heads do not fit the model, a number is out of range, or a prompt is empty
            or holds what is no token; afterwards: the texts ended too early for a head to have any sample.
    """
    from lookahead.strategies.lookahead import Lookahead  # not at the top: the strategies read this package

    heads.check(model)
    _check_numbers(heads, output_sizes(model)[1], new_tokens, ranks, temperature)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [_ids(prompt, number, vocab).to(model.device) for number, prompt in enumerate(prompts)]
    if not ids:
        raise LookaheadError("There are no prompts to calibrate on: expected at least one.")
    hits = torch.zeros(heads.num_heads, ranks, dtype=torch.long)
    samples = [0] * heads.num_heads
    settings: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        settings = {"do_sample": True, "temperature": temperature}
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda) if temperature is not None else nullcontext():
        if temperature is not None:
            torch.manual_seed(seed)
        for done, prompt in enumerate(ids, start=1):
            text = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                custom_generate=Lookahead(seed=seed, stats="none"),
                max_new_tokens=new_tokens,
                return_dict_in_generate=False,
                **settings,
            )
            _count(model, heads, text, prompt.shape[1], hits, samples)
            if report is not None:
                report(done / len(ids))
    if not samples[-1]:
        empty = samples.index(0)
        raise LookaheadError(
            f"Head {empty} has no sample: every text ended within {empty + 1} tokens, and the first token it predicts "
            f"is number {empty + 2}. Give prompts with longer answers."
        )
    shares = (hits.double() / torch.tensor(samples)[:, None]).tolist()
    return HeadAccuracies(tuple(map(tuple, shares)), tuple(samples))


def _check_numbers(heads: MedusaHeads, vocab: int, new_tokens: int, ranks: int, temperature: float | None) -> None:
    if not 1 <= ranks <= vocab:
        raise LookaheadError(f"ranks={ranks}: expected 1 to {vocab}, the size of the vocabulary.")
    if new_tokens <= heads.num_heads:
        raise LookaheadError(
            f"new_tokens={new_tokens}: expected more than {heads.num_heads}, so that the last of {heads.num_heads} "
            "heads has a token to predict."
        )
    if temperature is not None and not 0.0 < temperature < math.inf:
        raise LookaheadError(f"temperature={temperature}: expected above 0, or None for greedy texts.")


def _ids(prompt: Sequence[int] | Tensor, number: int, vocab: int) -> Tensor:
    """A prompt as ``[1, token]``."""
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookaheadError(f"Prompt {number} is {prompt!r}: expected token ids.") from error
    if ids.ndim != 1 or not ids.numel() or ids.is_floating_point() or ids.min() < 0 or ids.max() >= vocab:
        raise LookaheadError(
            f"Prompt {number} is not a sequence of token ids: expected at least one integer from 0 to {vocab - 1}, got "
            f"{ids.dtype} {list(ids.shape)}."
        )
    return ids.long()[None]


def _count(
    model: PreTrainedModel, heads: MedusaHeads, text: Tensor, prompt_length: int, hits: Tensor, samples: list[int]
) -> None:
    """Compare one text with what the heads guess.

    Args:
        model: the model.
        heads: its heads.
        text: prompt and written tokens, ``[1, token]``.
        prompt_length: tokens of the prompt.
        hits: ``[head, rank]``, added to.
        samples: ``[head]``, added to.
    """
    written = text[0, prompt_length:].cpu()
    places = len(written) - 1  # the prompt's last token, and all written ones after which two more came
    if places < 1:
        return
    output, ranks = output_layer(model), hits.shape[1]
    hidden = _hidden(model, text[:, :-2], places)
    size = max(1, _LOGITS // (heads.num_heads * output_sizes(model)[1]))
    guessed = torch.cat([heads.top(part, output, ranks)[1].cpu() for part in hidden.split(size)], dim=1)
    for head in range(heads.num_heads):
        came = written[head + 1 :]
        hits[head] += (guessed[head, : len(came)] == came[:, None]).sum(0)
        samples[head] += len(came)


def _hidden(model: PreTrainedModel, ids: Tensor, places: int) -> Tensor:
    """What the output layer reads at the last ``places`` tokens of ``ids`` ``[1, token]``, as ``[place, hidden]``."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    inputs |= last_logits(model, places)
    return passed(model, output_layer(model), inputs)[1][0, -places:]


@torch.no_grad()
def heads_ms(model: PreTrainedModel, heads: MedusaHeads, ranks: int = 10) -> float:
    """What it takes to run the heads on one token, in milliseconds, which is not part of any step-time curve.

    Args:
        model: the model.
        heads: its heads.
        ranks: candidates of each head.
    """
    output = output_layer(model)
    device, dtype = placement(model)
    hidden = torch.zeros(1, heads.hidden_size, device=device, dtype=dtype)
    times = []
    for _ in range(_TIMED):
        begin = time.perf_counter()
        heads.top(hidden, output, ranks)[1].tolist()  # waits for the device
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)

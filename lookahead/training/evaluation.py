"""What drafts are worth in decoding: held-out texts continued with and without them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lookahead.stats import DecodingStats
from lookahead.training.data import Example

_T = TypeVar("_T")
_WARM_UP = 8  # tokens
_PROMPT = 64  # tokens of a text that are continued


@dataclass(frozen=True)
class Measured:
    """Greedy decoding, plain and with drafts, of the same texts in turns in one process."""

    prompts: int  # how many texts
    tokens: int  # written in each of the two ways
    tokens_per_pass: float  # mean acceptance length with drafts, the model's own token included
    plain_tokens_per_s: float
    tokens_per_s: float  # with drafts

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def measure(model: PreTrainedModel, strategy: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Measured:
    """Continue every prompt (token ids) by at most ``new_tokens``, with plain decoding and with a strategy in turns."""
    seconds, tokens = {False: 0.0, True: 0.0}, {False: 0, True: 0}
    stats = DecodingStats()
    for number, prompt in enumerate([prompts[0], *prompts]):
        for ours in (False, True) if number % 2 else (True, False):
            begin = time.perf_counter()
            count = new_tokens if number else min(new_tokens, _WARM_UP)
            output = continuation(model, prompt, count, strategy if ours else None, do_sample=False)
            if not number:
                continue  # the first text warms up
            seconds[ours] += time.perf_counter() - begin
            tokens[ours] += output.sequences.shape[1] - len(prompt)
            if ours:
                stats += output.stats
    speeds = {ours: tokens[ours] / seconds[ours] for ours in seconds}
    return Measured(len(prompts), tokens[True], stats.mean_acceptance_length, speeds[False], speeds[True])


def continuation(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, strategy: Any, **settings: Any) -> Any:
    """What ``generate`` returns for a prompt of token ids; without a strategy by plain decoding."""
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        pad_token_id=model.generation_config.pad_token_id or 0,
        custom_generate=strategy,
        **settings,
    )


def continued(examples: Sequence[Example], count: int) -> list[list[int]]:
    """Prompts cut from examples: all that comes before an answer, or the beginning of a plain text."""
    ends = [int(example.loss.int().argmax()) or min(_PROMPT, len(example.ids) // 2) for example in examples]
    return spread([example.ids[:end].tolist() for example, end in zip(examples, ends, strict=True) if end], count)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """At most ``count`` of the items, at even distances."""
    return [items[len(items) * index // count] for index in range(count)] if len(items) > count else list(items)

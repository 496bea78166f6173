"""Training data as tokens: items become examples, examples become batches.

Every token of a text carries loss. Of a prompt with its completion only the completion's tokens do, of a conversation
only the assistant's::

    tokens   <user> Hi ! <assistant> Hel lo . <end>
    loss        .   .  .      .       x  x  x   x

Texts are packed into blocks; prompts with completions and conversations stay apart.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jacobi import LookaheadError
from lookahead.training.items import Item

IGNORE = nn.CrossEntropyLoss().ignore_index  # the label of a token without loss, as everywhere in transformers
Progress = Callable[[float], None]  # called with the share that is done, from 0 to 1

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
BATCH = 8  # texts that the model is given at once, to be scored or gone on with
_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}  # numbers that losses make at once: on a CPU what a cache holds
_AT_ONCE = 256  # texts given to the tokenizer in one call


@dataclass(frozen=True, eq=False)
class Example:
    ids: Tensor  # int32 [token]
    loss: Tensor  # bool [token], which ones are to be predicted

    @classmethod
    def of(cls, ids: Sequence[int], loss: Sequence[bool] | None = None) -> "Example":
        """From lists; without ``loss``, all tokens carry it."""
        tokens = torch.tensor(ids, dtype=torch.int32)
        flags = torch.ones(len(ids), dtype=torch.bool) if loss is None else torch.tensor(loss, dtype=torch.bool)
        return cls(tokens, flags)


Examples = Sequence[Example]
Scored = tuple[dict[str, float], int]  # means by name, and how many tokens were scored


def encode(
    items: Sequence[Item], tokenizer: Any, *, block_size: int, least: int, report: Progress | None = None
) -> list[Example]:
    """Turn items into examples of ``least`` to ``block_size`` tokens, some of them to be predicted.

    Plain texts, each with its end token, are packed into blocks. Other items are cut; shorter ones are left out.

    Raises:
        LookaheadError: a completion is missing, a chat template cannot tell answers, or all examples are too short.
    """
    report = report or (lambda done: None)
    texts = [item for item in items if item.prompt is None and not item.messages]
    others = [item for item in items if item.prompt is not None or item.messages]
    stream: list[int] = []
    examples: list[Example] = []
    for start in range(0, len(texts), _AT_ONCE):
        batch = texts[start : start + _AT_ONCE]
        for ids in _tokens(tokenizer, [item.text for item in batch]):
            stream += ids
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                stream.append(tokenizer.eos_token_id)
        whole = len(stream) // block_size * block_size
        examples += [Example.of(stream[at : at + block_size]) for at in range(0, whole, block_size)]
        del stream[:whole]
        report((start + len(batch)) / len(items))
    examples.append(Example.of(stream))
    for done, item in enumerate(others, start=len(texts) + 1):
        ids, loss = _chat(tokenizer, item) if item.messages else _completion(tokenizer, item)
        examples.append(Example.of(ids[:block_size], loss[:block_size]))
        report(done / len(items))
    kept = [example for example in examples if len(example.ids) >= least and bool(example.loss[1:].any())]
    if not kept:
        raise LookaheadError(
            f"The data is too short ({items[0].source}{', ...' if len(items) > 1 else ''}): expected at least one item "
            f"of {least} tokens, some of them to be predicted; the longest has {max(len(e.ids) for e in examples)}."
        )
    return kept


def prompts(items: Sequence[Item], tokenizer: Any, *, block_size: int) -> list[list[int]]:
    """The prompts that the model is to answer itself, as token ids. Of a conversation that is all before the first
    answer, of a prompt with a completion the prompt, of plain text the first quarter of every block. A LookaheadError
    says that the chat template is missing or refuses a conversation."""
    found: list[list[int]] = []
    for item in items:
        if item.messages:
            first = next((i for i, m in enumerate(item.messages) if m["role"] == "assistant"), len(item.messages))
            found.append(_render(tokenizer, item, first, prompt=True))
        elif item.prompt is not None:
            found += _tokens(tokenizer, [item.prompt])
        else:
            (ids,) = _tokens(tokenizer, [item.text])
            found += [ids[start : start + block_size // 4] for start in range(0, len(ids), block_size)]
    return [ids[-(block_size // 2) :] for ids in found if ids]


def collate(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """One batch: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[batch, token]``, padded on the right. A
    label is its own token, or :data:`IGNORE` where there is no loss; the losses shift them."""
    ids = pad_sequence([example.ids.long() for example in examples], True, pad)
    mask = pad_sequence([torch.ones_like(example.ids).long() for example in examples], True)
    labels = pad_sequence([torch.where(e.loss, e.ids.long(), IGNORE) for e in examples], True, IGNORE)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(
    examples: Sequence[Example], pad: int, device: torch.device, report: Progress | None = None
) -> Iterator[dict[str, Tensor]]:
    """Batches to be scored, on a ``device``; ``report`` is told when one is."""
    for start in range(0, len(examples), BATCH):
        batch = collate(examples[start : start + BATCH], pad)
        yield {name: value.to(device) for name, value in batch.items()}
        if report is not None:
            report(min(1.0, (start + BATCH) / len(examples)))


def places_at_once(device: torch.device, vocab_size: int) -> int:
    """Places of which losses may have scores of so many tokens at once."""
    return max(1, _LOGITS.get(device.type, _LOGITS["cuda"]) // vocab_size)


def _tokens(tokenizer: Any, texts: list[str], **settings: Any) -> list[list[int]]:
    return list(tokenizer(texts, verbose=False, **settings)["input_ids"])


def _completion(tokenizer: Any, item: Item) -> tuple[list[int], list[bool]]:
    """Prompt, completion and end token; encoded apart, so that no token crosses the border."""
    if not item.text:
        told = f'{item.source}: the prompt has no "completion" or "response".'
        raise LookaheadError(f"{told} Add it, or let the model answer itself (self-distillation).")
    (prompt,) = _tokens(tokenizer, [item.prompt or ""])
    (answer,) = _tokens(tokenizer, [item.text], add_special_tokens=False)
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _chat(tokenizer: Any, item: Item) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and which are the assistant's. A template with generation tags tells. For others,
    an answer is what rendering up to its end adds to rendering up to its beginning, header included."""
    messages = item.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if _GENERATION.search(_template(tokenizer, item)):
        rendered = _apply(tokenizer, item, len(messages), return_dict=True, return_assistant_tokens_mask=True)
        loss = [bool(flag) for flag in rendered["assistant_masks"]]
        if answers and not any(loss):
            raise LookaheadError(
                f"{item.source}: the chat template has generation tags, and marks no token as the assistant's. Put the "
                "tags around the assistant's content, or take them out."
            )
        return list(rendered["input_ids"]), loss
    ids = _render(tokenizer, item, len(messages))
    loss = [False] * len(ids)
    for index in answers:
        before, after = _render(tokenizer, item, index, prompt=True), _render(tokenizer, item, index + 1)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise LookaheadError(
                f"{item.source}: the chat template cannot tell which tokens are the assistant's: it has no generation "
                f"tags, and what it renders up to message {index + 1} is no beginning of the whole conversation. Put "
                "{% generation %} and {% endgeneration %} around the assistant's content in it."
            )
        loss[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, loss


def _template(tokenizer: Any, item: Item) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise LookaheadError(
            f"{item.source} is a conversation, and the tokenizer has no chat template: expected one beside the model "
            "(chat_template.jinja). Add it, or give plain texts or prompts with completions."
        ) from error


def _render(tokenizer: Any, item: Item, count: int, *, prompt: bool = False) -> list[int]:
    """The first ``count`` messages as tokens; with ``prompt``, the header of the next answer follows."""
    _template(tokenizer, item)
    return list(_apply(tokenizer, item, count, add_generation_prompt=prompt, return_dict=False))


def _apply(tokenizer: Any, item: Item, count: int, **settings: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(item.messages[:count]), **settings)
    except (TemplateError, ValueError) as error:
        raise LookaheadError(f"{item.source}: the chat template refuses the conversation: {error}.") from error

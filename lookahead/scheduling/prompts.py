"""Prompts that are read in one pass: those that begin together, padded on the right; one that many ask, once for all.

No token of a causal model sees what comes after it, so padding behind a prompt changes nothing of it::

    a  b  c  -  -       the first tokens after c and after h are chosen by the scores at those places
    d  e  f  g  h

Models whose attention does not say that it is causal (BERT's family sees all of the prompt), and recurrent ones, read
together only what is equally long. Where a text's numbers have to be the same in any company, a prompt is fed by the
passes that write, so that what a cache holds of it already, and by which parts it came there, makes no difference.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jacobi import Path, Scores, TokenTree, Wants
from lookahead.generation.call import Call
from lookahead.models.families.scans import scanned_layers
from lookahead.models.output_layer import MOST_LOGITS
from lookahead.runtime.forward import Prompt
from lookahead.runtime.open import open_tree, reads_in_chunks
from lookahead.runtime.packed_layers import Invariance, Packed
from lookahead.runtime.scores import prompt_scores
from lookahead.runtime.tree import TreeModel

_MOST_TOKENS = 512  # of one pass: so many keep a device busy, and the first texts begin before the last
_MOST_PADDING = 0.25  # of them
_FED = 64  # tokens of a tree forward that reads a prompt in order: as many as linear layers are given at a time


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose prompt is to be read. At most ``new_tokens`` follow; ``names`` are those of its arguments;
    ``limits`` as a plan has them."""

    call: Call
    wants: Wants
    new_tokens: int
    names: frozenset[str]
    limits: Invariance | None = None

    @property
    def length(self) -> int:
        return int(self.call.input_ids.shape[1])

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(self.call.input_ids[0].tolist())

    @property
    def in_order(self) -> bool:
        """Whether it is fed by the passes that write: a text within limits, from its first token on."""
        mask = self.call.kwargs.get("attention_mask")
        whole = mask is None or bool(mask.all())
        return self.limits is not None and whole and "position_ids" not in self.names

    @property
    def kind(self) -> Hashable:
        """Prompts of one kind can be read together; None = this one is read alone."""
        call = self.call
        past = 0 if call.cache is None else int(call.cache.get_seq_length())
        given = {name: value for name, value in call.kwargs.items() if name != "position_ids" and value is not None}
        if past or reads_in_chunks(call.config) or "position_ids" in self.names:
            return None
        if any(isinstance(value, Tensor) for value in given.values()):
            return None
        return self.wants, tuple(sorted(given.items())), self.text if self.in_order else None


def read(asked: Sequence[Asked]) -> tuple[TreeModel, list[Scores]]:
    """Read prompts of one kind, or one for all that ask it; the model's view of them, and what it says of each."""
    room, copies = max(one.new_tokens for one in asked), len(asked) if len({one.text for one in asked}) == 1 else 1
    asked = asked[: len(asked) // copies]
    longest = max(asked, key=lambda one: one.length)
    if longest.in_order:
        return _read_in_order(longest, room, copies)
    call, wants = longest.call, longest.wants
    tokens = _scored(wants, len(asked))
    behind = [longest.length - one.length for one in asked]
    kwargs: dict[str, Any] = dict(call.kwargs)
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):
        kwargs["position_ids"] = positions.expand(len(asked), -1)
    # A shorter prompt has its last token again and again behind it.
    texts = [one.call.input_ids[0] for one in asked]
    ids = torch.stack([torch.cat([ids, ids[-1:].expand(count)]) for ids, count in zip(texts, behind, strict=True)])
    prompt = Prompt(ids, call.config, kwargs, call.cache, room, spread=max(behind))
    view = open_tree(call.model, call.traits, prompt, None, replace(wants, prompt_top_k=tokens), static=False)
    try:
        logits, layout = view.read(), view.forward_pass.layout
        layout.keep_prompts(behind)
        ends = [logits.shape[1] - padding for padding in behind]
        parts = [logits[row : row + 1, max(0, end - tokens) : end] for row, end in enumerate(ends)]
        scores = [prompt_scores(part, wants.top_k) for part in parts]
        if copies > 1:
            layout.repeat(copies)
        return view, scores * copies
    except BaseException:
        view.close()
        raise


def _read_in_order(one: Asked, room: int, copies: int) -> tuple[TreeModel, list[Scores]]:
    """The same of one prompt whose numbers depend on its text alone: all but its first token by tree forwards."""
    call, text, tokens = one.call, one.text, _scored(one.wants, 1)
    past = 0 if call.cache is None else int(call.cache.get_seq_length())
    kwargs = {name: value for name, value in call.kwargs.items() if not isinstance(value, Tensor)}
    prompt = Prompt(call.input_ids[:, :1] if past == 0 else call.input_ids, call.config, kwargs, call.cache, room)
    view = open_tree(call.model, call.traits, prompt, None, one.wants, static=False, packed=Packed({}, one.limits))
    try:
        found = [view.read(prompt=not past)]
        view.forward_pass.layout.keep_prompts([0])
        for start in range(max(past, 1), len(text), _FED):
            part = text[start : start + _FED]
            found.append(view.forward([TokenTree.chain(part[0], part[1:])]).logits)
            view.keep([Path(list(range(len(part))), [0] * len(part))])
        ends = torch.cat([logits[:, -tokens:] for logits in found if logits.numel()], 1)
        scores = prompt_scores(ends[:, -tokens:], one.wants.top_k)
        if copies > 1:
            view.forward_pass.layout.repeat(copies)
        return view, [scores] * copies
    except BaseException:
        view.close()
        raise


def _scored(wants: Wants, prompts: int) -> int:
    """Of how many of each prompt's last tokens drafts are told what follows: as many of all as of one alone."""
    return max(1, wants.prompt_top_k // prompts) if wants.top_k else 1


def groups(asked: Sequence[Asked]) -> Iterator[list[int]]:
    """Which prompts are read together: the same ones, or those of one kind and much one length that fit a pass."""
    pads = len(asked) > 1 and _is_causal(asked[0].call)
    told = [(one.kind, one.text) for one in asked]
    often = {each for each, count in Counter(told).items() if count > 1 and each[0]}
    kinds = [kind and (kind, text if (kind, text) in often else pads or len(text)) for kind, text in told]
    order = sorted(range(len(asked)), key=lambda at: asked[at].length)
    for kind in dict.fromkeys(kinds):
        group: list[int] = []
        for at in (at for at in order if kinds[at] == kind):
            fits = told[at] in often or (kind and _fit([asked[member] for member in [*group, at]]))
            if group and not fits:
                yield group
                group = []
            group.append(at)
        yield group


def _is_causal(call: Call) -> bool:
    """Whether all attention of a decoder says that no token sees later ones, and no state is left behind them."""
    told = [bool(module.is_causal) for module in call.model.get_decoder().modules() if hasattr(module, "is_causal")]
    return bool(told) and all(told) and not scanned_layers(call.model, call.traits.config)


def _fit(asked: Sequence[Asked]) -> bool:
    """Whether prompts, in rising order of their lengths, are read in one pass."""
    shortest, longest, wants = asked[0].length, asked[-1].length, asked[0].wants
    tokens = len(asked) * longest
    padding = tokens - sum(one.length for one in asked)
    scored = len(asked) * (longest - shortest + _scored(wants, len(asked)))
    few = tokens <= _MOST_TOKENS and scored * asked[0].call.traits.vocab_size <= MOST_LOGITS
    return few and padding <= _MOST_PADDING * tokens

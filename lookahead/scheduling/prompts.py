"""Prompts that are read in one pass: those that begin together, padded on the right; one that many ask, once for all.

No token of a causal model sees what comes after it, so padding behind a prompt changes nothing of it::

    a  b  c  -  -       the first tokens after c and after h are chosen by the scores at those places
    d  e  f  g  h

Models whose attention does not say that it is causal (BERT's family sees all of the prompt), and recurrent ones, read
together only what is equally long. Where a text's numbers have to be the same in any company, a prompt is read by
itself, or where beginnings are kept by the passes that write, so that what a cache holds of it already, and by which
parts it came there, makes no difference.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jacobi import Path, Scores, TokenTree, Wants
from lookahead.generation.call import Call
from lookahead.generation.prefixes import BLOCK, KeptBlock, Prefixes
from lookahead.models.families.scans import scanned_layers
from lookahead.models.output_layer import MOST_LOGITS
from lookahead.runtime.forward import Prompt
from lookahead.runtime.open import open_tree, reads_in_chunks
from lookahead.runtime.packed_layers import Invariance, Packed
from lookahead.runtime.scores import prompt_scores
from lookahead.runtime.tree import TreeModel

MOST_TOKENS = 512  # of one pass: so many keep a device busy, and the first texts begin before the last
_MOST_PADDING = 0.25  # of them
_Read = tuple[TreeModel, list[Scores]]
_FED = 64  # tokens of a tree forward that reads a prompt in order: as many as linear layers are given at a time


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose prompt is to be read. At most ``new_tokens`` follow; ``names`` are those of its arguments;
    ``limits`` as a plan has them. ``past`` holds how the text begins, as far as that is known."""

    call: Call
    wants: Wants
    new_tokens: int
    names: frozenset[str]
    limits: Invariance | None = None
    past: tuple[KeptBlock, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that are to be read."""
        return int(self.call.input_ids.shape[1]) - BLOCK * len(self.past)

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
    def begins(self) -> bool:
        """Whether it is tokens from the first on, and nothing else, so that they alone say what a cache holds."""
        call = self.call
        past = 0 if call.cache is None else int(call.cache.get_seq_length())
        given = [value for name, value in call.kwargs.items() if name != "position_ids"]
        told = any(isinstance(value, Tensor) for value in given) or "position_ids" in self.names
        return not (past or told or reads_in_chunks(call.config))

    @property
    def kind(self) -> Hashable:
        """Prompts of one kind can be read together; None = this one is read alone."""
        if not self.begins:
            return None
        given = {name: each for name, each in self.call.kwargs.items() if name != "position_ids" and each is not None}
        return self.wants, tuple(sorted(given.items())), bool(self.past) or (self.limits and self.text)


def read(asked: Sequence[Asked], prefixes: Prefixes) -> _Read:
    """Read prompts of one kind, or one for all that ask it; the model's view of them, and what it says of each."""
    room, copies = max(one.new_tokens for one in asked), len(asked) if len({one.text for one in asked}) == 1 else 1
    in_order = (prefixes.keeps and asked[0].in_order) or len({one.past for one in asked}) > 1
    with ExitStack() as failed:
        reads = _read_in_order if in_order else _read_padded
        view, scores = reads(asked[: len(asked) // copies], prefixes, room, failed)
        if copies > 1:
            view.forward_pass.layout.repeat(copies)
        failed.pop_all()
    return view, scores * copies


def _read_padded(asked: Sequence[Asked], prefixes: Prefixes, room: int, failed: ExitStack) -> _Read:
    """The same in one pass, as plain decoding reads them."""
    longest = max(asked, key=lambda one: one.length)
    call, wants, known = longest.call, longest.wants, BLOCK * len(longest.past)
    tokens = _scored(wants, len(asked))
    behind = [longest.length - one.length for one in asked]
    cache, kwargs = prefixes.cache(longest.past, len(asked)) if known else call.cache, dict(call.kwargs)
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):
        kwargs["position_ids"] = positions[:, known : known + longest.length].expand(len(asked), -1)
    # A shorter prompt has its last token again and again behind it.
    texts = [one.call.input_ids[0, known:] for one in asked]
    ids = torch.stack([torch.cat([ids, ids[-1:].expand(count)]) for ids, count in zip(texts, behind, strict=True)])
    prompt = Prompt(ids, call.config, kwargs, cache, room, spread=max(behind), follows=known > 0)
    view = open_tree(call.model, call.traits, prompt, None, replace(wants, prompt_top_k=tokens), static=False)
    failed.callback(view.close)
    logits = view.read()
    view.forward_pass.layout.keep_prompts(behind)
    ends = [logits.shape[1] - padding for padding in behind]
    parts = [logits[row : row + 1, max(0, end - tokens) : end] for row, end in enumerate(ends)]
    return view, [prompt_scores(part, wants.top_k) for part in parts]


def _read_in_order(asked: Sequence[Asked], prefixes: Prefixes, room: int, failed: ExitStack) -> _Read:
    """The same by tree forwards: of one prompt, so that its numbers depend on its text alone, all but the first token,
    and of several what is behind their known beginnings."""
    opened = [_begun(one, prefixes, room, failed) for one in asked]
    view, texts, found = opened[0][0], [text for _, text, _ in opened], [logits for *_, logits in opened]
    for other, *_ in opened[1:]:
        view.join(other, len(asked))
    tokens = _scored(asked[0].wants, len(asked))
    while any(texts):
        parts, texts = [text[:_FED] for text in texts], [text[_FED:] for text in texts]
        logits = view.forward([TokenTree.chain((*part, 0)[0], part[1:]) for part in parts]).logits
        view.keep([Path(list(range(len(part))), [0] * len(part)) for part in parts])
        for row, part in enumerate(parts):  # one that is read already has a node that is not kept
            behind = logits[row : row + 1, : len(part)]
            found[row] = torch.cat([found[row], behind], 1)[:, -tokens:] if found[row].numel() else behind[:, -tokens:]
    return view, [prompt_scores(ends[:, -tokens:], asked[0].wants.top_k) for ends in found]


def _begun(one: Asked, prefixes: Prefixes, room: int, failed: ExitStack) -> tuple[TreeModel, tuple[int, ...], Tensor]:
    """A view that holds what is known of a text, or its first token; what is still to be read, and logits so far."""
    call, cache = one.call, prefixes.cache(one.past) if one.past else one.call.cache
    past = 0 if cache is None else int(cache.get_seq_length())
    kwargs = {name: value for name, value in call.kwargs.items() if not isinstance(value, Tensor)}
    prompt = Prompt(call.input_ids[:, :1] if past == 0 else call.input_ids, call.config, kwargs, cache, room)
    packed = None if one.limits is None else Packed({}, one.limits)
    view = open_tree(call.model, call.traits, prompt, None, one.wants, static=False, packed=packed)
    failed.callback(view.close)
    logits = view.read(prompt=not past)
    view.forward_pass.layout.keep_prompts([0])
    return view, one.text[max(past, 1) :], logits


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
    scored = min(_FED, longest) if asked[0].past else longest - shortest + _scored(wants, len(asked))
    few = tokens <= MOST_TOKENS and len(asked) * scored * asked[0].call.traits.vocab_size <= MOST_LOGITS
    return few and tokens - sum(one.length for one in asked) <= _MOST_PADDING * tokens

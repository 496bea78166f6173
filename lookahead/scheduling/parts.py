"""Parts of prompts that are read before the rest, and kept: of long ones, and what several have in common."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import takewhile

from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from jacobi import Wants
from lookahead.generation.call import Call
from lookahead.generation.prefixes import BLOCK, Prefixes
from lookahead.models.compat import is_users_cache
from lookahead.runtime.tree import TreeModel
from lookahead.scheduling import prompts
from lookahead.scheduling.prompts import MOST_TOKENS, Asked
from lookahead.scheduling.requests import Ticket
from lookahead.scheduling.row import Row

_LEAST_SAVED = 0.25  # of a pass's tokens, for one more over what prompts have in common

Leave = Callable[[Row, Exception], None]  # ends a row


class PromptParts:
    """Reads parts into kept beginnings, behind which the rest of a prompt is read as any other::

    prompt of 1300 tokens, two rows write     512 | pass | 512 | pass | 276 | pass of three
    8 prompts begin with the same 64          64, once   | 8 rests together
    """

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes

    def asked(self, row: Row) -> Asked:
        """What a row's prompt is given, behind what is known of it now."""
        one, salt = row.asked, row.ticket.salt
        return replace(one, past=self._prefixes.find(one.text, salt)) if self._prefixes.keeps and one.begins else one

    def begin(self, row: Row, asked: Asked) -> None:
        """A row's prompt is read now, or the first part of it."""
        if row.ticket.cached is None:
            row.ticket.cached = BLOCK * len(asked.past)

    def keep(self, row: Row, view: TreeModel, at: int) -> None:
        """Let others begin with a row's text, as far as the row ``at`` of a model's cache holds it."""
        if self._prefixes.keeps and row.asked.begins:
            text = [*row.asked.text, *row.sequences.written[0]]
            self._prefixes.keep(text, view.forward_pass.layout.cache, row.ticket.salt, at)

    def read_long(self, rows: Sequence[Row], leave: Leave) -> list[Row]:
        """Those whose prompts are too long for one pass beside others, of which the one that came first has read on."""
        long = []
        for row in rows if self._prefixes.keeps else ():
            asked = self.asked(row)
            if asked.begins and asked.length > MOST_TOKENS:
                long.append((row, _part(asked, MOST_TOKENS)))
        if long and not self.read(*long[0], leave):
            del long[0]
        return [row for row, _ in long]

    def common(self, rows: Sequence[Row], asked: Sequence[Asked]) -> Asked | None:
        """What prompts of one kind begin with, where it saves many tokens to read that before; None = it does not."""
        kinds = {(row.ticket.salt, one.past) for row, one in zip(rows, asked, strict=True)}
        if not (self._prefixes.keeps and asked[0].begins) or len(kinds) > 1:
            return None
        texts = {one.text[BLOCK * len(one.past) : -1] for one in asked}
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
        shared = sum(1 for _ in alike) // BLOCK * BLOCK
        return _part(asked[0], shared) if (len(texts) - 1) * shared >= _LEAST_SAVED * MOST_TOKENS else None

    def read(self, row: Row, part: Asked, leave: Leave) -> bool:
        """Read a part of a row's prompt, or end the row by what that raises; False = it cannot be kept."""
        try:
            self.begin(row, part)
            view, _ = prompts.read([part], self._prefixes)
            with closing(view):
                self._prefixes.keep(part.text, view.forward_pass.layout.cache, row.ticket.salt)
        except Exception as error:
            leave(row, error)
            return True
        return len(self.asked(row).past) > len(part.past)


def behind_known(call: Call, ticket: Ticket, prefixes: Prefixes) -> tuple[Call, Cache | None]:
    """A call that is decoded alone, begun where what is known of its text ends, and the cache that will hold its text;
    None = it will not be kept, as where the caller has a cache of another kind, or an own one."""
    plain = type(call.cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in call.cache.layers)
    plain = plain and call.batch == 1 and not (call.cache.offloading or is_users_cache(call.cache))
    if not (plain and Asked(call, Wants(), 0, frozenset(ticket.inputs)).begins):
        return call, None
    cache, ticket.cached = prefixes.take(call.prompts()[0], ticket.salt)
    return call if cache is None else replace(call, cache=cache), cache


def _part(one: Asked, tokens: int) -> Asked:
    stop = BLOCK * len(one.past) + tokens
    return replace(one, call=replace(one.call, input_ids=one.call.input_ids[:, :stop]), wants=Wants())

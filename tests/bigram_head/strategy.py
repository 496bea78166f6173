"""The strategy: the head is one source of the automatic tree."""

from dataclasses import dataclass
from typing import ClassVar

from bigram_head.head import BigramHead, BigramPasses
from lookahead.draft.context import CallContext, Drafts
from lookahead.heads.base import HeadStrategy
from lookahead.strategies.automatic import FREE_SOURCES


@dataclass(frozen=True)
class Bigram(HeadStrategy):
    name: ClassVar[str] = "bigram"
    known_sources: ClassVar[tuple[str, ...]] = ("bigram", *FREE_SOURCES)
    kind: ClassVar[type[BigramHead]] = BigramHead
    expected: ClassVar[str] = "a BigramHead or the folder it lies in"
    title: ClassVar[str] = "The bigram head is"

    head: BigramHead | str | None = None

    def drafts(self, call: CallContext) -> Drafts:
        head = self.heads_for(call.model)
        return self._drafts_of(call, lambda row: BigramPasses(head, row.vocab_size))

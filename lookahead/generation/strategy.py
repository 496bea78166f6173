"""What generation reads of a strategy; :class:`lookahead.strategies.base.Strategy` is one."""

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from lookahead.draft.context import CallContext, Drafts, Wants


class Strategy(Protocol):
    """Frozen settings that say how a draft is grown; the attributes are documented where they are set."""

    @property
    def verification(self) -> Literal["exact", "rejection"]: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def stats(self) -> Literal["none", "summary", "detailed"]: ...
    @property
    def static(self) -> bool | None: ...
    @property
    def attention(self) -> Literal["sdpa", "eager", "flex_attention"] | None: ...
    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None: ...
    @property
    def remembers(self) -> bool: ...

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model for which nothing can be drafted, before any pass."""

    def wants(self, *, batch: int, vocab_size: int, new_tokens: int) -> Wants:
        """What the drafters want to be told by the model."""

    def drafts(self, call: CallContext) -> Drafts:
        """Make what one call needs."""

"""What every strategy is: frozen settings that say how a draft is grown."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

from torch import Tensor

from jacobi import Drafter, LookaheadError
from lookahead.draft.context import CallContext, Drafts, RowContext, Wants

Stats = Literal["none", "summary", "detailed"]


@dataclass(frozen=True, kw_only=True)
class DraftStrategy:
    """What a call reads of a strategy; :class:`lookahead.strategies.base.Strategy` says what the fields mean."""

    name: ClassVar[str]

    verification: Literal["exact", "rejection"] = "exact"
    seed: int | None = None
    stats: Stats = "summary"
    static: bool | None = None
    traces: bool = True
    pack: bool = True
    repeatable: bool | None = None
    attention: Literal["sdpa", "eager", "flex_attention"] | None = None

    def __post_init__(self) -> None:
        """Check what types tell of values: fields that are a ``Literal`` or a bool, or may be None."""
        for field in dataclasses.fields(self):
            kinds, value = (field.type, *get_args(field.type)), getattr(self, field.name)
            if value is None and NoneType in kinds:
                continue
            for kind in kinds:
                if get_origin(kind) is Literal:
                    self._one_of(field.name, get_args(kind))
                elif kind is bool and not isinstance(value, bool):
                    self._refuse(field.name, "True or False")
        if self.seed is not None:
            self._whole("seed")

    def _one_of(self, field: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if not isinstance(value, str) or value not in allowed:
            self._refuse(field, f"one of {', '.join(map(repr, allowed))}")

    def _whole(self, field: str, least: int | None = None) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(field, "a whole number", f" of type {type(value).__name__}")
        if least is not None and value < least:
            self._refuse(field, f"at least {least}")

    def _between(self, field: str, range_: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            self._refuse(field, f"a number {range_}")

    def _refuse(self, field: str, expected: str, more: str = "") -> NoReturn:
        value = getattr(self, field)
        raise LookaheadError(f"{type(self).__name__}({field}=) must be {expected}: got {value!r}{more}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: ``generate`` copies settings in every call, but weights of heads and draft models need no copies."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON; ``from_dict`` reads it back."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"strategy": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Make the strategy from plain data; a LookaheadError tells of an unknown field or a value out of range."""
        settings = dict(settings)
        named = settings.pop("strategy", cls.name)
        if named != cls.name:
            raise LookaheadError(f"These are settings of strategy {named!r}: expected {cls.name!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = ", ".join(map(repr, sorted(map(str, set(settings) - set(known)))))
        if unknown:
            raise LookaheadError(f"Unknown field {unknown} for {cls.__name__}: it knows {', '.join(known)}.")
        return cls(**settings)

    def assisted(self, draft: Any, tokenizers: Any = None) -> Any:
        """The same strategy with ``generate``'s assistant as its draft model; a LookaheadError where there is none."""
        raise LookaheadError(
            f"{type(self).__name__} takes no assistant_model: expected Lookahead() in the automatic mode (no W, N, G). "
            "Use that, or drop assistant_model."
        )

    def predicting(self) -> Any:
        """The same strategy with the model's MTP layers (``use_mtp=True``); a LookaheadError where there is none."""
        raise LookaheadError(
            f"{type(self).__name__} takes no use_mtp: expected Lookahead() in automatic mode (no W, N, G) or Mtp(). "
            "Use that, or drop use_mtp."
        )

    @property
    def automatic(self) -> bool:
        """Whether sizes are chosen while decoding."""
        return False

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """Which tokens a lossy verifier may keep: processed scores ``[..., vocab]`` to bool; None = it is exact."""
        return None

    @property
    def draws_candidates(self) -> bool:
        """Whether a sampled call draws candidates by chance: one head's or model's alone, in a tree of given size,
        where the verification makes use of that."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether drafts start from what they learnt in earlier calls on the model."""
        return False

    def drafter(self, row: RowContext) -> Drafter:
        """Make the drafter of one sequence."""
        raise TypeError(f"{type(self).__name__} has no drafter; use Lookahead, Jacobi or Medusa.")

    def check(self, model: Any) -> None:
        """Refuse a model for which nothing can be drafted, before any pass, with a LookaheadError."""

    def wants(self, *, batch: int, vocab_size: int, new_tokens: int, drawn: bool) -> Wants:
        """What the drafters want to be told by the model, in a call of this size whose tokens are ``drawn`` or not."""
        return Wants()

    def _check_causal(self, model: Any) -> None:
        if model.config.is_encoder_decoder:
            raise LookaheadError(
                f"{type(self).__name__} drafts with heads on a causal model, and {type(model).__name__} is an "
                "encoder-decoder model. Use Lookahead() or Jacobi()."
            )

    def taps(self, model: Any) -> tuple[str, ...]:
        """Which hidden states of the model's passes drafters read (:attr:`jacobi.Wants.taps`)."""
        return ()

    def drafts(self, call: CallContext) -> Drafts:
        """Make what one call needs."""
        return Drafts([self.drafter(row) for row in call.rows])

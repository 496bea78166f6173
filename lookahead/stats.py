"""Counts of a decode: sums, so that they add up over calls, sequences and processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeVar

from jacobi import LookaheadError, Step

_RATIOS = ("mean_acceptance_length", "acceptance_rate")  # properties that to_dict adds
_Amount = TypeVar("_Amount", int, float)
_SOURCES = {
    "draft": "the draft model",
    "grammar": "what must follow",
    "pool": "n-grams seen before",
    "recycling": "what came after a token before",
    "reference": "a given text",
    "suffix": "what came after the same words before",
}


def duration(ms: float) -> str:
    """Milliseconds in the unit that suits them."""
    if ms < 999.5:
        return f"{ms:.3g} ms"
    return f"{ms / 1e3:.1f} s" if ms < 119_950 else f"{ms / 6e4:.1f} min"


def counted(number: int, noun: str, several: str | None = None) -> str:
    """A number with its noun, in the plural but for 1."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"


def _summed(mine: Mapping[Any, _Amount], others: Mapping[Any, _Amount]) -> dict[Any, _Amount]:
    """Both together, keys sorted, zeros left out."""
    both = {key: mine.get(key, 0) + others.get(key, 0) for key in sorted({*mine, *others})}
    return {key: amount for key, amount in both.items() if amount}


@dataclass
class DecodingStats:
    """What a decode did. Every field is a sum or a joined list, so ``a + b`` describes both calls.

    ``steps`` counts forward passes of the whole batch. The other counts are over sequences, so acceptance in a batch is
    measured against ``row_steps``.

    Attributes:
        steps: forward passes, the prompt's included.
        row_steps: passes in which a sequence wrote something, over all sequences.
        emitted: tokens written, bonus tokens included.
        drafted: drafted nodes scored, in passes in which the sequence wrote something.
        accepted: drafted nodes that were kept.
        histogram: how often a sequence wrote k tokens in a pass, by k.
        prefill_ms: milliseconds of the prompt's pass.
        draft_ms: milliseconds of growing trees.
        forward_ms: milliseconds of the later forward passes, with the transfer to the host.
        verify_ms: milliseconds of logits processors, sampling and stopping rules.
        keep_ms: milliseconds of moving keys and values, and of learning from the pass.
        sources: accepted tokens by the source that proposed them (automatic mode).
        asked_ms: milliseconds that sources took which run a model or heads, by their names (automatic mode).
        by_noise: of the accepted tokens of sampled texts, those that the model had not called the likeliest in their
            context before: drafts that saw the noise (automatic mode).
        single_ms: milliseconds that transformers' own passes over one node each would have taken, if known (automatic).
        own_ms: the same of passes as this call ran them: packed, traced, captured (automatic mode).
        timed_ms: milliseconds that those passes took: drafting, scoring and keeping (automatic mode).
        plain: calls that fell back to transformers' own loop, by the reason; nothing else is counted of them.
        bits: calls by what a seed's text keeps whatever else changes: ``"plain"`` = it is plain decoding's,
            ``"repeatable"`` = it is the same each time, else why neither is certain.
        fed_again: tokens that passes had to replay, where a model can only follow linear drafts.
        passes: with ``stats="detailed"``, one record a pass: nodes and tokens by sequence, and milliseconds.
    """

    steps: int = 0
    row_steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    verify_ms: float = 0.0
    keep_ms: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)
    asked_ms: dict[str, float] = field(default_factory=dict)
    by_noise: int = 0
    single_ms: float = 0.0
    own_ms: float = 0.0
    timed_ms: float = 0.0
    plain: dict[str, int] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    fed_again: int = 0
    passes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens written per pass and sequence, the bonus token included (the papers' step compression S)."""
        return self.emitted / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted nodes that were kept."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def repeatable(self) -> bool:
        """Whether the same calls with the same seeds write the same texts again."""
        return bool(self.bits) and self.bits.keys() <= {"plain", "repeatable"}

    def __add__(self, other: "DecodingStats") -> "DecodingStats":
        if not isinstance(other, DecodingStats):
            return NotImplemented
        merged: dict[str, Any] = {}
        for f in fields(self):
            mine, others = getattr(self, f.name), getattr(other, f.name)
            merged[f.name] = _summed(mine, others) if isinstance(mine, dict) else mine + others
        return DecodingStats(**merged)

    def __radd__(self, other: Any) -> "DecodingStats":
        """So that ``sum(list_of_stats)`` works."""
        return DecodingStats() + self if other == 0 else NotImplemented

    def count(self, step: Step, written: Sequence[int], *, first: bool, detailed: bool) -> None:
        """Take in one pass (the prompt's if ``first``), in which each sequence wrote so many tokens without padding."""
        self.steps += 1
        self.drafted += sum(len(tree) - 1 for tree, tokens in zip(step.trees, written, strict=True) if tokens)
        for tokens in filter(None, written):
            self.row_steps += 1
            self.emitted += tokens
            self.accepted += tokens - 1
            self.histogram[tokens] = self.histogram.get(tokens, 0) + 1
        self.prefill_ms += step.forward_ms if first else 0.0
        self.forward_ms += 0.0 if first else step.forward_ms
        self.draft_ms += step.draft_ms
        self.verify_ms += step.verify_ms
        self.keep_ms += step.keep_ms
        if detailed:
            times = {name: getattr(step, name) for name in ("draft_ms", "forward_ms", "verify_ms", "keep_ms")}
            self.passes.append({"nodes": [len(tree) for tree in step.trees], "tokens": list(written)} | times)

    def add(self, **more: Any) -> None:
        """Add to fields, by their names."""
        vars(self).update(vars(self + DecodingStats(**more)))

    def explain(self, measured: float | None = None, legend: bool = True) -> str:
        """What was gained or lost against plain decoding, and why, in one or two sentences.

        The speed is split in two: what drafts bring, ``S`` over the cost of a pass in passes over one token as this
        call runs them; and what faster passes bring, over transformers' own. The prompt's pass is left out.

        Args:
            measured: the speed against plain decoding, where that was timed as well. It is estimated otherwise.
            legend: add two or three lines that say what the words mean.
        """
        if not self.steps:
            return (
                f"Decoded by transformers' own loop: {'; '.join(self.plain)}." if self.plain else "Nothing was decoded."
            )
        passes = counted(self.steps, "pass", "passes")
        what = f"{counted(self.emitted, 'token')} in {passes} (S = {self.mean_acceptance_length:.2f})"
        if self.steps == 1:
            return f"{what}: the prompt's pass wrote everything, so there was nothing to draft."
        if not self.drafted:
            told = f"{what}: plain decoding, because no draft was expected to pay."
            if measured is not None:
                told += f" All of the {measured:.2f}x plain decoding that was measured is the passes'."
        else:
            told = f"{what} with {self._drafts_told()}; {self._speed_told(measured)}"
        return f"{told}\n{self.legend()}" if legend else told

    def _drafts_told(self) -> str:
        nodes = self.drafted / max(1, self.row_steps)
        what = f"{nodes:.1f} drafted nodes a pass, of which {self.acceptance_rate:.0%} were kept"
        if accepted := sum(self.sources.values()):
            shares = sorted(self.sources.items(), key=lambda item: -item[1])
            told = [f"{name} {count / accepted:.0%}" for name, count in shares]
            told += [f"{min(1.0, self.by_noise / accepted):.0%} thanks to the noise"] if self.by_noise else []
            what += f" ({', '.join(told)})"
        if asked := {name: ms for name, ms in self.asked_ms.items() if ms > 0.0}:
            told = [f"{name} took {ms / max(ms, self.timed_ms):.0%}" for name, ms in asked.items()]
            what += f"; of the time, {' and '.join(told)}"
        return what + (f", and {counted(self.fed_again, 'token')} replayed" if self.fed_again else "")

    def split(self, measured: float | None = None) -> tuple[float, float] | None:
        """What drafts bring, and what faster passes bring: their product is the speed against plain decoding, the
        ``measured`` one where it is given. None = it is not known what a pass over one node costs."""
        if not (self.single_ms and self.timed_ms):
            return None
        # What one node takes may not have been seen for long; it is no more than what more of them do.
        own_ms = min(self.own_ms or self.single_ms, self.timed_ms)
        drafts = self.mean_acceptance_length * own_ms / self.timed_ms
        return drafts, self.single_ms / own_ms if measured is None else measured / drafts

    def _speed_told(self, measured: float | None) -> str:
        split = self.split(measured)
        if split is None:
            speed = "" if measured is None else f": {measured:.2f}x plain decoding, measured"
            return f"what a pass over one node costs here is not known, so neither is what drafts bring{speed}."
        drafts, passes = split
        how = "estimated from passes over one token" if measured is None else "measured"
        loss = "a loss, " if drafts * passes < 1.0 else ""
        cost = f"a pass cost {self.mean_acceptance_length / drafts:.2f} times one over a single token"
        parts = f"Drafts {drafts:.2f}x times passes {passes:.2f}x"
        return f"{cost}. {parts} makes {loss}{drafts * passes:.2f}x plain decoding, {how}."

    def legend(self) -> str:
        """What the words of :meth:`explain` mean, in two or three lines."""
        lines = [
            "S: tokens that a pass writes; plain decoding's writes 1.",
            "Drafts: S over that cost of a pass. Passes: what packed weights, traces and CUDA graphs bring.",
        ]
        known = [f"{name}: {_SOURCES[name]}" for name in self.sources if name in _SOURCES]
        known += ["noise: of the draw, which drafts saw before"] if self.by_noise else []
        return "\n".join(lines + (["Who drafted what was kept: " + "; ".join(known) + "."] if known else []))

    def to_dict(self) -> dict[str, Any]:
        """All counts and the two ratios, as plain data."""
        ratios = {name: getattr(self, name) for name in _RATIOS}
        return asdict(self) | {"histogram": dict(sorted(self.histogram.items()))} | ratios

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read :meth:`to_dict`'s data back, also from JSON, where the histogram's keys are text."""
        names = {f.name for f in fields(cls)}
        unknown = set(data) - names - {*_RATIOS}
        if unknown:
            raise LookaheadError(f"Unknown statistics {sorted(unknown)}: expected {sorted(names)}.")
        kept = {k: v for k, v in data.items() if k in names}
        kept["histogram"] = {int(k): v for k, v in kept.get("histogram", {}).items()}
        return cls(**kept)

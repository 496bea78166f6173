"""Counts of a decode: plain sums, so that they add up over calls, rows and processes."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from jacobi import LookaheadError, Step


@dataclass
class DecodingStats:
    """What a decode did. Every field is a sum (or a list that is joined), so ``a + b`` describes both calls.

    ``steps`` counts forward passes of the whole batch, the prompt's pass included; the other counts are over rows, so
    for a batch ``row_steps`` (passes in which a row wrote something) is what acceptance is measured against.

    Attributes:
        steps: forward passes.
        row_steps: passes summed over the rows that wrote something in them.
        emitted: tokens written, carried tokens included.
        drafted: nodes scored beyond the roots, in rows that wrote something in the pass.
        accepted: drafted nodes that were kept.
        histogram: how often a row wrote k tokens in a pass, by k.
        prefill_ms: the prompt's pass.
        draft_ms, forward_ms, verify_ms, keep_ms: growing trees; later forward passes with the transfer to the host;
            processors, sampling and stopping rules; moving keys and values, and learning from the pass.
        passes: with ``stats="detailed"``, one record a pass: nodes, tokens (a list over rows) and milliseconds.
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
    passes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens written per pass and row, the carried token included (the papers' step compression S)."""
        return self.emitted / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted nodes that were kept."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: "DecodingStats") -> "DecodingStats":
        if not isinstance(other, DecodingStats):
            return NotImplemented
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "histogram"}
        counts = Counter(self.histogram)
        counts.update(other.histogram)
        return DecodingStats(**merged, histogram=dict(sorted(counts.items())))

    def __radd__(self, other: Any) -> "DecodingStats":
        """So that ``sum(list_of_stats)`` works."""
        return DecodingStats() + self if other == 0 else NotImplemented

    def count(self, step: Step, written: Sequence[int], *, first: bool, detailed: bool) -> None:
        """Take in one pass.

        Args:
            step: the pass.
            written: tokens that each row wrote in it, padding left out.
            first: it was the prompt's.
            detailed: record it in ``passes``.
        """
        self.steps += 1
        drafted = sum(len(tree) - 1 for tree, tokens in zip(step.trees, written, strict=True) if tokens)
        self.drafted += drafted
        for tokens in written:
            if tokens:
                self.row_steps += 1
                self.emitted += tokens
                self.accepted += tokens - 1
                self.histogram[tokens] = self.histogram.get(tokens, 0) + 1
        if first:
            self.prefill_ms += step.forward_ms
        else:
            self.forward_ms += step.forward_ms
        self.draft_ms += step.draft_ms
        self.verify_ms += step.verify_ms
        self.keep_ms += step.keep_ms
        if detailed:
            record = {"nodes": [len(tree) for tree in step.trees], "tokens": list(written)}
            times = ("draft_ms", "forward_ms", "verify_ms", "keep_ms")
            self.passes.append(record | {name: getattr(step, name) for name in times})

    def to_dict(self) -> dict[str, Any]:
        """All counts and the two ratios, as plain data."""
        ratios = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
        }
        return asdict(self) | {"histogram": dict(sorted(self.histogram.items()))} | ratios

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read :meth:`to_dict`'s data back (JSON's string keys of the histogram too)."""
        names = {f.name for f in fields(cls)}
        unknown = set(data) - names - {"mean_acceptance_length", "acceptance_rate"}
        if unknown:
            raise LookaheadError(f"Unknown statistics {sorted(unknown)}: expected {sorted(names)}.")
        kept = {k: v for k, v in data.items() if k in names}
        kept["histogram"] = {int(k): v for k, v in kept.get("histogram", {}).items()}
        return cls(**kept)

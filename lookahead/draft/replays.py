"""What it costs that a linear draft is cut short: the next pass replays its accepted tokens (`runtime.linear`)::

    | replayed ... | root | draft ... |

A draft that is kept whole costs nothing beside its pass, so the cost is charged by the chance that it is cut short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FADE = 0.95  # of what drafts caused to be replayed, from drafted pass to drafted pass
_STEP = 0.2  # of a smoothed share, that one pass moves it
_NODES = 16  # a replayed token costs what one more node does in passes over up to so many


@dataclass(frozen=True, slots=True)
class Cut:
    """What it costs if a pass's draft is cut short: ``token_ms`` for each token that it has kept, and ``again_ms``
    besides, because tokens that the pass replays itself are replayed once more."""

    token_ms: float
    again_ms: float

    def cost(self, expected: float, whole: float, nodes: int) -> float:
        """On average, for a draft of which ``expected`` of ``nodes`` are written, the root included, and all with the
        chance ``whole``."""
        return self.token_ms * max(0.0, expected - whole * nodes) + self.again_ms * (1.0 - whole)


class Replays:
    """How often drafts were cut short of late, how much was replayed, and whether the next pass drafted again."""

    def __init__(self) -> None:
        self._drafts, self._cuts, self._tokens = 1.0, 0.0, 0.0
        self._alone = 0.0  # share of replays behind which nothing was drafted

    def observe(self, width: int, replayed: int, waiting: int) -> None:
        """Take in a pass over ``width`` nodes behind ``replayed`` tokens, after which so many wait for their replay."""
        if replayed:
            self._alone += _STEP * ((width == 1) - self._alone)
        if width > 1:
            self._drafts = _FADE * self._drafts + 1.0
            self._cuts = _FADE * self._cuts + (waiting > 0)
            self._tokens = _FADE * self._tokens + waiting

    def cut(self, curve: Sequence[float], replayed: int) -> Cut:
        """What a cut costs in a pass that replays so many tokens; ``curve`` has the costs of 1, 2, ... nodes."""
        last = min(len(curve) - 1, _NODES)
        token_ms = max(0.0, curve[last] - curve[1]) / (last - 1) if last > 1 else 0.0
        # Where one token alone takes another kernel than several, a replay costs that much if nothing comes behind it.
        again_ms = curve[replayed] - curve[0] if replayed else self._alone * (curve[min(1, last)] - curve[0])
        return Cut(token_ms, max(0.0, again_ms))

    def mean_ms(self, cut: Cut) -> float:
        """What the cuts of late cost a draft."""
        return (cut.token_ms * self._tokens + cut.again_ms * self._cuts) / self._drafts

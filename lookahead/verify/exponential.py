"""Lines of exponential noise as torch draws them: on a CPU in C, in a tenth of the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from lookahead import _native
from lookahead.runtime.cuda_graphs.capture import undisturbed
from lookahead.runtime.scores import on_host, send


@dataclass(frozen=True, slots=True)
class NoiseLine:
    """The noise of one index."""

    noise: Tensor  # [batch, vocab]
    state: Tensor  # of the generator behind it
    view: memoryview | None  # the noise for C; None on a device


@dataclass(frozen=True, slots=True)
class NoiseAt:
    """The noise at some places."""

    lines: Mapping[int, NoiseLine]  # by index
    places: Sequence[tuple[int, int]]  # row and index of each

    def all(self) -> Tensor:
        """That of the whole vocabulary, ``[place, vocab]``."""
        line, *others = self.lines.values()
        if not others and [row for row, _ in self.places] == list(range(len(line.noise))):
            return line.noise
        if len(self.places) <= 2 * len(self.lines):
            return torch.stack([self.lines[index].noise[row] for row, index in self.places])
        known, rows = self._known()
        return known[rows]

    def of(self, tokens: Tensor) -> Tensor:
        """That of tokens ``[place, n]``."""
        if len(self.places) <= 2 * len(self.lines):
            return self.all().gather(1, tokens)
        known, rows = self._known()
        return known[rows[:, None], tokens]

    def _known(self) -> tuple[Tensor, Tensor]:
        """The noise of all rows and lines, and where in it each place is."""
        known = torch.cat([line.noise for line in self.lines.values()])
        first = {index: at * (len(known) // len(self.lines)) for at, index in enumerate(self.lines)}
        return known, send([first[index] + row for row, index in self.places], known.device)


def draw(count: int, batch: int, vocab: int, generator: torch.Generator) -> list[NoiseLine]:
    """The next lines, in float32 on the device of ``generator``, which moves on as by ``exponential_`` for each."""
    if count > 0 and on_host(generator.device) and draws_in_c():
        return _draw_in_c(count, batch, vocab, generator)
    lines = []
    for _ in range(count):
        noise = torch.empty((batch, vocab), dtype=torch.float32, device=generator.device)
        undisturbed(partial(noise.exponential_, generator=generator))
        view = noise.numpy().data if on_host(noise.device) else None
        lines.append(NoiseLine(noise, generator.get_state(), view))
    return lines


def _draw_in_c(count: int, batch: int, vocab: int, generator: torch.Generator) -> list[NoiseLine]:
    state = generator.get_state().numpy()
    states, noise = np.empty((count + 1, len(state)), np.uint8), np.empty((count * batch, vocab), np.float32)
    states[0] = state
    _native.speedups.exponential(states.data, noise.data)
    lines = []
    for at in range(count):
        line = noise[at * batch : (at + 1) * batch]
        lines.append(NoiseLine(torch.from_numpy(line), torch.from_numpy(states[at + 1]), line.data))
    generator.set_state(lines[-1].state)
    return lines


def draws_in_c() -> bool:
    """True if C is built, and draws what this torch draws."""
    return _native.speedups is not None and _is_alike()


@cache
def _is_alike() -> bool:
    """Twice, the second time from the middle of a generator's numbers."""
    ours, theirs = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for vocab in (5, 1001):
        expected = torch.empty((1, vocab), dtype=torch.float32, device="cpu").exponential_(generator=theirs)
        try:
            (line,) = _draw_in_c(1, 1, vocab, ours)
        except ValueError:  # another torch may keep its generators in another way
            return False
        if not line.noise.equal(expected) or not line.state.equal(theirs.get_state()):
            return False
    return True

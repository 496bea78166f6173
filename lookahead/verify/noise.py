"""The random numbers of a sampled call, which each sequence reads at its own pace: lines of exponential noise as torch
draws them, on a CPU in C, in a tenth of the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from jacobi import Step
from lookahead import _native
from lookahead.runtime.cuda_graphs.capture import undisturbed
from lookahead.runtime.scores import on_host, send
from lookahead.verify.sequences import Sequences

# Indices that a sequence may lead the slowest by: each keeps a [batch, vocab] noise alive, so bytes are limited too.
_MOST_LEAD = 32
_MOST_BYTES = 64 << 20
_MOST_AHEAD = 4  # tokens beyond twice the depth of the last drafts
_AT_ONCE = 8  # lines that are drawn for drafts together, where they cost less than asking for each
_BYTES_AT_ONCE = 4 << 20  # of noise that drafts may have drawn, or a pass brings to the host for the next ones


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


class Noise:
    """Exponential noise ``[batch, vocab]`` for each written index, as plain decoding draws it.

    torch draws ``multinomial(p, 1)`` as ``argmax(p / noise)``, for a whole batch at once. Each sequence reads its own
    line of the same noise, so texts and the generator's final state are plain decoding's::

        index         0    1    2    3
        sequence 0    read read read next       noise 0 is forgotten, 1 and 2 wait for sequence 1
        sequence 1    read next

    Lines may be drawn ahead of what is written. Whenever anybody else may look, the generator is where plain decoding
    would have left it (:meth:`settle`); if somebody else has drawn since, lines that nobody has read are drawn again.
    It is the device's own generator, where none is given.
    """

    def __init__(self, sequences: Sequences, generator: torch.Generator | None = None) -> None:
        self._sequences = sequences
        self._generator = generator or _generator(sequences.device)
        self._kept: dict[int, NoiseLine] = {}
        self._drawn = 0
        self._told: dict[int, np.ndarray] = {}  # lines of a device that have been brought to the host, by index
        self._brought = range(0)  # indices of those on their way
        self._vocab = 0  # tokens of a line, once that is known
        self._bytes_each = 1  # of one index's noise, likewise
        self._states: dict[int, Tensor] = {}  # the generator's state after a line, where lines were drawn ahead
        self._left: Tensor | None = None  # the state in which the generator was left, maybe before lines drawn already
        self._shared = False  # with a streamer that has drawn, and may again behind each token
        self.keeps_states = False  # it may have to stand behind a line that the longest sequence is past
        self._drafting_ms = self._choosing_ms = 0.0  # what drawing took in the pass

    def at(self, places: Sequence[tuple[int, int]], vocab: int, ahead: bool = False) -> NoiseAt:
        """The noise for tokens ``(row, index)``; ``ahead``: not all of them may be written."""
        self._draw(1 + max(index for _, index in places), ahead, vocab)
        return NoiseAt({index: self._kept[index] for _, index in places}, places)

    def _draw(self, count: int, ahead: bool, vocab: int) -> None:
        """Have the noise of the first ``count`` tokens; ``ahead``: not all of them may be written."""
        self._vocab, self._bytes_each = vocab, 4 * self._sequences.batch * vocab
        self._resume()
        if count <= self._drawn:
            return
        keeps, begin = ahead or self.keeps_states, perf_counter()
        if keeps:
            self._states[self._drawn - 1] = self._generator.get_state()
        for line in draw(count - self._drawn, self._sequences.batch, vocab, self._generator):
            self._kept[self._drawn] = line
            if keeps:
                self._states[self._drawn] = line.state
            self._drawn += 1
        self._choosing_ms += 1e3 * (perf_counter() - begin)

    def line(self, row: int, index: int) -> np.ndarray | None:
        """One sequence's noise ``[vocab]`` for a token that is still to be written, for whoever drafts it; None where
        it is not known on the host, so far ahead that it is not drawn yet, or likely to be drawn again."""
        if self._shared and index > self._sequences.longest:
            return None
        if not self._vocab or not on_host(self._generator.device):
            told = self._told.get(index)
            return None if told is None else told[row]
        if self._drawn <= index < self.limit():
            begin, before_ms = perf_counter(), self._choosing_ms
            more = min(_AT_ONCE, _BYTES_AT_ONCE // self._bytes_each) if draws_in_c() else 1
            self._draw(max(index + 1, min(index + more, self.limit())), True, self._vocab)
            self.settle()
            self._drafting_ms, self._choosing_ms = self._drafting_ms + 1e3 * (perf_counter() - begin), before_ms
        known = self._kept.get(index)  # None where only a finished sequence asks
        return None if known is None else known.noise[row].numpy()

    def views(self, index: int, vocab: int) -> list[memoryview | None]:
        """Memory that C reads: the line of a token that is to be written now, and those drawn behind it."""
        self._draw(index + 1, False, vocab)
        return [self._kept[each].view for each in range(index, self._drawn)]

    def bring(self, depth: int) -> Tensor:
        """On a device, the noise that drafts of the next pass may ask for, int32 ``[index, batch, vocab]``, for
        :meth:`told`: of indices that have not been brought yet, as many as a pass may bring. ``depth`` is that of the
        last drafts, and lines as far as they could reach have been drawn."""
        first = max([self._sequences.longest + 1, *(index + 1 for index in self._told)])
        most = first + _BYTES_AT_ONCE // self._bytes_each
        last = min(self._sequences.longest + 2 * depth + _MOST_AHEAD, self.limit(), most)
        if first < last:
            self._draw(last, True, self._vocab)
        self._brought = range(first, last)
        nothing = torch.empty((0, self._vocab), device=self._generator.device)
        lines = torch.cat([nothing, *(self._kept[index].noise for index in self._brought)])
        return lines.view(torch.int32).unflatten(0, (len(self._brought), self._sequences.batch))

    def told(self, brought: np.ndarray) -> None:
        """Take in what :meth:`bring` gave, once it has come to the host."""
        if self._brought:
            self._told.update(zip(self._brought, brought.view(np.float32), strict=True))
            self._brought = range(0)

    def reachable(self, row: int, depth: int) -> int:
        """The index of the token that a node at ``depth`` decides; of one that cannot be reached now, any other."""
        least = self._sequences.slowest()
        return min(max(least, self.limit() - 1), max(least, len(self._sequences.written[row]) + depth))

    def settle(self) -> None:
        """Leave the generator where plain decoding would have, which draws no line ahead."""
        last = self._sequences.longest - 1
        if last in self._states and not self.is_stale():
            self.stand(last)

    def stand(self, index: int) -> None:
        """Leave the generator behind the line of a token, if its state there is still known."""
        if index in self._states:
            self._left = self._states[index]
            self._generator.set_state(self._left)

    def renew(self) -> bool:
        """Forget the lines that were drawn ahead, if the streamer has drawn since :meth:`settle`; whether it has."""
        if not self.is_stale():
            return False
        self._shared = True
        self._resume()
        return True

    def is_stale(self) -> bool:
        """True if somebody else has drawn since the generator was left."""
        left, now = self._left, self._generator.get_state()
        return left is not None and left.numpy().tobytes() != now.numpy().tobytes()

    def _resume(self) -> None:
        """Go on behind the lines that were drawn ahead, or draw them again."""
        if self._left is None:
            return
        if self.is_stale():
            for index in range(self._sequences.longest, self._drawn):
                del self._kept[index]
                self._told.pop(index, None)
            self._drawn = self._sequences.longest
            self._states = {index: state for index, state in self._states.items() if index < self._drawn - 1}
        else:
            self._generator.set_state(self._states[self._drawn - 1])
        self._left = None

    def begin(self) -> None:
        """A pass is decided about: states behind lines that all sequences have read, and were told of, can go."""
        least = self._sequences.slowest() - 1
        self._states = {index: state for index, state in self._states.items() if index >= least}

    def without(self, step: Step) -> Step:
        """The pass without what drawing took in it: plain decoding draws as much for as many tokens."""
        draft_ms, verify_ms = step.draft_ms - self._drafting_ms, step.verify_ms - self._choosing_ms
        self._drafting_ms = self._choosing_ms = 0.0
        return replace(step, draft_ms=max(0.0, draft_ms), verify_ms=max(0.0, verify_ms))

    def limit(self) -> int:
        """Most tokens that a sequence may have written before it waits for the slowest."""
        most = _MOST_BYTES // self._bytes_each
        return self._sequences.slowest() + max(1, min(_MOST_LEAD, most) if self._sequences.batch > 1 else most)

    def forget(self) -> None:
        """Drop the noise that every unfinished sequence has read."""
        slowest = self._sequences.slowest(self._drawn)
        for index in [index for index in self._kept if index < slowest]:
            del self._kept[index]
            self._told.pop(index, None)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@cache
def is_drawn_by_noise(device: torch.device) -> bool:
    """True if ``multinomial`` draws on this device as :class:`Noise` does; one that this library does not know may not.
    The generator stays as it is."""
    if device.type not in ("cpu", "cuda"):
        return False
    generator = _generator(device)
    before = generator.get_state()
    probabilities = torch.linspace(-3.0, 3.0, 3003, device=device).view(3, -1).sin().mul(4.0).softmax(-1)
    try:
        drawn = torch.multinomial(probabilities, 1).squeeze(1)
        after = generator.get_state()
        generator.set_state(before)
        ours = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
        return drawn.tolist() == ours.tolist() and after.equal(generator.get_state())
    finally:
        generator.set_state(before)

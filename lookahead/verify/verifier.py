"""Which tokens are written: processors, sampling and stopping rules, token by token, exactly as in ``generate``.

How trees are walked is decided once a call. In every mode but lockstep each sequence gets as far as its own tree goes.

=============  ======================================================================================================
``lossy``      The longest path of candidates that a rule accepts is written, which is no text of ``generate``'s.
``lockstep``   All sequences write token t before any writes t+1, so that a processor, stopping rule or streamer of the
               caller's sees the batch as plain ``generate`` shows it. Sequences whose tree goes further wait.
``in turn``    One sequence after the other draws, as the rejection scheme does.
``abreast``    All trees are walked together, depth by depth, with one choice for all of them.
=============  ======================================================================================================
"""

import math
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from jacobi import Path, Scores, TokenTree, walk
from lookahead.runtime.scores import fetch
from lookahead.verify.noise import Noise, is_drawn_by_noise
from lookahead.verify.processors import SIMPLE_RULES, not_row_wise
from lookahead.verify.sampler import Place, Sampler, ScoredPass
from lookahead.verify.sequences import Sequences
from lookahead.verify.streams import Stream
from lookahead.verify.typical import accepted

_T = TypeVar("_T")
Procedure = Literal["lossy", "lockstep", "in turn", "abreast"]
Verification = Literal["exact", "rejection"]


class Choice(NamedTuple):
    """Choice that a walk waits for: the tokens at one place of each of several rows of a pass."""

    sampler: Sampler
    now: ScoredPass
    places: Sequence[Place]

    def tokens(self) -> list[int]:
        return self.sampler.choose(self.now, self.places)


Deciding = Generator[Choice, list[int], list[Path]]


def walked(walk: Generator[Choice, list[int], _T]) -> _T:
    """Result of a walk."""
    try:
        choice = next(walk)
        while True:
            choice = walk.send(choice.tokens())
    except StopIteration as end:
        return end.value


def walked_together(walks: Sequence[Generator[Choice, list[int], _T]]) -> list[_T | Exception]:
    """Results of several walks, or the error of each that fails. They go from choice to choice in step, and those
    made alike are made in one computation::

        first sequence, T 0.8     root    node 3    done
        second, T 0.8             root    done
        third, with a penalty     root    node 1    done
        computations                 2         2
    """
    found: dict[int, _T | Exception] = {}
    asked: dict[int, Any] = dict.fromkeys(range(len(walks)))  # what each is told next; None = it begins
    while asked:
        choices: dict[int, Choice] = {}
        for place, told in asked.items():
            try:
                choices[place] = walks[place].send(told)
            except StopIteration as end:
                found[place] = end.value
            except Exception as error:
                found[place] = error
        asked = _chosen(choices, found)
    return [found[place] for place in range(len(walks))]


def _chosen(choices: dict[int, Choice], found: dict[int, _T | Exception]) -> dict[int, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for place, choice in choices.items():
        alike = choice.sampler.alike(choice.now.scores.logits) if len(choice.places) == 1 else None
        groups.setdefault((alone := alike is None, place if alone else alike), []).append(place)
    told: dict[int, list[int]] = {}
    for places in groups.values():
        given = [(each.sampler, each.now, each.places[0]) for each in map(choices.__getitem__, places)]
        together = given[0][0].choose_alike(given) if len(places) > 1 else None
        for at, place in enumerate(places):
            try:
                told[place] = choices[place].tokens() if together is None else [together[at]]
            except Exception as error:
                found[place] = error
    return told


class LengthLimits(Protocol):
    """Limits that the model sets to sequences."""

    def room(self) -> list[int] | None:
        """Largest depth of each sequence's next tree; None = no limit."""

    def holds(self, row: int) -> bool:
        """True if a sequence has to wait for the others."""


class Verifier:
    """Writes what plain decoding would write into ``sequences``, as far as the trees go (a :class:`jacobi.Verifier`).
    Draws are plain decoding's own, or those of :func:`jacobi.reject` (``"rejection"``). Some models can only advance
    all sequences ``in_lockstep``. The ``rule`` of a lossy call (None = exact) gives the tokens that may be accepted,
    bool ``[place, vocab]``, by processed scores of this shape. With ``everywhere`` the drafts are told what would be
    chosen at every node, in place of argmaxes, where that does not depend on the path. ``generator`` is what is drawn
    from; None = the device's own. A ``stream`` that may draw between two tokens, or runs beside something that may, is
    told each token before the next one is chosen."""

    def __init__(
        self,
        sequences: Sequences,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        limits: LengthLimits,
        *,
        verification: Verification,
        in_lockstep: bool = False,
        rule: Callable[[Tensor], Tensor] | None = None,
        everywhere: bool = False,
        generator: torch.Generator | None = None,
        stream: Stream | None = None,
    ) -> None:
        kinds = {type(each) for each in criteria}
        # Without an end token finished sequences write real tokens until the last one is done.
        end_together = sequences.pads or kinds <= {MaxLengthCriteria}
        watched = bool(not_row_wise(processors, criteria))
        sample = bool(config.do_sample) and rule is None
        own_draws = sample and verification != "exact"
        disturbed = stream is not None and stream.may_draw
        by_turns = sample and not own_draws and (disturbed or not is_drawn_by_noise(sequences.device))
        timed = MaxTimeCriteria in kinds
        in_lockstep |= watched or not end_together or by_turns or (timed and sequences.keep_up)
        lockstep = sequences.batch > 1 and in_lockstep and rule is None
        sequences.stay |= lockstep
        self._sampler = Sampler(
            sequences, processors, config, sample, own_draws, lockstep, watched, everywhere, generator
        )
        self._sequences, self._criteria, self._limits, self._rule = sequences, criteria, limits, rule
        tells = stream is not None and rule is None and not own_draws and (watched or by_turns)
        self._stream = stream if tells else None
        if stream is not None:
            stream.attach(self.noise, watch=tells)
        self._mode: Procedure = "in turn" if own_draws else "abreast"
        if rule is not None or lockstep:
            self._mode = "lockstep" if lockstep else "lossy"
        self._everywhere = everywhere and rule is None
        # Where sequences get apart, time ends all of them at once, and not each where it stands.
        self._clocks: list[MaxTimeCriteria] = []
        if timed and self._mode == "abreast" and sequences.batch > 1:
            self._clocks = [rule for rule in criteria if type(rule) is MaxTimeCriteria]
            self._criteria = StoppingCriteriaList(rule for rule in criteria if rule not in self._clocks)
        self._simple_rules = {type(each) for each in self._criteria} <= SIMPLE_RULES
        self._passes = 0
        self._most_written: float = math.inf  # tokens that a sequence may have before it waits for the others

    @property
    def done(self) -> bool:
        """Every sequence has ended, and has the same length if they keep up."""
        return all(map(self._sequences.idle, range(self._sequences.batch)))

    def room(self) -> list[int]:
        """Largest depth of each next tree: a node at depth d decides token d+1 after the root, which must still fit."""
        sequences = self._sequences
        left = [sequences.most_new - len(written) - 1 for written in sequences.written]
        rooms = [max(0, min(pair)) for pair in zip(left, self._limits.room() or left, strict=True)]
        for row, done in enumerate(sequences.finished):
            if done and self._mode != "lockstep":  # it only has to catch up with the longest
                rooms[row] = min(rooms[row], max(0, sequences.behind(row) - 1))
        return rooms

    def look(self, trees: Sequence[TokenTree], logits: Tensor) -> tuple[Tensor, ...]:
        """The choices at all nodes where they are made on the device, and noise for the next drafts."""
        with self._settled():
            return self._sampler.look(trees, logits) if self._rule is None else ()

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        """Write what the model would have written, as far as the trees go."""
        return walked(self.deciding(trees, scores))

    def deciding(self, trees: Sequence[TokenTree], scores: Scores) -> Deciding:
        """:meth:`decide`, which stops wherever tokens have to be chosen, so that several can be in step."""
        self._passes += 1
        now = ScoredPass(self._passes, trees, scores, [Path() for _ in trees])
        with self._settled():
            if self._everywhere and not scores.beside:
                scores.beside = tuple(map(fetch, self._sampler.look(trees, scores.logits)))
            yield from self._decide(now)
        if self._everywhere and scores.beside:
            scores.greedy = scores.beside[0][:, :, 0].tolist()
        return now.paths

    @contextmanager
    def _settled(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.noise is not None:
                self.noise.settle()

    def _decide(self, now: ScoredPass) -> Generator[Choice, list[int], None]:
        if self._mode == "lockstep":
            yield from self._walk(now, range(len(now.trees)))
            return
        finished, noise = list(self._sequences.finished), self.noise
        if noise is not None:
            noise.begin()
        self._most_written = math.inf if noise is None else noise.limit()
        if self._sequences.in_step:
            self._most_written = 1 + self._sequences.slowest()
        going = [row for row, done in enumerate(finished) if not done and not self._waits(row)]
        if self._rule is not None:
            end_tokens = self._sequences.end_tokens
            for row, decided in accepted(now, going, self._sampler, self._rule, end_tokens).items():
                for node, token, scores, logits in decided:
                    self._sampler.records.note(row, len(self._sequences.written[row]), scores, logits)
                    self._write(now, [(row, node)], [token])
                    if self._sequences.finished[row]:
                        break
        else:
            for rows in ([row] for row in going) if self._mode == "in turn" else [going]:
                yield from self._walk(now, rows)
        for row in (row for row, done in enumerate(finished) if done and self._sequences.behind(row)):
            self._pad(now, row)
        if self._clocks and self._sequences.slowest():
            nothing = torch.zeros((1, 1), dtype=torch.long)  # on the host, where a clock need not be waited for
            if any(bool(clock(nothing, None)) for clock in self._clocks):
                self._sequences.cut(now.paths)
        if noise is not None:
            noise.forget()

    def choices(self, trees: Sequence[TokenTree], logits: Tensor, depths: Sequence[int]) -> Tensor | None:
        """Choices at all nodes, int32 ``[batch, node, 2]``: tokens, and whether scores gave probabilities; None
        once all sequences have ended. The trees are parts of others of these ``depths``, as deep as texts may go on."""
        with self._settled():
            found = self._sampler.look(trees, logits, depths)
        return found[0] if found else None

    @property
    def chooses(self) -> bool:
        """True if tokens are chosen from processed scores; if not, they are the argmax."""
        return not self._sampler.is_argmax

    def why_not_ahead(self) -> str | None:
        """Why what is chosen at a node is not known before the walk comes there; None = it is."""
        if self._sampler.records:
            return "scores or logits are asked for, which no rank has all of"
        ahead = self._sampler.is_argmax or self._sampler.looks
        return None if ahead else "a processor or stopping rule may look at more"

    @property
    def noise(self) -> Noise | None:
        """Noise that sequences draw from; None where they do not draw, or not by noise that can be known before."""
        return self._sampler.noise

    def recorded(self, kind: Literal["scores", "logits"]) -> tuple[Tensor, ...] | None:
        """Scores or logits as ``generate`` returns them, handed out once; None if not asked for."""
        return self._sampler.records.of(kind, take=True)

    def _walk(self, now: ScoredPass, rows: Sequence[int]) -> Generator[Choice, list[int], None]:
        """:func:`jacobi.walk` several trees, depth by depth: one choice for all of them, then the stopping rules."""
        nodes, finished = dict.fromkeys(rows, 0), self._sequences.finished
        while nodes:
            places = list(nodes.items())
            tokens = yield Choice(self._sampler, now, places)
            self._write(now, places, tokens)
            nodes = {}
            for (row, node), token in zip(places, tokens, strict=True):
                child = now.trees[row].children[node].get(token)
                if child is None or all(finished):
                    continue
                if self._mode == "lockstep" or not (finished[row] or self._waits(row)):
                    nodes[row] = child
            if self._mode == "lockstep" and len(nodes) < len(places):
                return

    def _pad(self, now: ScoredPass, row: int) -> None:
        written, longest = self._sequences.written[row], self._sequences.longest

        def choose(node: int) -> int:
            if self._sampler.records:
                self._sampler.processed(now, [(row, node)])
            return self._sequences.pad

        def stop(token: int) -> bool:
            written.append(token)
            return len(written) >= longest

        now.paths[row] = walk(now.trees[row], choose, stop)

    def _waits(self, row: int) -> bool:
        """True if a sequence has to wait for the others: for the model's sake, in step, or sampled and far ahead."""
        return self._limits.holds(row) or len(self._sequences.written[row]) >= self._most_written

    def _write(self, now: ScoredPass, places: Sequence[Place], tokens: Sequence[int]) -> None:
        sequences = self._sequences
        for (row, node), token in zip(places, tokens, strict=True):
            now.paths[row].nodes.append(node)
            now.paths[row].tokens.append(token)
            sequences.written[row].append(token)
        if self._mode == "lockstep":
            done = self._criteria(sequences.prefixes(), self._sampler.records.of("scores"))
            flags = torch.as_tensor(done).expand(sequences.batch).tolist()
            ended = [row for row, flag in enumerate(flags) if flag and not sequences.finished[row]]
        else:
            ended = [row for (row, _), token in zip(places, tokens, strict=True) if self._ends(row, token)]
        for row in ended:
            sequences.finish(row)
        if self._stream is not None and self._stream.step():  # which puts what has just been written
            now.forget()

    def _ends(self, row: int, token: int) -> bool:
        sequences = self._sequences
        if self._simple_rules:
            return token in sequences.end_tokens or len(sequences.written[row]) >= sequences.most_new
        return bool(self._criteria(sequences.texts([row]), self._sampler.records.scores_of(row)))

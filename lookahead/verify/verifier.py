"""Which tokens are written: processors, sampling and stopping rules, token by token, exactly as in ``generate``."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from jacobi import Path, Scores, TokenTree, walk
from lookahead.verify.processors import SIMPLE_RULES
from lookahead.verify.sampler import Pass, Sampler
from lookahead.verify.sequences import Sequences


class Limits(Protocol):
    """How far the model lets sequences go."""

    def room(self) -> list[int] | None:
        """How deep each sequence's next tree may be; None = no limit."""

    def holds(self, row: int) -> bool:
        """Whether a sequence has to wait for the others."""


class Verifier:
    """Writes the tokens that plain decoding would write, as far as the trees go (implements :class:`jacobi.Verifier`).

    Args:
        sequences: what is written into.
        criteria: as ``generate`` prepared them.
        limits: how far the model lets sequences go.
        sampler: chooses the tokens; whether it is asked in lockstep decides how the trees are walked.
    """

    def __init__(self, sequences: Sequences, criteria: StoppingCriteriaList, limits: Limits, sampler: Sampler) -> None:
        self._sequences = sequences
        self._criteria = criteria
        self._limits = limits
        self._sampler = sampler
        self._lockstep = sampler.lockstep
        self._simple_rules = {type(rule) for rule in criteria} <= SIMPLE_RULES
        self._passes = 0
        self._most_written: float = math.inf  # tokens that a sequence may have before it waits for the others

    @property
    def done(self) -> bool:
        """Every sequence has ended, and has the same length if they keep up."""
        return all(map(self._sequences.idle, range(self._sequences.batch)))

    def room(self) -> list[int]:
        """How deep each next tree may be: a node at depth d decides token d+1 after the root, which must still fit."""
        sequences = self._sequences
        left = [sequences.most_new - len(written) - 1 for written in sequences.written]
        rooms = [max(0, min(pair)) for pair in zip(left, self._limits.room() or left, strict=True)]
        if self._lockstep:
            return rooms
        finished = [row for row, done in enumerate(sequences.finished) if done]
        for row in finished:  # it only has to catch up with the longest
            rooms[row] = min(rooms[row], max(0, sequences.behind(row) - 1))
        return rooms

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        """Write what the model would have written, as far as the trees go."""
        self._passes += 1
        now = Pass(self._passes, trees, scores, [Path() for _ in trees])
        if self._lockstep:
            self._walk(now, range(len(trees)))
            return now.paths
        finished = list(self._sequences.finished)
        noise = self._sampler.noise
        self._most_written = math.inf if noise is None else noise.limit()
        self._write(now, [row for row, done in enumerate(finished) if not done and not self._waits(row)])
        for row in (row for row, done in enumerate(finished) if done and self._sequences.behind(row)):
            self._pad(now, row)
        if noise is not None:
            noise.forget()
        return now.paths

    def recorded(self, kind: Literal["scores", "logits"]) -> tuple[Tensor, ...] | None:
        """Scores or logits as ``generate`` returns them, ``[batch, vocab]`` for each index; None if not asked for."""
        return self._sampler.records.of(kind)

    def _write(self, now: Pass, rows: Sequence[int]) -> None:
        """Let unfinished sequences write, each at its own pace."""
        if self._sampler.is_argmax:
            for row in rows:
                self._follow_argmax(now, row)
        elif self._sampler.rejection:  # which draws for one sequence after the other
            for row in rows:
                self._walk(now, [row])
        else:
            self._walk(now, rows)

    def _follow_argmax(self, now: Pass, row: int) -> None:
        greedy, written = now.scores.greedy[row], self._sequences.written[row]

        def choose(node: int) -> int:
            self._sampler.check_finite(now, [(row, node)])
            return greedy[node]

        def stop(token: int) -> bool:
            written.append(token)
            if self._ends(row, token):
                self._sequences.finish(row)
            return self._sequences.finished[row] or self._waits(row)

        now.paths[row] = walk(now.trees[row], choose if now.scores.broken else greedy.__getitem__, stop)

    def _walk(self, now: Pass, rows: Sequence[int]) -> None:
        """Walk several trees depth by depth: one choice for all of them, then the stopping rules."""
        sequences = self._sequences
        nodes = dict.fromkeys(rows, 0)
        while nodes:
            places = list(nodes.items())
            tokens = self._sampler.choose(now, places)
            if self._lockstep and sequences.pads:
                tokens = [sequences.pad if sequences.finished[row] else token for row, token in enumerate(tokens)]
            for (row, node), token in zip(places, tokens, strict=True):
                now.paths[row].nodes.append(node)
                now.paths[row].tokens.append(token)
                sequences.written[row].append(token)
            self._stop(list(nodes), tokens)
            found = [
                (row, now.trees[row].children[node].get(token))
                for (row, node), token in zip(places, tokens, strict=True)
            ]
            nodes = {row: child for row, child in found if child is not None and not self._rests(row)}
            if self._lockstep and len(nodes) < sequences.batch:
                return

    def _rests(self, row: int) -> bool:
        """Whether a sequence goes no further in this pass, whatever its tree says."""
        if self._lockstep:
            return all(self._sequences.finished)
        return self._sequences.finished[row] or self._waits(row)

    def _waits(self, row: int) -> bool:
        """Whether a sequence has to wait for the others: for the model's sake, or sampled and far in the lead."""
        return self._limits.holds(row) or len(self._sequences.written[row]) >= self._most_written

    def _pad(self, now: Pass, row: int) -> None:
        """Let a finished sequence catch up with the longest."""
        written, longest = self._sequences.written[row], self._sequences.longest

        def choose(node: int) -> int:
            if self._sampler.records:
                self._sampler.look(now, [(row, node)])
            return self._sequences.pad

        def stop(token: int) -> bool:
            written.append(token)
            return len(written) >= longest

        now.paths[row] = walk(now.trees[row], choose, stop)

    def _stop(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Finish the sequences that end with the tokens they have just written."""
        sequences = self._sequences
        if not self._lockstep:
            ended = [row for row, token in zip(rows, tokens, strict=True) if self._ends(row, token)]
        else:
            done = self._criteria(sequences.prefixes(), self._sampler.records.of("scores"))
            flags = torch.as_tensor(done).expand(len(rows)).tolist()
            ended = [row for row, flag in enumerate(flags) if flag and not sequences.finished[row]]
        for row in ended:
            sequences.finish(row)

    def _ends(self, row: int, token: int) -> bool:
        """Whether a sequence ends with the token it has just written."""
        sequences = self._sequences
        if self._simple_rules:
            return token in sequences.end_tokens or len(sequences.written[row]) >= sequences.most_new
        done = self._criteria(sequences.prefix(row), self._sampler.records.scores_of(row))
        return bool(done.item() if isinstance(done, Tensor) else done)

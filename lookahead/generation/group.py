"""The group of one call: its sequences, what decides them and drafts for them, and who is told of their passes."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from jacobi import Drafter, Path, PlainDrafter, Step, Successors, TokenTree
from jacobi.loop import RowGroup
from lookahead import _native
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.draft.strategy import Stats
from lookahead.generation.output import decoded
from lookahead.generation.plan import Plan
from lookahead.generation.watch import Watcher, record
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.tree import TreeModel
from lookahead.sources.perturbed import Draw
from lookahead.stats import DecodingStats
from lookahead.verify.processors import warp_of
from lookahead.verify.sequences import Sequences
from lookahead.verify.streams import Stream
from lookahead.verify.verifier import LengthLimits, Verifier


class CallGroup(RowGroup):
    """The sequences of one call while they are written: all rows of ``generate``'s, or the one of a served request.
    ``limits`` are those of the passes, ``ends`` is closed when the call is over, and ``generator`` is what is drawn
    from (None = the device's own). ``in_turn``: a streamer that may draw is told each token before the next one."""

    def __init__(
        self,
        plan: Plan,
        sequences: Sequences,
        limits: LengthLimits,
        ends: ExitStack,
        *,
        generator: torch.Generator | None = None,
        in_turn: bool = True,
    ) -> None:
        call, strategy = plan.call, plan.strategy
        self.plan, self.sequences, self.ends = plan, sequences, ends
        self.drafts = Drafts([PlainDrafter() for _ in range(sequences.batch)])
        detail: Stats = "summary" if strategy is None else strategy.stats
        self.stats = None if detail == "none" else DecodingStats()
        self._detailed = detail == "detailed"
        self._stream = None if call.streamer is None else Stream(call.streamer, sequences)
        self._watcher: Watcher | None = None
        self._waits = False  # who watches is told of the prompt's pass before the stream
        self._numbers = count()  # of passes
        self._seen = [0] * sequences.batch  # tokens, before the pass seen last
        self._uncounted: tuple[Step, list[list[int]]] | None = None  # the pass seen last, and what it wrote
        self.verifier: Verifier = Verifier(
            sequences,
            call.processors,
            call.criteria,
            call.config,
            limits,
            verification="exact" if strategy is None else strategy.verification,
            in_lockstep=plan.route == "chain",
            rule=plan.rule,
            everywhere=plan.wants.choices,
            generator=generator,
            stream=self._stream if in_turn else None,
        )
        super().__init__(self.drafts.drafters, self.verifier)

    def context(self, memory: Memory, model: TreeModel | LinearModel, curve: Callable[[], StepTimes]) -> CallContext:
        """What the strategy may know of the call; ``curve`` finds the latency curve of passes as they are run now."""
        _native.warn_if_missing()
        call, strategy, noise, sequences = self.plan.call, self.plan.strategy, self.verifier.noise, self.sequences
        assert strategy is not None  # who asks has one
        vocab_size, linear = call.traits.vocab_size, self.plan.route == "chain"
        pad = sequences.pad if 0 <= sequences.pad < vocab_size else 0  # drafts must be tokens that the model can be fed
        warp, seed = warp_of(call.processors), strategy.seed
        chance = Draw(lambda index: None, **warp) if strategy.draws_candidates and call.config.do_sample else None
        rows = []
        for index, prompt in enumerate(call.prompts()):
            draw = None if noise is None else Draw(partial(noise.line, index), **warp)
            rng = random.Random(None if seed is None else seed + index)
            rows.append(RowContext(prompt, vocab_size, pad, sequences.end_tokens, rng, index, linear, draw, chance))
        return CallContext(
            model=call.model,
            rows=rows,
            memory=memory,
            choice=call.choice,
            new_tokens=self.plan.new_tokens,
            trust=call.trust(sees_noise=noise is not None),
            limits=model,
            curve=curve,
            closing=self.ends.callback,
            hidden=model.hidden,
            sources=[each.lookahead_source for each in call.processors if hasattr(each, "lookahead_source")],
        )

    def begin(self, drafts: Drafts | None, watcher: Watcher | None) -> None:
        """Draft with ``drafts`` (None = nothing), and tell ``watcher`` (None = nobody) of every pass."""
        self.drafts, sequences = drafts or self.drafts, self.sequences
        each, depths, vocab_size = self.drafts.drafters, [0] * sequences.batch, self.plan.call.traits.vocab_size
        self.drafters = [WhileWriting(one, row, sequences, depths, vocab_size) for row, one in enumerate(each)]
        self._watcher, self._waits = watcher, watcher is not None

    def see(self, step: Step) -> None:
        """Take in a pass, and tell of it whoever watches."""
        before, self._seen = self._seen, self.sequences.lengths()
        lines = zip(self.sequences.written, before, self._seen, strict=True)
        written = [line[then:now] for line, then, now in lines]
        self._uncounted, self._waits = (step, written), False
        if self._watcher is not None:
            self._watcher(record(next(self._numbers), self.drafts.drafters, step, written))

    def catch_up(self) -> None:
        """Stream, count and learn what no draft waits for."""
        self._tell()
        self.drafts.catch_up()

    def _tell(self) -> None:
        """Put tokens into the stream, and count the pass seen last."""
        if self._stream is not None and not self._waits:
            self._stream.flush()
        seen, self._uncounted = self._uncounted, None
        if seen is not None and self.stats is not None:
            self.stats.count(seen[0], list(map(len, seen[1])), first=not self.stats.steps, detailed=self._detailed)

    def output(self, store: Callable[[Cache], None]) -> Any:
        """What ``generate`` returns; ``store`` leaves the group's keys and values in a cache."""
        call, stats, strategy = self.plan.call, self.stats, self.plan.strategy
        self._tell()
        if self._stream is not None:
            self._stream.close()
        bits = self.plan.bits.after(call.model, None if strategy is None else strategy.repeatable)
        self.drafts.catch_up()
        if stats is not None:
            credited, by_noise = self.drafts.credits()
            stats.add(sources=credited, by_noise=by_noise)
            stats.bits = {bits.keeps or bits.reason or "": 1}
        if call.exports_cache:
            store(call.cache)
        return decoded(call, self.sequences, self.verifier, self.drafts.drafters, stats)


@dataclass(eq=False)
class WhileWriting:
    """A sequence's drafter while it writes; once it has ended, pad tokens as deep as the other sequences' trees.
    ``depths`` are those of all sequences' last trees; the call's drafters share it. Where a model scores more tokens
    than the ``vocab_size`` that it can be fed, the drafter hears nothing of the others."""

    drafter: Drafter
    row: int
    sequences: Sequences
    depths: list[int]
    vocab_size: int
    writes: bool = True

    def draft(self, room: int) -> TokenTree:
        sequences = self.sequences
        self.writes = not sequences.finished[self.row]
        if not self.writes:
            self.depths[self.row] = 0
            depth = room if all(sequences.finished) else min(room, max(self.depths))
            return TokenTree.chain(sequences.written[self.row][-1], [sequences.pad] * depth)
        tree = self.drafter.draft(room)
        self.depths[self.row] = max(tree.depths)
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Let the drafter take a pass in, if the sequence wrote when its tree was drafted."""
        if not self.writes:
            return
        if max(greedy) >= self.vocab_size:
            greedy = [token if token < self.vocab_size else 0 for token in greedy]
        self.drafter.learn(tree, greedy, path, successors and _fed(successors, self.vocab_size))


def _fed(successors: Successors, vocab_size: int) -> Successors:
    """The same, with tokens that the model cannot be fed told as excluded ones, after all others."""
    if successors.tokens.max(initial=0) < vocab_size:
        return successors
    known = successors.tokens < vocab_size
    order = np.argsort(~known, axis=1, kind="stable")
    tokens, logits = np.where(known, successors.tokens, 0), np.where(known, successors.logits, -np.inf)
    return Successors(np.take_along_axis(tokens, order, 1), np.take_along_axis(logits, order, 1).astype(np.float32))

"""The passes that several sequences share, which come and go between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from jacobi import Path, Scores, TokenTree
from lookahead._heap import hand_back
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory
from lookahead.generation.curves import step_times
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import grouped_attention
from lookahead.runtime.cache.tree import empty_cache
from lookahead.runtime.executor import EagerExecutor
from lookahead.runtime.experts import expert_kernels
from lookahead.runtime.forward import Prompt, TreeForward
from lookahead.runtime.layout import Layout
from lookahead.runtime.packing import packed_weights
from lookahead.runtime.packing_schedule import PackingSchedule
from lookahead.runtime.scores import Look, on_host, started
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import TraceSchedule, traces_for
from lookahead.runtime.tree import TreeModel

# Nobody knows how long a scheduler will go on: as long again as it has, say the schedules of traces and of packing.
_NEW_TOKENS, _WRITTEN = 2, 1


class SharedPasses:
    """Passes over the sequences that are here now, each with its part of one KV cache.

    A sequence that has read its prompt by itself joins with its keys and values; the pass's trees are in the order of
    the rows. Where one leaves, the last one takes its place::

        rows    a  b  c         join(d)    a  b  c  d        drop(1)    a  d  c

    Args:
        most: rows that there may be at a time.
        traces, pack: whether passes on a CPU may be traced, and run on packed weights.
        renewed: is told the milliseconds that a change of passes took.
    """

    again = replayed = 0
    replays = False
    repeated: int | None = None
    in_a_row = 0
    hidden = None

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        most: int,
        *,
        traces: bool,
        pack: bool,
        renewed: Callable[[float], None],
    ) -> None:
        self._model, self._traits, self._most, self._renewed = model, traits, most, renewed
        on_cpu = traits.device.type == "cpu"
        self._traced, self._packs = traces and on_cpu, pack and on_cpu
        self._layout = _empty_layout(self._traits)
        self._forward: TreeForward | None = None
        self._executor: EagerExecutor | None = None
        self._tracing: TraceSchedule | None = None
        self._packing: PackingSchedule | None = None

    def __len__(self) -> int:
        return len(self._layout.positions)

    @contextmanager
    def running(self) -> Iterator[None]:
        """For passes: attention and experts as trees want them."""
        with grouped_attention(), expert_kernels():
            yield

    def join(self, view: TreeModel) -> None:
        """Take over the one sequence of a model that has read its prompt, as the last row."""
        first = not len(self)
        self._layout.join(view.forward_pass.layout, self._most)
        if first:
            ids = torch.zeros((1, 1), dtype=torch.long, device=self._traits.device)
            prompt = Prompt(ids, GenerationConfig(), {}, None, 0)
            self._forward = TreeForward(self._model, self._traits, self._layout, prompt)
            if self._packs:
                packed = packed_weights(self._model)
                if packed is not None:
                    self._forward.use(packed)
                self._packing = PackingSchedule(self._model, self._forward, _NEW_TOKENS, self._renewed)
            traces = traces_for(self._model, (), self._traits, self._forward.packed) if self._traced else None
            self._executor = EagerExecutor(self._forward)
            if traces is not None:
                self._executor = executor = TracedExecutor(traces, self._forward)
                self._tracing = TraceSchedule(self._model, executor, _NEW_TOKENS, self._renewed)
        else:
            view.close()
        self.forward.follow(len(self))

    def drop(self, row: int) -> None:
        """Leave a row out; the last one takes its place."""
        self._layout.drop(row)
        if len(self):
            self.forward.follow(len(self))
        else:
            self.close()

    def close(self) -> None:
        """No sequence is here any more."""
        if self._executor is not None:
            self._executor.close()
        held = sum(buffer.nbytes for buffer in self._layout.cache.buffers if buffer.device.type == "cpu")
        self._layout.cache.close()
        hand_back(held)
        self._layout = _empty_layout(self._traits)
        self._forward = self._executor = self._tracing = self._packing = None

    @property
    def forward(self) -> TreeForward:
        assert self._forward is not None  # there is a row
        return self._forward

    @property
    def executor(self) -> EagerExecutor:
        assert self._executor is not None  # there is a row
        return self._executor

    def curve(self, memory: Memory) -> StepTimes:
        """The latency curve of passes over as many rows as there are, as they are run now."""
        executor = self.executor
        traces = executor.traces if isinstance(executor, TracedExecutor) else None
        how = False, traces, self._traits, False, self.forward.packed is not None
        return step_times(self._model, len(self), memory.times, None, *how)

    def launch(self, trees: Sequence[TokenTree], look: Look | None = None) -> Callable[[], Scores]:
        """Start a pass; what is returned waits for it."""
        best, waits = max(tree.top_k for tree in trees), on_host(self._traits.device)
        return started(lambda: self.executor.run(trees).logits, waits, best, look)

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each row's visited nodes to the end of its part of the KV cache."""
        starts, chosen = list(self._layout.cache.lengths), [path.nodes for path in paths]
        self.executor.keep(chosen)
        self._layout.keep([len(nodes) for nodes in chosen], starts)

    def see(self, nodes: int, forward_ms: float) -> None:
        """Take in a pass over ``nodes`` nodes of all rows: traces and packed weights are made once they pay."""
        if self._packing is not None:
            self._packing.see(nodes, forward_ms, _WRITTEN)
        if self._tracing is not None:
            self._tracing.see(_WRITTEN)

    def store(self, row: int, cache: Any) -> None:
        """Leave a row's keys and values in ``cache`` as plain decoding would have."""
        self._layout.cache.store(cache, row=row)

    def room(self, row: int) -> list[int] | None:
        """How deep a row's tree may be, as a list of one; None = no limit."""
        limits = self._layout.room()
        return None if limits is None else [limits[row]]

    @property
    def context(self) -> int:
        """Tokens in the KV cache, of the longest sequence."""
        return self._layout.cache.base

    @property
    def typical(self) -> bool:
        """Whether the last pass took what passes of its size take."""
        return self.executor.typical

    @property
    def plain_ms(self) -> float | None:
        return self.executor.plain_ms

    def bucket(self, nodes: int) -> int:
        return nodes


def _empty_layout(traits: ModelTraits) -> Layout:
    return Layout(empty_cache(traits, on_host=False), traits.device, traits.depth_limit, lambda row: False)

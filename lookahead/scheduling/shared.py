"""The passes that several sequences share, which come and go between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from jacobi import Path, Scores, TokenTree
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
from lookahead.runtime.scores import Look
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import traces_for
from lookahead.runtime.tree import NoReplays, TreeModel
from lookahead.runtime.upgrades import Upgrades

# Nobody knows how long a scheduler will go on: as long again as it has, say the schedules of traces and of packing.
_NEW_TOKENS, _WRITTEN = 2, 1


class SharedPasses(NoReplays):
    """Passes over the sequences that are here now, each with its part of one KV cache.

    A sequence that has read its prompt by itself joins with its keys and values; the pass's trees are in the order of
    the rows. Where one leaves, the last one takes its place::

        rows    a  b  c         join(d)    a  b  c  d        drop(1)    a  d  c

    Args:
        most: rows that there may be at a time.
        traces, pack: whether passes on a CPU may be traced, and run on packed weights.
        renewed: is told the milliseconds that a change of passes took.
    """

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
        self._view: TreeModel | None = None
        self._upgrades: Upgrades | None = None

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
            forward = TreeForward(self._model, self._traits, self._layout, prompt)
            packed = packed_weights(self._model) if self._packs else None
            if packed is not None:
                forward.use(packed)
            traces = traces_for(self._model, (), self._traits, packed) if self._traced else None
            executor = EagerExecutor(forward) if traces is None else TracedExecutor(traces, forward)
            self._view = TreeModel(forward, executor, None, {}, _NEW_TOKENS)
            self._upgrades = Upgrades(self._model, self._view, self._packs, _NEW_TOKENS, self._renewed)
        else:
            view.close()
        self._follow()

    def drop(self, row: int) -> None:
        """Leave a row out; the last one takes its place."""
        self._layout.drop(row)
        if len(self):
            self._follow()
        else:
            self.close()

    def _follow(self) -> None:
        self._layout.rows = list(range(len(self)))
        self.view.forward_pass.follow(len(self))

    def close(self) -> None:
        """No sequence is here any more."""
        if self._view is not None:
            self._view.close()
        self._layout = _empty_layout(self._traits)
        self._view = self._upgrades = None

    @property
    def view(self) -> TreeModel:
        """All rows' of the model."""
        assert self._view is not None  # there is a row
        return self._view

    def curve(self, memory: Memory) -> StepTimes:
        """The latency curve of passes over as many rows as there are, as they are run now."""
        executor = self.view.executor
        traces = executor.traces if isinstance(executor, TracedExecutor) else None
        how = False, traces, self._traits, False, self.view.forward_pass.packed is not None
        return step_times(self._model, len(self), memory.times, None, *how)

    def launch(self, trees: Sequence[TokenTree], look: Look | None = None) -> Callable[[], Scores]:
        """Start a pass; what is returned waits for it."""
        return self.view.launch(trees, look)

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each row's visited nodes to the end of its part of the KV cache."""
        self.view.keep(paths)

    def see(self, nodes: int, forward_ms: float) -> None:
        """Take in a pass over ``nodes`` nodes of all rows: traces and packed weights are made once they pay."""
        if self._upgrades is not None:
            self._upgrades.buy(nodes, forward_ms, _WRITTEN)

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
        return self.view.typical

    @property
    def plain_ms(self) -> float | None:
        return self.view.plain_ms

    def bucket(self, nodes: int) -> int:
        return nodes


def _empty_layout(traits: ModelTraits) -> Layout:
    return Layout(empty_cache(traits, on_host=False), traits.device, traits.depth_limit, lambda row: False)

"""Tree forwards whose shapes do not follow the KV cache, so that a CUDA graph can replay them.

A pass rounds its nodes up to a bucket and its slots up to a span. Everything that changes from pass to pass (tokens,
depths, branches, lengths, what the last pass kept) reaches the device in one packed transfer. Masks, positions and
slots are computed there, and the accepted slots of the pass before are moved by index at the start of the next one. The
same operations run without a graph on any device: when a capture fails, and in tests on a CPU.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError, TokenTree
from lookahead._per_model import MOST_KINDS, PerModel
from lookahead.models.compat import MODEL_ERRORS
from lookahead.models.fingerprint import fingerprint
from lookahead.models.hidden_states import Outputs
from lookahead.models.names import CACHE
from lookahead.runtime.attention import tree_forward
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.cuda_graphs.buffers import (
    MOVES,
    Graph,
    StaticBuffers,
    bucket_of,
    give_back,
    is_small,
    lease,
    padded_moves,
    span_of,
    spare_bytes,
    sparing,
)
from lookahead.runtime.cuda_graphs.capture import capture, on_side_stream, timed
from lookahead.runtime.executor import Executor
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.host_reads import HostReads
from lookahead.runtime.masks import ALIGNED
from lookahead.runtime.scores import send

_Run = Callable[[], Outputs]  # one pass as it can be run, captured or run again: its inputs are on the device


# Models that rejected a pass with static shapes: in which kinds of calls, and why; the last one last.
_rejections: PerModel[list[tuple[Any, str]]] = PerModel(list)


def kind_of_call(forward: TreeForward) -> tuple[Any, ...] | None:
    """Stands for the model as it is and for the kind of call; None = it is of a kind of its own."""
    kept = {k: v for k, v in forward.kwargs.items() if k != CACHE}
    if any(not isinstance(value, bool | int | float | str) for value in kept.values()):
        return None  # a tensor of the caller's is read where it lies
    # Tensors made in inference mode cannot be written outside of it.
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    taps = () if forward.hidden is None else forward.hidden.taps
    call = (forward.batch, forward.traits.dtype, forward.layout.device, forward.token_types is None, modes, taps)
    return fingerprint(forward.model), call, tuple(sorted(kept.items()))


def rejection(forward: TreeForward) -> str | None:
    """Why the model rejected static shapes in an earlier call of this kind; None = it has not."""
    known = _rejections.of(forward.model)
    kind = kind_of_call(forward) if known else None
    return next((reason for other, reason in list(known) if other == kind), None)


class GraphExecutor(Executor):
    """Runs passes of static shape. A model that rejects the first one is run eagerly from there on; with ``required``
    an error is raised. On a CUDA device passes are captured as graphs."""

    keeps_buffers = True

    def __init__(self, forward: TreeForward, *, required: bool = False) -> None:
        super().__init__(forward)
        self._layout = forward.layout
        self._required = required
        self._device = forward.layout.device
        self._captures = self._device.type == "cuda"
        self._buffers: StaticBuffers | None = None
        self._rejected = False  # the model has rejected a static pass
        self._moves: list[list[tuple[int, int]]] = []
        self._sound = False  # no pass was broken off, so the buffers may serve another call

    @property
    def route(self) -> str:
        """``"cuda graphs"``; ``"static"`` where nothing is captured, ``"dynamic"`` where the model rejects it."""
        if self._rejected:
            return "dynamic"
        failed = self._reason is not None or (self._buffers is not None and self._buffers.failure is not None)
        return "cuda graphs" if self._captures and not failed else "static"

    @property
    def plain_ms(self) -> float | None:
        return None if self._buffers is None else self._buffers.plain_ms

    def reserve(self, extent: Extent) -> None:
        forward, kind = self.forward_pass, kind_of_call(self.forward_pass)
        key = None if kind is None else (*kind, self._captures)
        buffers = self._buffers = lease(forward.model, key, forward.batch, forward.traits.dtype, self._device)
        at_once = self._captures and is_small(forward, extent.most)
        buffers.reserve(replace(extent, granule=ALIGNED), at_once=at_once, spare=spare_bytes(forward.model))
        forward.layout.cache.reserve(buffers.extent, buffers.allocate)

    def open(self) -> None:
        forward, layout, buffers = self.forward_pass, self._layout, self._buffers
        assert buffers is not None  # reserved
        layout.cache.consolidate()
        buffers.widen(layout.cache.buffers)  # a prompt longer than it seemed
        buffers.padding.copy_(torch.tensor(layout.padding))
        if layout.visible is not None:
            buffers.shown[:, : layout.visible.shape[1]] = torch.from_numpy(layout.visible)
        if forward.token_types is not None:
            buffers.types.copy_(forward.token_types[:, -1:])
        self._sound = True

    def close(self) -> None:
        """Give buffers and graphs back for the model's next call. The KV cache is gone after it."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None and self._sound:
            give_back(self.forward_pass.model, buffers, self._layout.cache.buffers)

    def bucket(self, nodes: int) -> int:
        return nodes if self._rejected else bucket_of(nodes)

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        buffers = self._buffers
        if self._rejected:
            return super().run(trees)
        assert buffers is not None  # reserved
        self.typical = True
        width = max(map(len, trees))
        self._sound = False
        try:
            outputs = self._replayed(buffers, *self._prepare(buffers, trees, bucket_of(width)))
        except MODEL_ERRORS as error:
            if buffers.proven or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"the model rejects a pass with static shapes ({type(error).__name__}: {error})"
            kind, known = kind_of_call(self.forward_pass), _rejections.of(self.forward_pass.model)
            if kind is not None:  # the model's next calls of this kind are spared the attempt
                known[:] = [each for each in known if each[0][0] == kind[0]][1 - MOST_KINDS :] + [(kind, reason)]
            if self._required:
                raise LookaheadError(refusal(reason)) from error
            self.flush()  # the call goes on eagerly, from the KV cache as it is
            self._layout.cache.open_static(None)
            self._buffers, self._rejected, self._reason = None, True, reason
            outputs = super().run(trees)
            self.typical = False
            return outputs
        buffers.proven = self._sound = True
        return Outputs(outputs.logits[:, :width], tuple(states[:, :width] for states in outputs.hidden))

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Count the nodes; the next pass moves their keys and values."""
        if self._rejected:
            super().keep(chosen)
        else:
            self._moves = self._layout.cache.advance(chosen)

    def _prepare(self, buffers: StaticBuffers, trees: Sequence[TokenTree], nodes: int) -> tuple[_Run, tuple[int, int]]:
        """A pass, and its numbers of nodes and slots."""
        cache, forward = self._layout.cache, self.forward_pass
        reach = cache.base + nodes
        if reach > buffers.capacity:
            self.typical = False
            buffers.forget_passes()
            sparing(lambda: cache.reach(reach))
            buffers.widen(cache.buffers)
        span = min(span_of(reach), buffers.capacity)
        if max(map(len, self._moves), default=0) > MOVES:
            self.flush()
        inputs = buffers.inputs_of(nodes)
        moves = self._moves or [[] for _ in trees]
        inputs.send(trees, self._layout.roots(), cache.lengths, cache.base, moves)
        self._moves = []
        mask, planned = buffers.mask_of(nodes, span), buffers.plans(span)
        given = {"input_ids": inputs.tokens}
        if forward.token_types is not None:
            given["token_type_ids"] = buffers.types.expand(-1, nodes)

        def run() -> Outputs:
            cache.move(inputs.sources, inputs.targets, buffers.rows)
            slots = inputs.base + inputs.counting
            masks = buffers.masks(forward.rules, inputs, slots, mask)
            positions = inputs.roots[:, None] + inputs.depths
            cache.open_static(slots, span)
            with tree_forward(planned=planned, width=nodes):
                return forward.call(given | {"position_ids": positions}, masks)

        return run, (nodes, span)

    def _replayed(self, buffers: StaticBuffers, run: _Run, key: tuple[int, int]) -> Outputs:
        """Replay the pass; or run it, and capture it if passes like it have been run before."""
        if not self._captures or buffers.failure is not None:
            self._reason = buffers.failure
            return run()
        graph = buffers.graphs.pop(key, None)
        self.typical &= graph is not None and graph.checked
        if graph is None:
            return self._captured(buffers, run, key)
        buffers.graphs[key] = graph
        if not graph.checked and self._layout.cache.base != graph.base:
            return self._compared(buffers, run, key, graph)
        graph.replay()
        return graph.outputs

    def _captured(self, buffers: StaticBuffers, run: _Run, key: tuple[int, int]) -> Outputs:
        """Capture a pass whose bucket is warm in this thread, where libraries have been set up by it."""
        thread = threading.get_ident()
        bucket, size = (key[0], thread), (*key, thread)
        if bucket not in buffers.warm:
            buffers.warm |= {bucket, size}
            return self._warmed(buffers, run)
        try:
            replay, outputs = capture(run, buffers)
        except Exception as error:  # whatever a driver, a kernel or a model's code objects to
            if size not in buffers.warm:  # another span may take kernels that have to be set up first
                buffers.warm.add(size)
                return self._warmed(buffers, run)
            self._fail(buffers, f"a pass could not be captured ({type(error).__name__}: {error})")
            return run()
        graph = Graph(replay, outputs, self._layout.cache.base, self.forward_pass.rules)
        buffers.add(key, graph)
        return self._compared(buffers, run, key, graph)

    def _warmed(self, buffers: StaticBuffers, run: _Run) -> Outputs:
        """Run a pass as it will be captured, and see whether it can be."""
        with HostReads() as reads:
            outputs = on_side_stream(run, buffers)
        if reads.found:
            self._fail(buffers, reads.told)
        return outputs

    def _compared(self, buffers: StaticBuffers, run: _Run, key: tuple[int, int], graph: Graph) -> Outputs:
        """Run the pass itself, and compare a replay with it: no kernel may have escaped the capture and, once the base
        is another one, no slot may be frozen in it. That is done for the first graph of a bucket alone."""
        old, new = graph.base, self._layout.cache.base
        outputs, taken_ms = timed(run, buffers.device)
        if key[0] == 1:
            buffers.plain_ms = taken_ms
        buffers.inputs_of(key[0]).settle()
        places = [buffer[..., old : old + key[0], :] for buffer in self._layout.cache.buffers if old != new]
        before = [place.clone() for place in places]
        graph.replay()
        told = zip((graph.outputs.logits, *graph.outputs.hidden), (outputs.logits, *outputs.hidden), strict=True)
        if not all(self._agree(replayed.float(), expected.float()) for replayed, expected in told):
            reason = "leaves something out" if old == new else "does not follow the history"
            self._fail(buffers, f"a captured pass {reason}")
            for place, states in zip(places, before, strict=True):
                place.copy_(states)
            return run()
        if old != new:
            buffers.follow.add(key[0])
        graph.checked = key[0] in buffers.follow
        return outputs

    def _agree(self, replayed: Tensor, expected: Tensor) -> bool:
        finite = expected.isfinite()
        difference = torch.where(finite, (replayed - expected).abs(), 0.0).max()
        spread = expected[finite].std() if finite.any() else difference.new_ones(())
        allowed = max(1e-3, 32 * torch.finfo(self.forward_pass.traits.dtype).eps)
        return bool(difference <= allowed * (spread + 1e-9))

    def _fail(self, buffers: StaticBuffers, reason: str) -> None:
        self._reason = buffers.failure = reason
        buffers.graphs.clear()

    def flush(self) -> None:
        """Make the moves that are still waiting for a pass."""
        buffers, width = self._buffers, max(map(len, self._moves), default=0)
        if width and buffers is not None:
            sources, targets = send(padded_moves(self._moves, width), buffers.device)
            self._layout.cache.move(sources, targets, buffers.rows)
        self._moves = []


def refusal(reason: str) -> str:
    """Error for ``static=True`` where it cannot be."""
    return f"static=True cannot be used: {reason}. Leave static unset, or set it to False."

"""Fused passes whose shapes do not follow the history, so that a CUDA graph can replay them.

A pass rounds its nodes up to a bucket and its history up to a span. Everything that changes from pass to pass (tokens,
depths, branches, lengths, what the last pass kept) reaches the device in one packed transfer; masks, positions and
slots are computed there from it, and the accepted slots of the pass before are moved by index at the start of the next
one. So a pass is one transfer and one replay, and all that comes back is what :mod:`lookahead.runtime.scores` fetches.

The same operations run without a graph as well, on any device: that is the path when a capture fails, and the one that
tests on a CPU follow.
Buffers and graphs are those of :mod:`lookahead.runtime.cuda_graphs.buffers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from jacobi import LookaheadError, Path, Scores, TokenTree
from lookahead.models.families.registry import place_builders
from lookahead.models.fingerprint import fingerprint
from lookahead.models.hidden_states import Outputs
from lookahead.models.traits import index_limit, is_seq2seq, position_limit
from lookahead.runtime.attention import fused_pass
from lookahead.runtime.cuda_graphs.buffers import (
    KEPT,
    MOVES,
    Arena,
    Graph,
    Inputs,
    bucket_of,
    capturing,
    padded_moves,
    span_of,
    sparing,
    waiting_arenas,
    waiting_lock,
)
from lookahead.runtime.encoder_decoder import Seq2SeqModel
from lookahead.runtime.masks import StaticPlaces, static_masks
from lookahead.runtime.tree import FusedModel

# What a model that cannot run a static pass may raise in its first one.
_REJECTIONS = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError)


def static_reason(model: PreTrainedModel) -> str | None:
    """Why passes over this model cannot have static shapes now; None = as far as can be told, they can."""
    if is_seq2seq(model):
        return "an encoder-decoder model counts positions on the host"
    places = getattr(model, "hf_device_map", None) or {}
    devices = {weight.device for weight in model.parameters()}
    if torch.device("meta") in devices:
        return "the model's weights are offloaded"
    if len(set(places.values())) > 1 or len(devices) > 1 or getattr(model, "_device_mesh", None) is not None:
        return "the model lies on several devices"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, and frees the weights that it has cast when it ends"
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if attention == "flex_attention":
        return "flex_attention compiles a kernel of its own for a mask"
    rope = position_limit(model)
    if rope is not None:
        return f"{rope[0]} RoPE changes its frequencies with the text's length"
    if index_limit(model) is not None:
        return "attention that leaves out tokens is handed over to plain passes when the text is long"
    if place_builders(model):
        return "this model counts cache slots by itself, and is given places for each pass"
    return None


def dynamic_reason(static: bool | None, model: PreTrainedModel) -> str | None:
    """Why passes asked for with ``static`` (see :func:`fused_model`) do not have static shapes; None = they have."""
    if static is False:
        return "static=False"
    if static is None and model.device.type != "cuda":
        return "static shapes are used on CUDA devices unless asked for"
    return static_reason(model)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass as it can be run, captured or run again: its inputs are on the device."""

    run: Callable[[], Outputs]
    inputs: Inputs
    key: tuple[int, int]


def _on_side_stream(run: Callable[[], Outputs], arena: Arena) -> Outputs:
    """Run a pass as it has to be before it is captured: on the stream that will capture it, for libraries to set up."""
    if arena.stream is None:
        arena.stream = torch.cuda.Stream(arena.device)
    current = torch.cuda.current_stream(arena.device)
    arena.stream.wait_stream(current)
    with torch.cuda.stream(arena.stream):
        outputs = run()
    current.wait_stream(arena.stream)
    for output in outputs:
        if output is not None:
            output.record_stream(current)
    return outputs


def _capture(run: Callable[[], Outputs], arena: Arena) -> tuple[Callable[[], None], Outputs]:
    """Capture a pass without executing it; returns what replays it and the outputs it will write."""
    if arena.pool is None:
        arena.pool = torch.cuda.graph_pool_handle()
    device, graph = arena.device, torch.cuda.CUDAGraph()
    # Other threads may use the device while this one captures.
    with (
        capturing,
        torch.cuda.device(device),
        torch.cuda.graph(graph, pool=arena.pool, stream=arena.stream, capture_error_mode="thread_local"),
    ):
        outputs = run()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, outputs


class StaticModel(FusedModel):
    """A model whose fused passes have static shapes; see :class:`lookahead.runtime.tree.FusedModel` for the arguments.

    Args:
        required: raise where the model rejects a static pass; otherwise the dynamic path takes over.
        graphs: capture passes as CUDA graphs; None = on a CUDA device.
    """

    def __init__(self, *args: Any, required: bool = False, graphs: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._required = required
        self._captures = self._device.type == "cuda" if graphs is None else graphs
        self.route = "cuda graphs" if self._captures else "static"
        self._arena: Arena | None = None
        self._key: Any = None
        self._moves: list[list[tuple[int, int]]] = []
        self._sound = False  # no pass was broken off, so the arena may serve another call

    # --- the arena ---------------------------------------------------------------------------------------------------

    def _lease(self) -> Arena:
        """An arena that no other call uses: one that waits for this kind of call, or a new one."""
        kept = {k: v for k, v in self._pass_kwargs.items() if k != "past_key_values"}
        batch = self._input_ids.shape[0]
        if any(not isinstance(value, bool | int | float | str) for value in kept.values()):
            self._key = None  # a tensor of the caller's is read where it lies: nothing of it can be used again
            return Arena(batch, self._dtype, self._device)
        # Tensors made in inference mode cannot be written outside of it.
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self._captures, self._hidden is not None)
        call = (batch, self._dtype, self._device, self._token_types is None, modes)
        self._key = (fingerprint(self._model), call, tuple(sorted(kept.items())))
        with waiting_lock:
            waiting = waiting_arenas.setdefault(self._model, [])
            waiting[:] = [entry for entry in waiting if entry[0][0] == self._key[0]]
            known = next((index for index, (key, _) in enumerate(waiting) if key == self._key), None)
            arena = None if known is None else waiting.pop(known)[1]
        if arena is None:
            return Arena(batch, self._dtype, self._device)
        if self._device.type == "cuda":  # an earlier call's work may still read what this one writes
            with capturing:
                torch.cuda.synchronize(self._device)
        return arena

    def close(self) -> None:
        """Give buffers and graphs back for the model's next call. The history is gone after it."""
        super().close()
        arena, self._arena = self._arena, None
        if arena is None or self._key is None or not self._sound:
            return
        arena.take_back(self._cache.buffers)
        with waiting_lock:
            waiting = waiting_arenas.setdefault(self._model, [])
            waiting.append((self._key, arena))
            del waiting[:-KEPT]

    # --- the loop's side ---------------------------------------------------------------------------------------------

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""
        return nodes if self.route == "dynamic" else bucket_of(nodes)

    def _consolidate(self, slots: int) -> None:
        """Move the prompt's keys and values into an arena's buffers."""
        arena = self._arena = self._lease()
        arena.reserve(slots)
        self._cache.consolidate(arena.capacity, arena.allocate)

    def prefill(self) -> Scores:
        """Run the prompt exactly as plain decoding does; scores for its last token."""
        scores = super().prefill()
        arena = self._arena
        assert arena is not None
        arena.padding.copy_(torch.tensor(self._padding))
        if self._visible is not None:
            arena.shown[:, : self._visible.shape[1]] = self._visible
            self._visible = None
        if self._token_types is not None:
            arena.types.copy_(self._token_types[:, -1:])
        self._sound = True
        return scores

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of every tree in one pass."""
        arena = self._arena
        if arena is None:
            return super().forward(trees)
        width = max(map(len, trees))
        nodes = bucket_of(width)
        self._sound = False
        try:
            logits, hidden = self._run(arena, self._prepare(arena, trees, nodes))
        except _REJECTIONS as error:
            if arena.proven or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"the model rejects a pass with static shapes ({type(error).__name__}: {error})"
            if self._required:
                raise LookaheadError(_refusal(reason)) from error
            self._leave(arena, reason)
            return super().forward(trees)
        arena.proven = self._sound = True
        return self._scored((logits[:, :width], None if hidden is None else hidden[:, :width]))

    def keep(self, paths: Sequence[Path]) -> None:
        """Make each row's visited nodes the end of its history; the next pass moves their keys and values."""
        if self._arena is None:
            super().keep(paths)
            return
        self._moves = self._cache.advance([path.nodes for path in paths])
        self._positions = [at + len(path.nodes) for at, path in zip(self._positions, paths, strict=True)]

    def store(self, cache: Cache) -> None:
        """Leave the history in ``cache`` as plain decoding would have."""
        if self._arena is not None:
            self._flush(self._arena)
        super().store(cache)

    # --- a pass ------------------------------------------------------------------------------------------------------

    def _prepare(self, arena: Arena, trees: Sequence[TokenTree], nodes: int) -> _Pass:
        """Send the pass's inputs to the device, and say how it is run on them."""
        cache = self._cache
        reach = cache.base + nodes
        if reach > arena.capacity:
            capacity = arena.grow(reach)
            sparing(lambda: cache.grow(capacity))
        span = min(span_of(reach), arena.capacity)
        if max(map(len, self._moves), default=0) > MOVES:
            self._flush(arena)
        inputs = arena.inputs_of(nodes)
        moves = self._moves or [[] for _ in trees]
        inputs.send(trees, self._roots(), cache.lengths, cache.base, moves)
        self._moves = []
        mask = arena.mask_of(nodes, span)
        extra: dict[str, Tensor] = {}
        if self._token_types is not None:
            extra["token_type_ids"] = arena.types.expand(-1, nodes)

        def run() -> Outputs:
            cache.move(inputs.sources, inputs.targets, arena.rows)
            slots = inputs.base + inputs.counting
            places = StaticPlaces(
                inputs.ancestors,
                slots,
                inputs.depths,
                inputs.lengths,
                arena.padding,
                arena.shown[:, :span],
                arena.columns[:span],
                arena.bits,
            )
            masks = static_masks(self._rules, places, mask)
            positions = inputs.roots[:, None] + inputs.depths
            cache.open_static(slots, span)
            with fused_pass():
                return self.call(input_ids=inputs.tokens, position_ids=positions, attention_mask=masks, **extra)

        return _Pass(run, inputs, (nodes, span))

    def _run(self, arena: Arena, step: _Pass) -> Outputs:
        """Replay the pass; or run it, and capture it if it has been run before."""
        if not self._captures or arena.failure is not None:
            self._note(arena)
            return step.run()
        graph = arena.graphs.pop(step.key, None)
        if graph is not None:
            arena.graphs[step.key] = graph
            graph.replay()
            return graph.outputs if graph.checked else self._check(arena, step, graph)
        if step.key not in arena.warm:
            arena.warm.add(step.key)
            return _on_side_stream(step.run, arena)
        try:
            replay, outputs = _capture(step.run, arena)
        except Exception as error:  # whatever a driver, a kernel or a model's code objects to
            arena.failure = f"a pass could not be captured ({type(error).__name__}: {error})"
            arena.graphs.clear()
            self._note(arena)
            return step.run()
        graph = Graph(replay, outputs, self._cache.base, self._rules)
        arena.add(step.key, graph)
        graph.replay()
        return outputs

    def _check(self, arena: Arena, step: _Pass, graph: Graph) -> Outputs:
        """Compare a graph's first replay at another place with the pass itself: nothing of the history may be frozen.

        Costs one pass and one answer from the device for each graph.
        """
        if self._cache.base == graph.base:
            return graph.outputs
        step.inputs.settle()
        outputs = step.run()
        replayed, expected = graph.outputs[0].float(), outputs[0].float()
        finite = expected.isfinite()
        difference = torch.where(finite, (replayed - expected).abs(), 0.0).max()
        spread = expected[finite].std() if finite.any() else difference.new_ones(())
        allowed = max(1e-3, 32 * torch.finfo(self._dtype).eps)
        graph.checked = bool(difference <= allowed * (spread + 1e-9))
        if not graph.checked:
            arena.failure = "a captured pass does not follow the history"
            arena.graphs.clear()
            self._note(arena)
        return outputs

    def _note(self, arena: Arena) -> None:
        if arena.failure is not None:
            self.route, self.route_reason = "static", arena.failure

    def _flush(self, arena: Arena) -> None:
        """Make the moves that are still waiting for a pass."""
        width = max(map(len, self._moves), default=0)
        if width:
            pairs = torch.from_numpy(padded_moves(self._moves, width))
            if arena.device.type == "cuda":
                pairs = pairs.pin_memory()
            sources, targets = pairs.to(arena.device, non_blocking=True)
            self._cache.move(sources, targets, arena.rows)
        self._moves = []

    def _leave(self, arena: Arena, reason: str) -> None:
        """Go on with the dynamic path, from the history as it is."""
        self._flush(arena)
        self._cache.close_static()
        base = self._cache.base
        if len(self._cache.lengths) > 1 or not bool(arena.shown.all()):
            lengths = torch.tensor(self._cache.lengths, device=self._device)
            self._visible = arena.shown[:, :base] & (arena.columns[:base] < lengths[:, None])
        self._arena = None
        self.route, self.route_reason = "dynamic", reason


def _refusal(reason: str) -> str:
    return f"static=True cannot be used: {reason}. Leave static unset, or set it to False."


def fused_model(
    static: bool | None, model: PreTrainedModel, *args: Any, cross: Cache | None = None, **kwargs: Any
) -> FusedModel:
    """One call's view of a model, with static shapes or without; call its ``close()`` when the call is over.

    Args:
        static: None = on a CUDA device where possible; True = on any device, or an error; False = never.
        model: and all that follows: see :class:`lookahead.runtime.tree.FusedModel`.
        cross: the cross-attention's cache of an encoder-decoder model; None = a new one.

    Raises:
        LookaheadError: ``static=True`` for a model that cannot be run with static shapes.
    """
    reason = dynamic_reason(static, model)
    positions = args[4].get("position_ids") if len(args) > 4 else None
    if reason is None and positions is not None and positions.ndim > 2:
        reason = "positions have several axes"
    if reason is None and len(args) > 1 and args[1].on_host:
        reason = "the cache is offloaded"
    if static is True and reason is not None:
        raise LookaheadError(_refusal(reason))
    if reason is None:
        return StaticModel(model, *args, required=static is True, **kwargs)
    if is_seq2seq(model):
        fused: FusedModel = Seq2SeqModel(model, *args, cross=cross, **kwargs)
    else:
        fused = FusedModel(model, *args, **kwargs)
    fused.route_reason = reason
    return fused

"""Captures a pass as a CUDA graph; where that fails, stream, allocator and process are left as they were."""

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lookahead.models.hidden_states import Outputs
from lookahead.runtime.cuda_graphs.buffers import StaticBuffers, capturing

# Graphs whose capture failed: torch's allocator of pinned memory may go on asking them whether they are capturing.
_failed: list[Any] = []


def on_side_stream(run: Callable[[], Outputs], buffers: StaticBuffers) -> Outputs:
    """Run a pass on the stream that will capture it, for libraries to set up: it has to be run before the capture."""
    if buffers.stream is None:
        buffers.stream = torch.cuda.Stream(buffers.device)
    current = torch.cuda.current_stream(buffers.device)
    buffers.stream.wait_stream(current)
    with torch.cuda.stream(buffers.stream):
        outputs = run()
    current.wait_stream(buffers.stream)
    for output in (outputs.logits, *outputs.hidden):
        output.record_stream(current)
    return outputs


def capture(run: Callable[[], Outputs], buffers: StaticBuffers) -> tuple[Callable[[], None], Outputs]:
    """Capture a pass without executing it, on the stream on which it has been run before; returns what replays it and
    the outputs it will write. Other threads may use the device meanwhile."""
    device, graph = buffers.device, torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which leaves its stream on when the capture cannot be ended.
    with capturing, torch.cuda.device(device), torch.cuda.stream(buffers.stream):
        if buffers.pool is None:  # graphs have memory of their own, which is not found in what others have cached
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            buffers.pool = torch.cuda.graph_pool_handle()
        try:
            graph.capture_begin(pool=buffers.pool, capture_error_mode="thread_local")
            outputs = run()
            graph.capture_end()
        except BaseException:
            _undo(graph, buffers)
            raise

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, outputs


def undisturbed(draw: Callable[[], Tensor]) -> Tensor:
    """Draw random numbers, if need be once another thread's capture has ended: before 2.13 torch refuses all draws
    while one is under way, and leaves the generator as it was."""
    try:
        return draw()
    except RuntimeError as error:
        if "graph capture" not in str(error):
            raise
    with capturing:
        return draw()


def _undo(graph: Any, buffers: StaticBuffers) -> None:
    """End a capture that failed, wherever it did."""
    with suppress(RuntimeError):
        graph.capture_end()  # a stream captures until it is told, even if nothing comes of it
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # the allocator has left the pool by itself, or cannot be told
        torch._C._cuda_endAllocateToPool(device, buffers.pool)
        torch._C._cuda_releasePool(device, buffers.pool)
    graph.reset()
    buffers.pool = None
    _failed.append(graph)
    with suppress(RuntimeError):
        _end_of_drawing(buffers.device)


def _end_of_drawing(device: torch.device) -> None:
    """Let the default generator know that nothing is captured any more, by a capture that succeeds: before 2.13 torch
    refuses all draws after one that failed."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros((), device=device)  # torch warns of an empty graph
    graph.capture_end()
    graph.reset()


def timed(run: Callable[[], Outputs], device: torch.device) -> tuple[Outputs, float]:
    """Run a pass, and say how many milliseconds it took; what this thread started before does not count."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.synchronize()
    start = perf_counter()
    outputs = run()
    if stream is not None:
        stream.synchronize()
    return outputs, 1e3 * (perf_counter() - start)

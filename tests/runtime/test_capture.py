"""Captures that fail, on a stand-in of CUDA: nothing of them is left on stream, allocator and process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from lookahead.models.hidden_states import Outputs
from lookahead.runtime.cuda_graphs import buffers as static_buffers
from lookahead.runtime.cuda_graphs import capture as capturing
from lookahead.runtime.cuda_graphs.buffers import StaticBuffers
from lookahead.runtime.cuda_graphs.capture import capture, undisturbed


class Device:
    """What torch knows of a CUDA device: the current stream, who captures, and into which pool memory goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.fails = fails
        self.stream = "default"
        self.captures: str | None = None  # the stream that does
        self.pools: dict[int, int] = {}  # how many graphs, or captures, hold one
        self.underway: list[int] = []  # pools that take what is allocated
        self.draws = True  # as the generator of random numbers sees it
        self.emptied = 0
        for name, stand_in in {
            "CUDAGraph": lambda: Graph(self),
            "stream": self.on,
            "device": lambda device: nullcontext(),
            "current_device": lambda: 0,
            "synchronize": lambda device: None,
            "empty_cache": self.empty,
            "graph_pool_handle": lambda: 10 + self.emptied,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def empty(self) -> None:
        assert self.captures is None
        self.emptied += 1

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: int) -> None:
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0


class Graph:
    """A graph that fails where its device says, in the order of torch's own steps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ended = False
        self.pool: int | None = None
        self.was_reset = False

    def capture_begin(self, pool: int = 99, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        device = self.device
        if pool == 99:
            device.fails = ""
        if device.fails == "before it begins":
            raise RuntimeError("no")
        self.pool, device.draws = pool, False
        device.pools[pool] = device.pools.get(pool, 0) + 1
        device.underway.append(pool)
        if device.fails == "as it begins":
            raise RuntimeError("no")
        device.captures = device.stream

    def capture_end(self) -> None:
        device = self.device
        if device.captures is None:
            raise RuntimeError("not capturing")
        device.captures = None
        if device.fails == "as it ends":
            raise RuntimeError("capture was invalidated")
        assert self.pool is not None
        device.end(0, self.pool)
        if device.fails == "without a graph":
            raise RuntimeError("Invalid capture")
        self.ended = device.draws = True
        if device.fails == "when instantiated":
            raise RuntimeError("no")

    def reset(self) -> None:
        self.was_reset = True
        if self.ended and self.pool is not None:
            self.device.release(0, self.pool)
        self.ended = False

    def replay(self) -> None:
        assert self.ended


def buffers_for(stream: str) -> StaticBuffers:
    buffers = StaticBuffers(1, torch.float32, torch.device("cpu"))
    buffers.stream = stream
    return buffers


FAILURES = ["before it begins", "as it begins", "in the middle", "as it ends", "without a graph", "when instantiated"]


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failed_capture_leaves_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another stream, nor a stream that captures, nor an allocator that does; the next capture succeeds."""
    device, buffers = Device(monkeypatch, fails), buffers_for("side")
    outputs = Outputs(torch.zeros(1))

    def run() -> Outputs:
        assert (device.stream, device.captures) == ("side", "side")
        if device.fails == "in the middle":
            raise KeyError("a model's own")
        return outputs

    with pytest.raises(KeyError if fails == "in the middle" else RuntimeError):
        capture(run, buffers)
    assert (device.stream, device.captures, device.underway, device.draws) == ("default", None, [], True)
    if fails != "without a graph":  # there torch alone knows that it holds the pool
        assert not any(device.pools.values())
    assert buffers.pool is None
    assert capturing._failed[-1].was_reset
    assert not device.fails
    replay, told = capture(run, buffers)
    replay()
    assert told is outputs
    assert (device.stream, device.captures, device.underway) == ("default", None, [])


def test_graphs_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have cached is freed for the first graph only."""
    device, buffers = Device(monkeypatch), buffers_for("side")
    for _ in range(3):
        capture(lambda: Outputs(torch.zeros(1)), buffers)
    assert device.emptied == 1
    assert list(device.pools.values()) == [3]


def test_draws_wait_for_another_threads_capture() -> None:
    """Before 2.13 torch refuses them meanwhile; other errors are nobody's to hide."""
    tried = threading.Event()

    def draw() -> torch.Tensor:
        if static_buffers.capturing.locked() and not tried.is_set():
            tried.set()
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return torch.ones(1)

    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(undisturbed(draw)))
    with static_buffers.capturing:
        thread.start()
        assert tried.wait(10)
        thread.join(0.05)
        assert not drawn
    thread.join()
    assert len(drawn) == 1

    def broken() -> torch.Tensor:
        raise RuntimeError("probability tensor contains inf")

    with pytest.raises(RuntimeError, match="contains inf"):
        undisturbed(broken)

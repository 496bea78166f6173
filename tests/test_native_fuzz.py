"""Whatever C is given, it ends by an exception or by an answer, and writes nowhere else: wrong types and numbers of
arguments, arrays of other kinds and shapes, released ones, numbers that no one expects, and sources that change what
they were given while they are asked. ``make sanitize`` runs this with more examples, and with an eye on memory."""

import gc
import math
import os
import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import built
from helpers.toy import examples
from hypothesis import given
from hypothesis import strategies as st

from jacobi import Successors
from lookahead import _native
from lookahead.runtime import ordered_attention
from lookahead.sources import SuccessorTable

pytestmark = built
MORE = int(os.environ.get("FUZZ", "1"))
NUMBERS = (0, 1, -1, 2, 3, 7, 63, 64, 65, 1 << 15, -(1 << 31), 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), 1 << 64)
NUMBERS += (0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e-45, 1e308, True, np.int64(3), np.float32(0.5))
DTYPES = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "c8", "bool", "object", ">f4", ">i4", "S4"]
ERRORS = (TypeError, ValueError, IndexError, OverflowError, BufferError, MemoryError, KeyError)


class Weird:
    """Numbers, and keys of a dict, that do something when they are read."""

    def __init__(self, act: Callable[[], Any], value: int) -> None:
        self._act, self._value = act, value

    def __index__(self) -> int:
        self._act()
        return self._value

    def __float__(self) -> float:
        self._act()
        return float(self._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        self._act()
        return self._value == other


def array_of(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of a kind, or a view of one that is not what it seems."""
    filled = np.frombuffer(rng.randbytes(64 * math.prod(shape) + 64), np.uint8)
    item = np.dtype(dtype).itemsize
    if dtype == "object":
        return np.full(shape, None)
    made = filled[: item * math.prod(shape)].copy().view(dtype).reshape(shape)
    match rng.randrange(12) if shape else 12:
        case 0:
            made.flags.writeable = False
        case 1:
            made = np.repeat(made, 2, -1)[..., ::2]
        case 2:
            made = made[..., ::-1]
        case 3:
            made = made[::-1]
        case 4:
            made = np.asfortranarray(made)
        case 5:
            made = np.broadcast_to(made[:1], shape)
        case 6:
            view = memoryview(made)
            view.release()
            return view
        case 7:
            made = filled[1 : 1 + item * math.prod(shape)].copy()[: item * math.prod(shape)].view(dtype).reshape(shape)
        case 8 if item > 1 and math.prod(shape):
            odd = bytearray(item * math.prod(shape) + 1)
            made = np.frombuffer(memoryview(odd)[1:], np.uint8).view(dtype).reshape(shape)
    return made.data if rng.random() < 0.5 else made


def anything(rng: random.Random) -> Any:
    """A value that no function expects."""
    some = (
        None,
        "text",
        b"bytes",
        object(),
        [],
        (),
        {},
        3,
        [[]],
        (1, 2),
        memoryview(b"12345678"),
        memoryview(b""),
        {1: 2},
    )
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(some)
    if kind == 1:
        return rng.choice(NUMBERS)
    shape = tuple(rng.choice([0, 1, 2, 8]) for _ in range(rng.randrange(4)))
    return array_of(rng, rng.choice(DTYPES), shape)


def usual(rng: random.Random, name: str) -> list[Any]:
    """Arguments that are right."""
    numbers = np.random.default_rng(rng.getrandbits(30))
    lines, vocab = 3, rng.choice([1, 70, 300])
    logits = numbers.normal(size=(lines, vocab)).astype(np.float32)
    if name == "best_of":
        best = rng.randrange(1, vocab + 1)
        return [logits, np.zeros((lines, best), np.float32), np.zeros((lines, best), np.int32)]
    if name == "exponential":
        states = numbers.integers(0, 255, (2, 5056)).astype(np.uint8)
        states[0, 8:12], states[0, 16:24] = np.array([5], "<i4").view(np.uint8), np.array([7], "<u8").view(np.uint8)
        return [states, np.zeros((lines, vocab), np.float32)]
    if name == "drawn":
        noise = numbers.exponential(size=(lines, vocab)).astype(np.float32)
        ids = np.argsort(-logits, 1)[:, : min(vocab, 5)].astype(np.int32)
        best = np.take_along_axis(logits, ids, 1)
        warp = (0.7, rng.choice([0, 3]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.1]))
        how = rng.randrange(lines), rng.randrange(lines), warp, (1e-6, 1e-5, 5)
        return [logits, *rng.choice([(ids, best), (None, None)]), noise, how]
    table, context = SuccessorTable(8, rng.choice([1 << 16, 1 << 17])), tuple(rng.randrange(2) for _ in range(3))
    said = numbers.integers(0, vocab, (4, 4), np.int32), numbers.normal(size=(4, 4)).astype(np.float32)
    table.put(context, [-1, 0, 0, 2], [context[2], 6, 7, 8], Successors(*said))
    assert name == "heard"
    rows = table._entries.reshape(-1, 16), table._before, table._tokens, table._logits
    settings = (0.7, 0, 1.0, 0.0), 2, (0.5, 2.0, 2.7, 3.3, 0.4, 50.0), np.array([0.01, 0.02, 0.5]), 8, 18
    return [settings, rows, table.written, context, noise_or_none(rng, numbers), [(rng.randrange(8), 0.5)]]


def noise_or_none(rng: random.Random, numbers: np.random.Generator) -> Any:
    return rng.choice([None, numbers.exponential(size=100).astype(np.float32)])


def spoilt(rng: random.Random, given: Any, act: Callable[[], Any]) -> Any:
    """A value, or something in it, replaced by another one."""
    if isinstance(given, (list, tuple)) and given and rng.random() < 0.8:
        parts = list(given)
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(parts))
            parts[at] = spoilt(rng, parts[at], act)
        if rng.random() < 0.2:
            parts = parts[: rng.randrange(len(parts))] if rng.random() < 0.5 else [*parts, anything(rng)]
        return type(given)(parts)
    if isinstance(given, np.ndarray) and rng.random() < 0.7:
        kind, shape = rng.randrange(4), list(given.shape)
        if kind == 0 and shape:
            at = rng.randrange(len(shape))
            shape[at] = max(0, shape[at] + rng.choice([-1, 1]))
        if kind == 1:
            shape = shape[1:] if rng.random() < 0.5 else [2, *shape]
        if kind == 2 and given.size:
            broken = given.copy()
            extremes = [-1, 127, 1 << 14, -(1 << 31), (1 << 31) - 1, math.nan, math.inf, -math.inf, 1e38]
            with np.errstate(all="ignore"):
                broken.ravel()[rng.randrange(given.size)] = np.array(rng.choice(extremes)).astype(given.dtype)
            return broken
        return array_of(rng, given.dtype.str if rng.random() < 0.7 else rng.choice(DTYPES), tuple(shape))
    if rng.random() < 0.3:
        return Weird(act, rng.choice([0, 1, 2, -1]))
    if rng.random() < 0.6 and isinstance(given, (int, float)):
        return rng.choice(NUMBERS)
    return anything(rng)


@examples(250 * MORE)
@given(st.integers(0, 1 << 40), st.sampled_from(["best_of", "exponential", "drawn", "heard"]))
def test_wrong_arguments_end_by_an_exception(seed: int, name: str) -> None:
    rng = random.Random(seed)
    given = usual(rng, name)
    function = getattr(_native.speedups, name)
    function(*given)
    lists = [
        part for part in chain(given, *(part for part in given if isinstance(part, tuple))) if isinstance(part, list)
    ]

    def act() -> None:
        """What Python code does to arguments while C reads them."""
        for part in lists:
            rng.choice([part.clear, part.reverse, lambda: None])()
        if rng.random() < 0.1:
            raise KeyError("in the middle")

    for _ in range(4):
        wrong = list(given)
        kind = rng.randrange(8)
        if kind == 0:
            wrong = wrong[: rng.randrange(len(wrong))] if rng.random() < 0.5 else [*wrong, anything(rng)]
        elif kind == 1:
            wrong[rng.randrange(len(wrong))] = wrong[rng.randrange(len(wrong))]
        else:
            at = rng.randrange(len(wrong))
            wrong[at] = spoilt(rng, wrong[at], act)
        try:
            function(*wrong)
        except ERRORS:
            pass
        else:
            assert len(wrong) == len(given)


class Source:
    """Proposes what sources do, or anything; and changes the lists that it was given, calls C again, or fails."""

    def __init__(self, rng: random.Random, lists: list[list[Any]]) -> None:
        self._rng, self._lists, self._calls = rng, lists, 0
        self.wild = rng.random() < 0.8

    def _act(self) -> None:
        rng = self._rng
        self._calls += 1
        if not self.wild or rng.random() < 0.7:
            return
        match rng.randrange(6):
            case 0:
                rng.choice(self._lists).clear()
            case 1:
                rng.choice(self._lists)[:] = [anything(rng) for _ in range(rng.randrange(4))]
            case 2:
                chosen = rng.choice(self._lists)
                chosen[rng.randrange(len(chosen) + 1) :] = []
            case 3:
                gc.collect(0)
            case 4 if self._calls < 20:
                grow(rng, depth=1)
            case 5 if rng.random() < 0.3:
                raise KeyError("in the middle")

    def step(self, state: Any, token: int) -> Any:
        self._act()
        return (*state[-3:], token) if isinstance(state, tuple) else anything(self._rng)

    def propose(self, state: Any) -> Any:
        self._act()
        rng = self._rng
        found: list[Any] = [(rng.randrange(50), rng.randrange(3)) for _ in range(rng.randrange(6))]
        if self.wild and rng.random() < 0.3:
            self._lists.append(found)  # which is changed in a later call
        if self.wild and rng.random() < 0.1:
            wrong = (
                (7,),
                (1, 1 << 40),
                (1 << 70, 0),
                (1, -1),
                [1, 0],
                None,
                (Weird(found.clear, 3), Weird(found.clear, 1)),
            )
            found.insert(0, rng.choice(wrong))
        if self.wild and rng.random() < 0.05:
            return rng.choice([None, 3, "text", {1: 2}, iter(found), b"bytes", object()])
        return tuple(found) if rng.random() < 0.2 else found


def grow(rng: random.Random, depth: int = 0) -> Any:
    sizes = rng.choice([1, 2, 20, 60])
    times = [1.0 + 0.01 * at for at in range(sizes)]
    odds = [rng.random() * 5 for _ in range(12)]
    lists: list[list[Any]] = [[]]
    sources = [Source(rng, lists) for _ in range(2)]
    asked = *(tuple(getattr(source, name) for source in sources) for name in ("propose", "step")), (0, 6)
    arrays = [np.array(each) for each in (odds, times, [0.01] * sizes)]
    numbers = [0.01, 1.0, 0.001, 0.0, 1.0, 50.0, 0.3, rng.choice([0.0, 0.1]), rng.choice([0.0, 0.1])]
    given = [7, ((1,), (2,)), *asked, *arrays, tuple(numbers), (rng.randrange(12), rng.random() < 0.2)]
    if depth == 0 and rng.random() < 0.5:
        at = rng.randrange(len(given))
        given[at] = spoilt(rng, given[at], rng.choice(lists).clear)
    return _native.speedups.grow(*given)


@examples(250 * MORE)
@given(st.integers(0, 1 << 40))
def test_sources_may_do_anything_while_a_tree_grows(seed: int) -> None:
    try:
        asks, tokens, parents, depths, children, values, offered = grow(random.Random(seed))
    except Exception as error:  # what a source raises, too
        assert not isinstance(error, SystemError)
        return
    assert 0 <= asks <= 60 and len(values) == len(tokens) - 1 and len(offered) == len(tokens)
    assert len(tokens) == len(parents) == len(depths) == len(children) <= 60
    for node, (parent, token) in enumerate(zip(parents[1:], tokens[1:], strict=True), 1):
        assert children[parent][token] == node and depths[node] == depths[parent] + 1


@pytest.mark.parametrize("name", ["grow", "heard", "best_of", "exponential", "drawn"])
def test_every_function_counts_its_arguments(name: str) -> None:
    assert {each for each in dir(_native.speedups) if not each.startswith("_")} >= {name}
    for count in range(11):
        with pytest.raises((TypeError, ValueError)):
            getattr(_native.speedups, name)(*[object()] * count)
    with pytest.raises(TypeError):
        getattr(_native.speedups, name)(rows=3)


@examples(250 * MORE)
@given(st.integers(0, 1 << 40), st.sampled_from(["normed", "rotated", "attended"]))
def test_operations_take_any_tensors(seed: int, name: str) -> None:
    """Whatever they are given, they answer with a tensor: of the first one's shape, or of no size."""
    assert ordered_attention.obstacle() is None
    rng = random.Random(seed)
    batch, heads, nodes, slots, channels = (rng.choice([1, 1, 2, 3, 9]) for _ in range(5))
    sequences = torch.tensor([[0, slots, slots, rng.randrange(4), rng.choice([0, 3]), *range(nodes)]] * batch).int()
    keys = torch.randn(batch, 1, slots + nodes, channels)
    states = torch.randn(batch, nodes, heads, channels).transpose(1, 2)
    angles = torch.randn(batch, 1, nodes, channels)
    tensors, numbers = {
        "normed": ([torch.randn(nodes, channels), torch.randn(channels)], [1e-5, rng.choice([4, 8, 16, 0]), 1]),
        "rotated": ([states, angles, angles], []),
        "attended": ([states, keys, keys, torch.zeros(batch, 1, nodes, slots + nodes), sequences], [1.0, 1]),
    }[name]
    given = [each.bfloat16() if each.is_floating_point() else each for each in tensors]
    assert getattr(torch.ops.lookahead, name)(*given, *numbers).shape in (given[0].shape, (0,))
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(given))
        given[at] = rng.choice(
            [
                lambda one: one.to(
                    rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32])
                ),
                lambda one: one[..., ::2],
                lambda one: one[: rng.randrange(2)],
                lambda one: one.transpose(0, rng.randrange(one.ndim)) if one.ndim else one,
                lambda one: one[None],
                lambda one: one.expand(3, *one.shape),
                lambda one: one.flatten(),
                lambda one: one[..., : rng.randrange(3)],
                lambda one: torch.cat([one, one], rng.randrange(one.ndim)) if one.ndim else one,
                lambda one: torch.full_like(one, rng.choice([-1, 0, 1, 1 << 20])),
            ]
        )(given[at])
    told = getattr(torch.ops.lookahead, name)(*given, *numbers)
    assert told.shape in (given[0].shape, (0,))

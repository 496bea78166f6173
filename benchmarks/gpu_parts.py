"""What ``benchmarks.gpu`` measures: one function a part, which yields each row as soon as it is known."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import lookahead
from benchmarks import theory
from benchmarks.contest import METHODS, Unit, contest, methods, row, units
from benchmarks.embedding import SHAPES, Shape, embedded
from benchmarks.harness import ROOT, load, timed
from benchmarks.options import MODES
from benchmarks.pretrained import built, home_of
from benchmarks.step_time import WIDTHS, after, curve, random_model
from lookahead.cli.verify import judged
from lookahead.runtime.attention import packed_attention
from lookahead.runtime.split_attention import RowsMask, chunk_length, fused_attention
from lookahead.tuning import bushy_tree

Row = dict[str, Any]
_TINY = (32, 2, 4, 2, 48, 64, True, 8)  # a few thousand parameters, in the order of step_time's fields
_TINY_SHAPE = Shape(48, 3, 8, 4, 64)
_CURVES = {  # Llama 3's, whose vocabulary is a real one
    "1B": (2048, 16, 32, 8, 8192, 128256, True, 64),
    "8B": (4096, 32, 32, 8, 14336, 128256, False, 128),
}
_RACES = (("greedy", "code", "greedy"), ("no-loop", "code-no-loop", "greedy"), ("T 0.8", "code", "t0.8"))
_CHATS = (("greedy", "chat", "greedy"), ("T 0.7", "chat", "t0.7"), ("T 1.0", "chat", "t1.0"))
PRETRAINED = "smollm2-135m"
_COPIED = 4 << 30  # bytes, by which bandwidth is measured


@dataclass(frozen=True)
class Bench:
    """Where to measure; ``quick`` is all parts at tiny shapes, which shows that they work and nothing else."""

    device: str
    quick: bool = False

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def small(self) -> tuple[Any, Any]:
        """A model that can be embedded in larger ones, and its tokenizer; None: prompts are random tokens."""
        if not self.quick:
            return load(None, "float32", self.device)
        model = random_model(_TINY, torch.float32, self.device)
        model.generation_config.pad_token_id = 0
        return model, None

    def large(self, small: Any, name: str, dtype: str) -> Any:
        """The small model at a larger one's cost; ``bundled``: as it is."""
        if name == "bundled":
            return small.to(getattr(torch, dtype))
        model = embedded(small, self.pick(SHAPES[name], _TINY_SHAPE), getattr(torch, dtype), self.device)
        model.generation_config = small.generation_config
        return model

    def pretrained(self, dtype: str) -> tuple[Any, Any] | None:
        """A pretrained model and its tokenizer, if ``benchmarks.real`` has built it."""
        folder = None if self.quick else built(PRETRAINED, home_of(None))
        return load(folder, dtype, self.device) if folder else None

    def texts(self, model: Any, tokenizer: Any, source: str, prompts: int, batch: int, tokens: int) -> Any:
        return units(model, tokenizer, source if tokenizer else "random", prompts, batch, tokens)


def exactness(bench: Bench) -> Iterator[Row]:
    """Texts that differ from plain ``generate``'s; in bfloat16 the verdict says which of them are near ties."""
    tokens = bench.pick(48, 6)
    for dtype in ("float32", "bfloat16"):
        small, tokenizer = bench.small()
        known = {"0.36B": (bench.large(small, "0.36B", dtype), tokenizer, "code")}
        if (found := bench.pretrained(dtype)) is not None:
            known[PRETRAINED] = (*found, "chat")
        known["bundled"] = (bench.large(small, "bundled", dtype), tokenizer, "code")
        for name, (model, tokenizer, source) in known.items():
            for batch in bench.pick((1, 3), (2,)):
                given, _ = bench.texts(model, tokenizer, source, 2 * batch, batch, tokens)
                for mode, method in (("greedy", "auto"), ("greedy", "w7"), ("t0.8", "auto")):
                    place = {"model": name, "dtype": dtype, "batch": batch, "mode": mode, "method": method}
                    yield place | _differences(model, given, mode, method, tokens)


def _differences(model: Any, given: Sequence[Unit], mode: str, method: str, tokens: int) -> Row:
    differ, bugs, looked_at = 0, 0, 0
    for unit in given:
        ids = []
        for settings in ({}, METHODS[method]().settings):
            torch.manual_seed(unit.index)
            ids.append(model.generate(**unit.inputs, max_new_tokens=tokens, **MODES[mode], **settings))
        plain, ours = (text[:, unit.inputs["input_ids"].shape[1] :].tolist() for text in ids)
        differ += sum(mine != theirs for mine, theirs in zip(ours, plain, strict=True))
        if mode == "greedy" and len(ours) == 1 and ours != plain:
            looked_at += 1
            bugs += judged(model, unit.inputs, plain[0], ours[0]).verdict == "bug"
    texts = sum(len(unit.inputs["input_ids"]) for unit in given)
    return {"texts": texts, "differ": differ, "judged": looked_at, "bugs": bugs}


def curves(bench: Bench) -> Iterator[Row]:
    """Passes by their nodes: eagerly, while graphs are made, and replayed; beside what memory allows."""
    rate = theory.bandwidth(bench.device, bench.pick(_COPIED, 1 << 16))
    yield {"what": "bandwidth", "gb_per_s": rate}
    widths, static = bench.pick((WIDTHS, None), ((1, 4), True))
    for name, sizes in bench.pick(_CURVES, {"tiny": _TINY}).items():
        model = random_model(sizes, torch.bfloat16, bench.device)
        _, read = theory.weights(model)
        for context in bench.pick((256, 8192), (40,)):
            place = {"shape": name, "context": context}
            eager = curve(model, context, (1,), rounds=5, static=False)[1]
            for taken in _captures(model, context, widths, static):
                yield {"what": "capture", **place, **taken}
            floor = 1e3 * (read + context * theory.cache_bytes(model)) / (rate["copy"] * 1e9)
            taken = {str(nodes): ms for nodes, ms in curve(model, context, widths, static=static).items()}
            yield {"what": "curve", **place, "pass_ms": taken, "eager_ms": eager, "floor_ms": floor}
        del model


@torch.no_grad()
def _captures(model: Any, context: int, widths: Sequence[int], static: bool | None) -> list[Row]:
    """The first passes of every size, of which one is captured."""
    rows = []
    with after(context, model, 1, max(widths), static) as passes:
        for width in widths:
            trees = [bushy_tree(width, model.config.vocab_size)]
            taken = [1e3 * timed(model.device, partial(passes.forward, trees))[1] for _ in range(4)]
            rows.append({"nodes": width, "first_ms": taken, "route": passes.route, "reason": passes.executor.reason})
    return rows


@torch.no_grad()
def attention(bench: Bench) -> Iterator[Row]:
    """One layer's attention of a tree over a long history, in Llama 3 8B's shape."""
    heads, key_heads, channels = bench.pick((32, 8, 128), (4, 2, 8))
    for history in bench.pick((8192, 32768), (96,)):
        for nodes in bench.pick((1, 8, 64), (1, 4)):
            slots = history + 128
            query, key, value = (
                torch.randn((1, count, length, channels), device=bench.device, dtype=torch.bfloat16)
                for count, length in ((heads, nodes), (key_heads, slots), (key_heads, slots))
            )
            mask = torch.zeros((1, 1, nodes, slots), device=bench.device, dtype=torch.bfloat16)
            mask[..., history:] = torch.finfo(torch.bfloat16).min
            mask[..., history : history + nodes].triu_(1)
            exact = _sdpa(query.float(), key.float(), value.float(), mask.float())
            chunks = bench.pick((slots, 512, 1024, 2048), (slots, 32))
            for name, way in _ways(query, key, value, mask, chunks).items():
                off, ms = (way().float() - exact).abs().max().item(), _launched_ms(bench, way)
                yield {"history": history, "nodes": nodes, "way": name, "ms": ms, "off_by": off}


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask, enable_gqa=True)


def _ways(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, chunks: Sequence[int]
) -> dict[str, Callable[[], Tensor]]:
    """torch's own, heads packed for one kernel, and the keys split as the library does in passes whose shapes come
    again (``unplanned``: in others), and so in ``chunks``; of one node plain decoding's, without a mask."""
    _, heads, nodes, channels = query.shape
    grouped = heads // key.shape[1]
    rows, packed = RowsMask(mask, nodes, grouped), query.reshape(1, key.shape[1], grouped * nodes, channels)

    def split(length: int | None = None, planned: bool = True) -> Tensor:
        with patch("lookahead.runtime.split_attention.chunk_length", (lambda *_: length) if length else chunk_length):
            return fused_attention(packed, key, value, rows, None, planned=planned).reshape(query.shape)

    written = int((mask[0, 0, -1] == 0).sum())
    ways = {
        "sdpa": lambda: _sdpa(query, key, value, mask),
        "packed": lambda: packed_attention(query, key, value, mask, None),
        "split": split,
        "split, unplanned": partial(split, planned=False),
        **{f"split, chunks of {length}": partial(split, length, False) for length in chunks},
        "unmasked": lambda: _sdpa(query, key[:, :, :written], value[:, :, :written], None),
    }
    return {name: way for name, way in ways.items() if nodes == 1 or name != "unmasked"}


def _launched_ms(bench: Bench, run: Callable[[], Tensor], calls: int = 16) -> float:
    """Milliseconds of one call among many, the fastest of five times; on CUDA replayed, as passes are."""

    def several() -> None:
        for _ in range(calls):
            run()

    repeat = several
    if bench.device.startswith("cuda"):
        graph = torch.cuda.CUDAGraph()
        several()  # libraries set themselves up
        with torch.cuda.graph(graph):
            several()
        repeat = graph.replay
    return min(1e3 * timed(bench.device, repeat)[1] / calls for _ in range(5))


def races(shape: str, bench: Bench) -> Iterator[Row]:
    """Every way to decode at a large model's cost, or by a pretrained one; last, because it is compiled, ``generate``
    with a static cache."""
    small, tokenizer = bench.small()
    tokens = bench.pick(64, 6)
    if shape != PRETRAINED:
        model = bench.large(small, shape, "bfloat16")
    elif (found := bench.pretrained("bfloat16")) is not None:
        model, tokenizer = found
    else:
        return
    table, _ = methods(["lookup2", "auto", "w7"], bench.device)
    first: Any = []
    for name, source, mode in _RACES if shape != PRETRAINED else _CHATS:
        texts = bench.texts(model, tokenizer, source, 2, 1, tokens)
        first = first or texts[0][:1]
        yield from _raced(model, table, texts, {"model": shape, "race": name, "mode": mode}, tokens)
    compiled = {"plain": METHODS["plain"](), "static": METHODS["static"]()}
    yield from _raced(model, compiled, (first, []), {"model": shape, "race": "compiled", "mode": "greedy"}, tokens)


def _raced(model: Any, table: Any, texts: Any, place: Row, tokens: int) -> Iterable[Row]:
    results = contest(model, table, texts, MODES[place["mode"]], tokens, 1)
    for name in table:
        yield {**place, "method": name, "label": table[name].label, **row(results, name, tokens)}


def tests(bench: Bench) -> Iterator[Row]:
    """The tests that need a CUDA device, a process for each file."""
    several = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark.gpu" not in file.read_text(encoding="utf-8"):
            continue
        command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-m", "gpu", *several, str(file)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        yield {"file": file.relative_to(ROOT).as_posix(), "status": ran.returncode, **counted(ran.stdout)}


def counted(told: str) -> Row:
    """What pytest says at its end: how many tests passed, failed and so on, and the last lines if some did not pass."""
    lines = told.strip().splitlines() or [""]
    found = re.findall(r"(\d+) (passed|failed|error)", lines[-1])
    counts = {word: int(count) for count, word in found}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return {"passed": counts.get("passed", 0), "failed": failed, "told": lines[-40:] if failed else lines[-1:]}


PARTS: dict[str, tuple[int, Callable[[Bench], Iterator[Row]]]] = {  # with the seconds that each may take at most
    "exactness": (80, exactness),
    "curves": (80, curves),
    "attention": (40, attention),
    "races 1.3B": (130, partial(races, "1.3B")),
    "races 8B": (130, partial(races, "8B")),
    f"races {PRETRAINED}": (35, partial(races, PRETRAINED)),  # nothing where it is not built
    "tests": (150, tests),  # what the others have left
}


def measure(name: str, bench: Bench) -> Iterator[Row]:
    """A part's rows."""
    lookahead.augment_all()
    return PARTS[name][1](bench)

"""Traces with fewer operations: what several of torch's do one after the other, one of `_c/operations.c` does.

A small model's pass on a CPU is two thousand operations of some microseconds each. Here a norm is one in place of
eight, rotary positions are one in place of thirteen, and attention is reached without Python. Numbers are torch's to
the last bit: sums are added in the order of its kernel, which is tried on this machine.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lookahead import _native
from lookahead.models.compat import CLEANED, REPLACED, SHAPELESS
from lookahead.runtime.machine import found_once

_LANES = (8, 16, 4)  # numbers of a vector in torch's kernel for sums: for AVX2, AVX-512 and ARM
_WIDTHS = (16, 64, 100, 576, 896, 1536, 4096, 8200, 20000)  # of lines by which they are told apart

# What transformers' layers do, as the tracer writes it, and what does the same. Whether a model's constants are those
# that are meant, its trace shows: it is compared with the model.
_WIDEN = "%wide = aten::to(%rows, %float, %no, %no, %none)"
_SCALE = """
  %squares = aten::pow(%wide, %two)
  %mean = aten::mean(%squares, %axes, %yes, %none)
  %raised = aten::add(%mean, %epsilon, %one)
  %scale = aten::rsqrt(%raised)
  %scaled = aten::mul(%wide, %scale)
"""
_LLAMA = """
  %back = aten::to(%scaled, %kept, %no, %no, %none)
  %result = aten::mul(%weight, %back)
"""
_GEMMA = """
  %factor = aten::to(%weight, %float, %no, %no, %none)
  %whole = aten::add(%factor, %unit, %one)
  %product = aten::mul(%scaled, %whole)
  %result = aten::type_as(%product, %rows)
"""
_NORMED = """
  %number : float = aten::Float(%epsilon)
  %lanes : int = prim::Constant[value=LANES]()
  %less : int = prim::Constant[value=LESS]()
  %format : int = prim::Constant[value=0]()
  %dense = aten::contiguous(%rows, %format)
  %result = lookahead::normed(%dense, %weight, %number, %lanes, %less)
"""
_ROTARY = """
  %straight = aten::mul(%states, %cosines)
  %size = aten::size(%states, %axis)
  %whole = prim::NumToTensor(%size)
  %halved = aten::floor_divide(%whole, %two)
  %half = aten::Int(%halved)
  %left = aten::slice(%states, %axis, %zero, %half, %one)
  %size2 = aten::size(%states, %axis)
  %whole2 = prim::NumToTensor(%size2)
  %halved2 = aten::floor_divide(%whole2, %two)
  %half2 = aten::Int(%halved2)
  %right = aten::slice(%states, %axis, %half2, %end, %one)
  %minus = aten::neg(%right)
  %parts = prim::ListConstruct(%minus, %left)
  %turned = aten::cat(%parts, %last)
  %across = aten::mul(%turned, %sines)
  %result = aten::add(%straight, %across, %one)
"""
_ROTATED = "%result = lookahead::rotated(%states, %cosines, %sines)"
_ATTEND = "%result = lookahead::attend(%queries, %keys, %values, %mask, %sequences, %scale, %windowed)"
_ALL_SEEN = """
  %channels : int = prim::Constant[value=3]()
  %none : int = prim::Constant[value=0]()
  %step : int = prim::Constant[value=1]()
  %shown = aten::slice(%queries, %channels, %none, %none, %step)
"""
_ATTENDED = """
  %heads : int = prim::Constant[value=1]()
  %nodes : int = prim::Constant[value=2]()
  %states = lookahead::attended(%queries, %keys, %values, %mask, %sequences, %scale, %windowed)
  %result = aten::transpose(%states, %heads, %nodes)
"""


def _rules(lanes: int, turns: bool, masked: bool) -> list[tuple[str, str]]:
    """What stands for what. Of a float32 model the tracer takes the widened rows for the rows."""
    rules = [(_ROTARY, _ROTATED)]
    if not turns:
        rules.append((_ATTEND, _ATTENDED if masked else _ALL_SEEN + _ATTENDED.replace("%mask", "%shown")))
    for less, weighted in enumerate((_LLAMA, _GEMMA)):
        instead = _NORMED.replace("LANES", str(lanes)).replace("LESS", str(less))
        rules.append((_WIDEN + _SCALE + weighted, instead))
        rules.append((_SCALE.replace("%wide", "%rows") + weighted, instead))
    return rules


def _replace(graph: Any, body: str, instead: str) -> None:
    """Put ``instead`` wherever a graph computes its ``%result`` as ``body`` does."""
    inputs = sorted(set(re.findall(r"%\w+", body)) - set(re.findall(r"(%\w+) =", body)))
    whole = [f"graph({', '.join(inputs)}):\n  {part.strip()}\n  return (%result)" for part in (body, instead)]
    getattr(torch._C, REPLACED)(*whole, graph)


def _change(graph: Any, passes: Sequence[str]) -> None:
    for name in passes:
        getattr(torch._C, f"_jit_pass_{name}")(graph)


def _norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(rows.dtype)


def _lanes() -> int:
    """How many lanes torch's kernel for sums has; 0 = its order is another."""
    source = torch.Generator().manual_seed(0)
    for lanes in _LANES:
        tried = [torch.rand(9, width, generator=source) for width in _WIDTHS]
        ours = [torch.ops.lookahead.normed(rows, torch.ones(rows.shape[1]), 1e-5, lanes, 0) for rows in tried]
        if all(torch.equal(one, _norm(rows, torch.ones(()), 1e-5)) for one, rows in zip(ours, tried, strict=True)):
            return lanes
    return 0


def fused(graph: Any, turns: bool, masked: bool) -> list[Any]:
    """A trace's graph with fewer operations, if there is one; ``turns``: some nodes are attended to one by one;
    ``masked``: there is a mask."""
    lanes = 0 if _native.speedups is None or not _native.operations() else found_once("sums", [], _lanes)
    if not lanes:
        return []
    graph = graph.copy()
    try:
        _change(graph, SHAPELESS)  # what cleans a graph would take its shapes for those of any pass
        for body, instead in _rules(lanes, turns, masked):
            _replace(graph, body, instead)
        _change(graph, CLEANED)
    except (AttributeError, RuntimeError):  # another torch
        return []
    return [graph]

"""Measure what passes cost on this machine; the curves' files (``lookahead.generation.curves``) are named here, too."""

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead.draft.latency import NODES, StepTimes
from lookahead.generation.curves import cache_file as cache_file
from lookahead.generation.curves import cache_folder as cache_folder
from lookahead.generation.curves import cached as cached
from lookahead.generation.curves import describe as describe
from lookahead.models.traits import ModelTraits
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.packing import packed_weights
from lookahead.runtime.session import bare_chain, bare_model
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import refusal, trace_now, traces_to_measure, untraceable
from lookahead.runtime.tree import TreeModel
from lookahead.sources.recycling import BEST
from lookahead.support import route as support

_log = logging.getLogger("lookahead")
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 400  # of a sweep
_SURELY_S = 5.0  # that a second curve may begin after, however little time there is
_MOST_WARM_UPS = 4  # passes of a size: a CUDA graph is run, captured and compared before it is only replayed

Report = Callable[[float], None]
Samples = dict[int, list[float]]  # milliseconds of passes, by the number of nodes


@torch.no_grad()
def sweep(
    model: PreTrainedModel,
    *,
    batch: int = 1,
    static: bool | None = None,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = (64, 512),
    seconds: float = 8.0,
    traced: bool = False,
    packed: Packed | None = None,
    save: bool = True,
    bounded: bool = False,
    report: Report | None = None,
) -> StepTimes:
    """Measure the latency curve of a model as it is loaded: the median of each size of pass, as a decode runs it, with
    the best next tokens at every node.

    The sizes take turns, so that a slow moment of the machine hits all of them.

    Args:
        batch: sequences in a pass.
        static: as for a strategy.
        nodes: sizes to measure, nodes a sequence.
        contexts: lengths of the KV cache to measure at, in tokens; those past the model's last position are left out.
        seconds: about how long to measure, warm-up excluded; every size runs three times at least.
        traced: measure traced passes, which longer decodes on a CPU run.
        packed: measure passes on these packed weights, which longer decodes of large models on a CPU run.
        bounded: let nothing but the first two sizes, once, begin later than ``seconds`` after the first pass: larger
            sizes and later contexts that are not reached by then are left out.
        save: keep the curve in the cache folder, where the automatic mode finds it.
        report: called with the share that is done, from 0 to 1.

    Raises:
        LookaheadError: the model can follow neither trees nor linear drafts, or is to be traced and cannot be.
    """
    traits = ModelTraits.of(model)
    support.check_model(model, traits)
    route, reason = support.route(model, traits)
    if route == "tree":
        reason = support.self_test(model, traits)
    elif traced and route == "chain":
        raise refusal(str(reason))
    if route == "plain" or (route == "tree" and reason is not None):
        raise LookaheadError(f"There are no passes to measure: {reason}. This model falls back to plain decoding.")
    about = describe(model, batch, static, traced, packed is not None)
    times = StepTimes(about=about)
    limit = traits.position_table or 1 << 30
    usable = [context for context in contexts if context + max(nodes) < limit] or [max(1, (limit - max(nodes)) // 2)]
    tell = report or (lambda share: None)
    measure = _linear if route == "chain" else partial(_trees, static=static, traced=traced, packed=packed)
    measure = partial(measure, bounded=bounded)
    end = perf_counter() + seconds if bounded else inf
    for done, context in enumerate(usable):
        if done and perf_counter() > end:
            break
        prompt = [[(17 + 13 * at) % traits.vocab_size for at in range(context)]] * batch
        told = partial(_tell_part, tell, done, len(usable))
        taken = measure(model, torch.tensor(prompt, device=traits.device), nodes, seconds / len(usable), told)
        for count, samples in taken.items():
            times.put(count, context, statistics.median(samples))
    tell(1.0)
    if save:
        try:
            times.save(cache_file(about))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            warning = "The latency curve is not saved: %s. Set LOOKAHEAD_CACHE to a folder that can be written to."
            _log.warning(warning, error)
    return times


def sweep_all(
    model: PreTrainedModel, context: int, *, batch: int = 1, seconds: float = 8.0, report: Report | None = None
) -> tuple[StepTimes, StepTimes]:
    """Measure and save two curves: passes as long decodes run them, and as transformers' own code does.

    They are one curve where passes are neither traced nor captured as CUDA graphs, nor weights packed, and where the
    model's own passes have taken all of the time. ``context`` is
    the KV cache's length, in tokens, that matters most; shorter and longer ones are measured, too. ``seconds`` is about
    how long to measure in all; sizes and contexts that this is too short for are left out.
    """
    with torch.no_grad():
        executor, traced = describe(model)["executor"], untraceable(model) is None
        packed = packed_weights(model, worth_ms=inf) if executor == "eager" else None
    parts = 2 if traced or executor == "cuda graphs" or packed is not None else 1
    tell = report or (lambda share: None)
    contexts = list(dict.fromkeys((context, min(64, context), 4 * context)))
    settings: dict[str, Any] = {"batch": batch, "contexts": contexts, "seconds": seconds / parts, "bounded": True}
    end = perf_counter() + max(seconds, _SURELY_S)
    own = sweep(model, **settings, static=False, report=partial(_tell_part, tell, 0, parts))
    if parts == 1 or perf_counter() > end:
        return own, own
    settings["nodes"] = [count for count in NODES if count <= own.largest]  # others would take too long again
    try:
        return sweep(model, **settings, traced=traced, packed=packed, report=partial(_tell_part, tell, 1, parts)), own
    except LookaheadError:  # then decodes are not traced either
        tell(1.0)
        return own, own


def _tell_part(tell: Report, part: int, parts: int, share: float) -> None:
    tell((part + share) / parts)


def _linear(
    model: PreTrainedModel, prompt: Tensor, nodes: Sequence[int], seconds: float, report: Report, bounded: bool
) -> Samples:
    vocab = ModelTraits.of(model).vocab_size
    drafts = {count: [TokenTree.chain(0, [node % vocab for node in range(1, count)])] * len(prompt) for count in nodes}
    with bare_chain(model, prompt) as chain:
        chain.hold()
        return _measure(chain, drafts, seconds, report, bounded)


def _trees(
    model: PreTrainedModel,
    prompt: Tensor,
    nodes: Sequence[int],
    seconds: float,
    report: Report,
    bounded: bool,
    *,
    static: bool | None,
    traced: bool,
    packed: Packed | None,
) -> Samples:
    batch, vocab = len(prompt), ModelTraits.of(model).vocab_size
    drafts = {count: [bushy_tree(count, vocab)] * batch for count in nodes}
    traces = traces_to_measure(model, packed) if traced else None
    traced_by = None if traces is None else partial(TracedExecutor, traces)
    with bare_model(model, prompt, max(nodes) + 1, static=static, traced=traced_by, packed=packed) as view:
        if traced:
            trace_now(model, view, drafts.values())
        samples = _measure(view, drafts, seconds, report, bounded)
        if traces is not None and traces.failure is not None:
            raise refusal(traces.failure)
    return samples


def bushy_tree(count: int, vocab: int) -> TokenTree:
    """A tree of ``count`` nodes in which every node has up to two children, about the shape of real drafts."""
    parents = [-1] + [(node - 1) // 2 for node in range(1, count)]
    return TokenTree.from_parents([node % vocab for node in range(count)], parents)


def _measure(
    model: TreeModel | LinearModel, drafts: dict[int, list[TokenTree]], seconds: float, report: Report, bounded: bool
) -> Samples:
    begin, samples = perf_counter(), Samples()
    for count, trees in drafts.items():  # kernels for a new shape are made at its first passes
        if bounded and len(samples) > 1 and perf_counter() - begin > seconds / 2:
            break
        samples[count] = []
        for tree in trees:
            tree.top_k = BEST
        for _ in range(_MOST_WARM_UPS):
            model.forward(trees)
            if model.typical:
                break
    start, rounds = begin if bounded else perf_counter(), 0
    while not rounds or perf_counter() - start < seconds or (rounds < _LEAST_ROUNDS and not bounded):
        for count in samples if rounds % 2 else reversed(samples):
            before = perf_counter()
            model.forward(drafts[count])
            samples[count].append(1e3 * (perf_counter() - before))
        rounds += 1
        report(min(1.0, (perf_counter() - start) / seconds))
        if rounds == _MOST_ROUNDS:
            break
    return samples

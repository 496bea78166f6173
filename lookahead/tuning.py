"""What a pass costs on this machine: which curve belongs to a model, where curves are kept, and the sweep."""

import hashlib
import json
import logging
import os
import platform
import statistics
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead.draft.latency import FORMAT, NODES, StepTimes
from lookahead.models.traits import input_device, position_table, vocabulary
from lookahead.runtime.cuda_graphs.executor import dynamic_reason
from lookahead.runtime.linear import ChainModel
from lookahead.runtime.session import bare_chain, bare_model
from lookahead.runtime.tracing.record import refusal, trace_now, untraceable
from lookahead.runtime.tracing.replay import Traces
from lookahead.runtime.tree import FusedModel
from lookahead.support import route as support

_log = logging.getLogger("lookahead")
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 400  # of a sweep


@lru_cache
def _processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(
    model: PreTrainedModel, batch: int = 1, static: bool | None = None, traced: bool = False
) -> dict[str, Any]:
    """All that the curve depends on: shape and dtypes of the model, attention, device, threads, versions, batch.

    Args:
        model: the model.
        batch: rows of a pass.
        static: as for ``fused_model``; passes with static shapes have a curve of their own.
        traced: so have passes that are traced, see `runtime.tracing`.
    """
    config = model.config.get_text_config()
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if (isinstance(value, int | float) or (isinstance(value, list) and name != "architectures"))
        and not name.endswith("token_id")
    }
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + parameter.numel()
    device = model.device
    about = {
        "model": type(model).__name__,
        "shape": shape,
        "parameters": dtypes,
        "attention": str(config._attn_implementation),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {_processor()}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "batch": batch,
        "static": dynamic_reason(static, model) is None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return about | ({"traced": True} if traced else {})


def cache_folder() -> Path:
    """Where curves are kept: ``$LOOKAHEAD_CACHE``, else ``lookahead`` in the user's cache folder."""
    given = os.environ.get("LOOKAHEAD_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "lookahead"


def cache_file(about: dict[str, Any]) -> Path:
    """The file of a curve in the cache folder; another one when anything in ``about`` differs."""
    text = json.dumps([FORMAT, about], sort_keys=True, default=str)
    return cache_folder() / f"step-times-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def cached(
    model: PreTrainedModel, batch: int = 1, static: bool | None = None, traced: bool = False
) -> StepTimes | None:
    """The saved curve of this model on this machine; None where there is none that can be read."""
    try:
        if not any(cache_folder().glob("step-times-*")):
            return None
        return StepTimes.load(cache_file(describe(model, batch, static, traced)), frozen=False)
    except (LookaheadError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def step_times(
    model: PreTrainedModel,
    batch: int,
    memory: dict[tuple[Hashable, ...], StepTimes],
    given: StepTimes | None,
    static: bool | None = None,
    traces: Traces | None = None,
) -> StepTimes:
    """The curve for a call: what the caller gave, what earlier calls learnt, what was saved, or one that is empty.

    Args:
        model: the model.
        batch: rows of a pass.
        memory: curves of earlier calls on the model; a new one is put there.
        given: the caller's.
        static: as for ``fused_model``.
        traces: by which passes are run. Saved curves are of passes without any, or of nothing but traced ones.
    """
    if given is not None:
        return given
    config = model.config.get_text_config()
    attention, fixed = str(config._attn_implementation), dynamic_reason(static, model) is None
    traced = frozenset(traces.made) if traces is not None else frozenset()
    key = (batch, model.dtype, model.device, attention, fixed, torch.get_num_threads(), traced)
    if key not in memory:
        near = [curve for other, curve in memory.items() if other[:-1] == key[:-1]]
        everything = {kind.single for kind in traced} == {True, False}
        saved = cached(model, batch, static, everything) if everything or not traced else None
        memory[key] = saved or (near[-1].as_guess() if near else StepTimes())
    return memory[key]


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
    save: bool = True,
    report: Callable[[float], None] | None = None,
) -> StepTimes:
    """Measure the step-time curve of a model as it is loaded.

    All sizes are run in turn, again and again, so that a slow moment hits all of them; what counts is the median.

    Args:
        model: a causal model that lookahead supports.
        batch: rows of a pass.
        static: as for ``fused_model``.
        nodes: sizes to measure, nodes a row.
        contexts: histories to measure at, in tokens; those the model has no positions for are left out.
        seconds: about how long to measure, warm-up left out; every size is run three times at least.
        traced: measure traced passes, which decodes on a CPU run after a while, see `runtime.tracing`.
        save: keep the curve in the cache folder, where later automatic decodes find it.
        report: told the share that is done, from 0 to 1.

    Returns:
        The curve.

    Raises:
        LookaheadError: the model can follow neither a tree nor a chain, or is to be traced and cannot be.
    """
    support.check_model(model)
    route, reason = support.route(model)
    if route == "plain":
        raise LookaheadError(f"There are no passes to measure: {reason}. This model is decoded plainly.")
    if route == "tree":
        support.self_test(model)
    elif traced:
        raise refusal(str(reason))
    about = describe(model, batch, static, traced)
    times = StepTimes(about=about)
    limit = position_table(model) or 1 << 30
    usable = [context for context in contexts if context + max(nodes) < limit] or [max(1, (limit - max(nodes)) // 2)]
    vocab = vocabulary(model)
    for done, context in enumerate(usable):

        def tell(share: float, done: int = done) -> None:
            if report is not None:
                report((done + share) / len(usable))

        prompt = torch.tensor(
            [[(17 + 13 * place) % vocab for place in range(context)]] * batch, device=input_device(model)
        )
        if route == "chain":
            chains = {
                count: [TokenTree.chain(0, [node % vocab for node in range(1, count)])] * batch for count in nodes
            }
            with bare_chain(model, prompt) as chain:
                chain.hold()
                samples = _measure(chain, chains, seconds / len(usable), tell)
        else:
            trees = {count: [bushy_tree(count, vocab)] * batch for count in nodes}
            with bare_model(model, prompt, max(nodes) + 1, static=static) as fused:
                traces = trace_now(model, batch, fused, trees.values()) if traced else None
                samples = _measure(fused, trees, seconds / len(usable), tell)
                if traces is not None and traces.failure is not None:
                    raise refusal(traces.failure)
        for count, taken in samples.items():
            times.put(count, context, statistics.median(taken))
    if report is not None:
        report(1.0)
    if save:
        try:
            times.save(cache_file(about))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            _log.warning(
                "The step times are not kept for later: %s. Name a folder that can be written to by LOOKAHEAD_CACHE.",
                error,
            )
    return times


def sweep_all(
    model: PreTrainedModel,
    context: int,
    *,
    batch: int = 1,
    seconds: float = 8.0,
    report: Callable[[float], None] | None = None,
) -> tuple[StepTimes, StepTimes]:
    """Measure and save the curves of passes as decodes run them in the long run, and as transformers' own code does.

    Both are one and the same where passes are not traced.

    Args:
        model, batch, report: see :func:`sweep`.
        context: the history that matters most, in tokens; shorter and longer ones are measured beside it.
        seconds: about how long to measure in all.
    """

    def told(part: int, share: float) -> None:
        if report is not None:
            report((part + share) / parts)

    with torch.no_grad():
        parts = 2 if untraceable(model) is None else 1
    contexts = sorted({min(64, context), context, 4 * context})
    settings: dict[str, Any] = {"batch": batch, "contexts": contexts, "seconds": seconds / parts}
    own = sweep(model, **settings, report=partial(told, 0))
    if parts == 1:
        return own, own
    try:
        return sweep(model, **settings, traced=True, report=partial(told, 1)), own
    except LookaheadError:  # then decodes are not traced either
        told(1, 1.0)
        return own, own


def _measure(
    fused: FusedModel | ChainModel,
    trees: dict[int, list[TokenTree]],
    seconds: float,
    report: Callable[[float], None],
) -> dict[int, list[float]]:
    """Milliseconds of passes over each of ``trees``."""
    samples: dict[int, list[float]] = {count: [] for count in trees}
    for drafts in trees.values():  # kernels for a new shape are made at its first passes
        fused.forward(drafts)
    start = perf_counter()
    rounds = 0
    while rounds < _LEAST_ROUNDS or (perf_counter() - start < seconds and rounds < _MOST_ROUNDS):
        for count in trees if rounds % 2 else reversed(trees):
            begin = perf_counter()
            fused.forward(trees[count])
            samples[count].append(1e3 * (perf_counter() - begin))
        rounds += 1
        report(min(1.0, (perf_counter() - start) / seconds))
    return samples


def bushy_tree(count: int, vocab: int) -> TokenTree:
    """A tree of ``count`` nodes in which every node has up to two children, which is about what is drafted."""
    return TokenTree.from_parents(
        [node % vocab for node in range(count)], [-1] + [(node - 1) // 2 for node in range(1, count)]
    )

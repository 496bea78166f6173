"""Measure what passes cost on this machine, and which drafts that recommends. Curves' files are named here, too."""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead.chat_format import built_in, prompt_ids
from lookahead.draft.latency import NODES, StepTimes
from lookahead.generation.curves import cache_file as cache_file
from lookahead.generation.curves import cached as cached
from lookahead.generation.curves import describe as describe
from lookahead.models.traits import ModelTraits
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.machine import cache_folder as cache_folder
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.packing import packed_weights
from lookahead.runtime.session import bare_chain, bare_model
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import refusal, trace_now, traces_to_measure, untraceable
from lookahead.runtime.tree import TreeModel
from lookahead.sources.recycling import BEST
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead
from lookahead.support import route as support

_log = logging.getLogger("lookahead")
_LADE = ("window_size", "ngram_size", "verification_set_size")  # W, N, G
# Nodes, and W/N/G: they take turns, so that some of both are tried where time is short.
_TRIED = "4 1/4/2 8 1/5/5 16 1/5/10 24 4/4/4 32 3/5/5 48 7/5/7 64 10/5/10 96 15/5/15 128"
SIZES = [
    dict(zip(_LADE if "/" in each else ("nodes",), map(int, each.split("/")), strict=True)) for each in _TRIED.split()
]
_PROMPTS, _LEAST_S = 8, 0.1  # prompts that are tried, at most; seconds for a size, at least
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 400  # of a sweep
_SURELY_S = 5.0  # that a second curve may begin after, however little time there is
_MOST_WARM_UPS = 4  # passes of a size: a CUDA graph is run, captured and compared before it is only replayed

Notify = Callable[[float], None]
Samples = dict[int, list[float]]  # milliseconds of passes, by the number of nodes
Trees = dict[int, list[TokenTree]]  # of a pass, by the number of nodes


@dataclass(frozen=True)
class Tuned:
    """Costs of a model's passes on this machine, and the sizes of drafts that they recommend.

    What was tried is told by its settings of :class:`Lookahead`, ``"S"``, ``"drafted"`` (nodes a pass, on average), and
    ``"speedup"``: S over the cost of such a pass, against ``plain_curve``'s over one token; without prefill.
    """

    curve: StepTimes  # of passes as longer decodes run them, for Lookahead(tuning=curve)
    plain_curve: StepTimes  # of passes as transformers' own code runs them
    context: int  # tokens in the KV cache that speedups are told for
    budgets: tuple[dict[str, Any], ...]  # tried numbers of nodes
    published: tuple[dict[str, Any], ...]  # tried W, N and G
    left_out: int  # sizes that there was no time to try
    saved: tuple[Path, ...]  # files of the curves, which later calls of generate find
    nodes: int  # drafted nodes a pass; 0 where no draft pays, or none was made in time
    window_size: int  # W; it, N and G are those of lookahead decoding as published
    ngram_size: int
    verification_set_size: int


def best(tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The size that promises the most. Where time was up before anything was drafted, faster passes promised it."""
    return max(tried, key=lambda row: (row["drafted"] > 0.0, row["speedup"]))


def tune(
    model: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[Any] | Tensor | None = None,
    *,
    seconds: float = 16.0,
    new_tokens: int = 96,
    batch: int = 1,
    raw: bool = False,
    report: Callable[[str, float], None] | None = None,
) -> Tuned:
    """Measure the latency curve of a model as it is loaded, save it where the automatic mode finds it, and recommend
    sizes of drafts, as ``lookahead tune`` does.

    Args:
        tokenizer: of the texts; token ids need none.
        prompts: what drafts are tried on: texts, which are asked in the tokenizer's chat template if it has one, or
            token ids, ``[token]`` or ``[1, token]``. The first eight are decoded, greedily, as far as time allows.
            None: the built-in prompts that suit the model.
        seconds: about how long to measure passes and to try drafts, together.
        new_tokens: most tokens to write after a prompt.
        batch: sequences in a pass.
        raw: texts as they are, also where there is a chat template.
        report: called with "passes" or "drafts", and the share of their time that is over, from 0 to 1.

    Raises:
        LookaheadError: an argument is wrong, or the model can follow neither trees nor linear drafts.
    """
    begin, ids = perf_counter(), _checked(model, tokenizer, prompts, seconds, new_tokens, batch, raw)
    context, tell = max(map(len, ids)) + new_tokens // 2, report or (lambda stage, share: None)
    curve, own = sweep_all(model, context, batch=batch, seconds=seconds / 2, report=partial(tell, "passes"))
    found: list[dict[str, Any]] = []
    for done, sizes in enumerate(SIZES):
        tell("drafts", done / len(SIZES))
        left = seconds - (perf_counter() - begin)
        if left > 0.0 or len(found) < 2:
            each_s = max(_LEAST_S, left / (len(SIZES) - len(found)))
            length, drafted = _acceptance(model, ids, new_tokens, sizes, each_s)
            speedup = length / (curve.ms(round(drafted) + 1, context) / own.ms(1, context))
            found.append(sizes | {"S": length, "drafted": drafted, "speedup": speedup})
    tell("drafts", 1.0)
    budgets, published = (tuple(row for row in found if ("nodes" in row) == first) for first in (True, False))
    budget, sizes = best(budgets), best(published)
    nodes = budget["nodes"] if budget["drafted"] and budget["speedup"] > 1.0 else 0
    saved = tuple(filter(Path.is_file, dict.fromkeys(cache_file(each.about) for each in (own, curve))))
    left_out = len(SIZES) - len(found)
    return Tuned(curve, own, context, budgets, published, left_out, saved, nodes, *(sizes[name] for name in _LADE))


def _checked(model: Any, tokenizer: Any, prompts: Any, seconds: Any, new_tokens: Any, batch: Any, raw: bool) -> Any:
    """The token ids of the prompts, lists; whatever is wrong is refused before anything is measured."""
    for name, value in {"seconds": seconds, "new_tokens": new_tokens, "batch": batch}.items():
        kind: Any = float | int if name == "seconds" else int
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < inf:
            raise LookaheadError(f"{name} must be a{' whole' * (kind is int)} number above 0: got {value!r}.")
    if not hasattr(model, "generate"):
        raise LookaheadError(f"model must be a loaded model, as of lookahead.load_model: got {model!r:.60}.")
    given = prompts if prompts is not None or tokenizer is None else built_in(tokenizer, raw)
    if isinstance(given, str) or not isinstance(given, Sequence | Tensor) or not len(given):
        wanted = "a list of texts, or of lists of token ids, or None where a tokenizer is given"
        raise LookaheadError(f"prompts must be {wanted}: got {given!r:.60}.")
    ids, traits = [_ids(tokenizer, prompt, raw) for prompt in given[:_PROMPTS]], ModelTraits.of(model)
    for prompt in ids:
        support.check(model, traits, torch.tensor([prompt], dtype=torch.long), {})
        if (reach := len(prompt) + new_tokens) > (traits.depth_limit or reach):
            told = f"A prompt of {len(prompt)} tokens with {new_tokens} new ones (new_tokens) reaches past the model's"
            raise LookaheadError(f"{told} {traits.depth_limit} positions. Shorten it, or ask for fewer.")
    if (obstacle := support.training_obstacle(model)) is not None:
        raise LookaheadError(f"{traits.name} {obstacle}.")
    return ids


def _ids(tokenizer: Any, prompt: Any, raw: bool) -> list[int]:
    if isinstance(prompt, str) and tokenizer is not None:
        return prompt_ids(tokenizer, prompt, raw)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
        wanted = "a list of token ids, or a text where a tokenizer is given"
        raise LookaheadError(f"A prompt must be {wanted}: got {prompt!r:.60}.")
    return list(ids)


def _acceptance(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, sizes: dict[str, Any], seconds: float
) -> tuple[float, float]:
    """S, and the mean number of drafted nodes a pass, on as many prompts, and as much of the last, as time allows."""
    stats, end = DecodingStats(), perf_counter() + seconds
    # No text here is padded, but without a token for it transformers would warn at every call.
    settings: dict[str, Any] = {"pad_token_id": model.generation_config.pad_token_id or 0, "max_new_tokens": new_tokens}
    for prompt in prompts:
        ids, settings["max_time"] = torch.tensor([prompt], device=model.device), end - perf_counter()
        settings |= {"attention_mask": torch.ones_like(ids), "custom_generate": Lookahead(seed=0, **sizes)}
        stats += model.generate(ids, do_sample=False, num_beams=1, return_dict_in_generate=True, **settings).stats
        if perf_counter() >= end:
            break
    return stats.mean_acceptance_length, stats.drafted / max(1, stats.row_steps)


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
    report: Notify | None = None,
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
    linear = route == "chain"
    if route == "tree":
        reason = support.self_test(model, traits)
    elif traced and linear:
        raise refusal(str(reason))
    if route == "plain" or (route == "tree" and reason is not None):
        raise LookaheadError(f"There are no passes to measure: {reason}. This model falls back to plain decoding.")
    about = describe(model, batch, static, traced, packed is not None)
    times = StepTimes(about=about)
    limit = traits.position_table or 1 << 30
    usable = [context for context in contexts if context + max(nodes) < limit] or [max(1, (limit - max(nodes)) // 2)]
    drafts = {count: [bushy_tree(count, traits.vocab_size, 1 if linear else 2)] * batch for count in nodes}
    tell = report or (lambda share: None)
    end = perf_counter() + seconds if bounded else inf
    for done, context in enumerate(usable):
        if done and perf_counter() > end:
            break
        prompt = [[(17 + 13 * at) % traits.vocab_size for at in range(context)]] * batch
        told = partial(_tell_part, tell, done, len(usable))
        ids = torch.tensor(prompt, device=traits.device)
        passes: Any = bare_chain(model, ids) if linear else _passes(model, ids, drafts, static, traced, packed)
        with passes as view:
            if linear:
                view.hold()
            taken = _measure(view, drafts, seconds / len(usable), told, bounded)
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
    model: PreTrainedModel, context: int, *, batch: int = 1, seconds: float = 8.0, report: Notify | None = None
) -> tuple[StepTimes, StepTimes]:
    """Measure and save two curves: passes as long decodes run them, and as transformers' own code does.

    They are one curve where passes are neither traced nor captured as CUDA graphs, nor weights packed, and where the
    model's own passes have taken all of the time. ``context`` is the KV cache's length, in tokens, that matters most;
    shorter and longer ones are measured, too. ``seconds`` is about how long to measure in all; sizes and contexts that
    this is too short for are left out.
    """
    with torch.no_grad():
        executor, traced = describe(model)["executor"], untraceable(model) is None
        weights = packed_weights(model, worth_ms=inf) if executor == "eager" else None
        packed = None if weights is None else Packed(weights)
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


def _tell_part(tell: Notify, part: int, parts: int, share: float) -> None:
    tell((part + share) / parts)


@contextmanager
def _passes(
    model: PreTrainedModel, prompt: Tensor, drafts: Trees, static: bool | None, traced: bool, packed: Packed | None
) -> Iterator[TreeModel]:
    """A view whose passes can be measured; whether they could be traced shows at the end."""
    traces = traces_to_measure(model, packed) if traced else None
    traced_by = None if traces is None else partial(TracedExecutor, traces)
    with bare_model(model, prompt, max(drafts) + 1, static=static, traced=traced_by, packed=packed) as view:
        if traced:
            trace_now(model, view, drafts.values())
        yield view
        if traces is not None and traces.failure is not None:
            raise refusal(traces.failure)


def bushy_tree(count: int, vocab: int, children: int = 2) -> TokenTree:
    """A tree of ``count`` nodes in which every node has up to two children, about the shape of real drafts."""
    parents = [-1] + [(node - 1) // children for node in range(1, count)]
    return TokenTree.from_parents([node % vocab for node in range(count)], parents)


def _measure(model: TreeModel | LinearModel, drafts: Trees, seconds: float, report: Notify, bounded: bool) -> Samples:
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

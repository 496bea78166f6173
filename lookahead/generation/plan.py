"""The plan of a call: its route, and all that follows from the arguments, with every refusal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from jacobi import LookaheadError, Wants
from lookahead.draft.strategy import DraftStrategy as Strategy
from lookahead.generation.call import Call
from lookahead.models.traits import boundary
from lookahead.parallel.split import refusal
from lookahead.support import route as support
from lookahead.support.bits import Bits, Texts, bits_of, nothing_kept
from lookahead.verify.typical import check_paths


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is decoded; ``route``, ``reason`` as in :class:`lookahead.support.route.Routed`."""

    call: Call
    strategy: Strategy | None  # how it drafts; None = it does not
    route: support.Route
    reason: str | None
    new_tokens: int = 0  # that it writes at most
    wants: Wants = field(default_factory=Wants)  # what drafts are told of passes
    rule: Callable[[Tensor], Tensor] | None = None  # what a lossy call may accept; None = the text is exact
    traces: bool = False  # passes may be traced
    packs: bool = False  # and run on packed weights
    bits: Bits = field(default_factory=lambda: Bits("plain"))  # what the numbers of passes keep


def plan_of(strategy: Strategy | None, call: Call, *, test: bool = True) -> Plan:
    """The plan of a call; a LookaheadError tells why it cannot be decoded. Without ``test`` the model's self-test, the
    last thing that may lead to plain decoding, is left to the caller."""
    new_tokens = call.sequences().most_new
    support.check(call.model, call.traits, call.input_ids, call.kwargs)
    found = support.plan(call.model, call.traits, call.input_ids, call.kwargs, call.cache, new_tokens)
    plan = Plan(call, strategy, found.route, found.reason, new_tokens)
    if found.route != "plain":
        plan = replace(plan, bits=_bits(plan, None)) if strategy is None else _drafting(plan, strategy)
    changed = support.self_test(call.model, call.traits) if test and found.route == "tree" else None
    return plan if changed is None else replace(plan, route="plain", reason=changed)


def _drafting(plan: Plan, strategy: Strategy) -> Plan:
    """The plan with what its strategy wants, and with what refuses the call."""
    call, chain = plan.call, plan.route == "chain"
    if chain and strategy.static is True:
        raise LookaheadError(f"static=True cannot be used: {plan.reason}. Leave static unset, or set it to False.")
    rule = strategy.rule if call.config.do_sample else None
    if rule is not None:
        check_paths(call.batch, call.processors, call.criteria, in_lockstep=chain)
    drawn = bool(call.config.do_sample) and strategy.verification == "exact" and rule is None
    size = {"batch": call.batch, "vocab_size": call.traits.vocab_size, "new_tokens": plan.new_tokens}
    wants = strategy.wants(**size, drawn=drawn)
    strategy.check(call.model)
    wants = replace(wants, taps=strategy.taps(call.model))
    own = strategy.static or call.traits.is_sharded  # passes that neither fits
    packs = strategy.pack and not (own or call.traits.is_encoder_decoder) and call.traits.device.type == "cpu"
    bits = _bits(plan, strategy, drawn != bool(call.config.do_sample), bool(own))
    plan = replace(plan, wants=wants, rule=rule, traces=strategy.traces and not own, packs=packs, bits=bits)
    inexact = bool(call.config.do_sample) and strategy.verification != "exact"
    if getattr(strategy, "parallel", None) is not None:
        _check_split(plan, strategy, inexact)
    elif call.traits.is_sharded and inexact:
        raise LookaheadError("verification= other than 'exact' cannot be used with tensor parallelism. Leave it out.")
    return plan


def _bits(plan: Plan, strategy: Strategy | None, lossy: bool = False, own: bool = False) -> Bits:
    """What the call's numbers keep, unless drafts have a say in the text."""
    call, wanted = plan.call, None if strategy is None else strategy.repeatable
    if lossy:
        return nothing_kept("what is accepted depends on drafts", wanted)
    obstacle = "passes are static, or the model is sharded" if own else None
    count, width = call.input_ids.shape
    padded = count == 1 and call.traits.device.type == "cpu" and len(call.prompts()[0]) < width
    texts = Texts(count, width + plan.new_tokens, padded)
    bits = bits_of(call.model, call.traits, plan.route, wanted, texts, obstacle)
    other = strategy is not None and strategy.attention is not None  # than plain decoding's
    return bits.repeatable() if other else bits


def _check_split(plan: Plan, strategy: Strategy, inexact: bool) -> None:
    """Refuse a call whose trees cannot be split over ranks."""
    call, past = plan.call, plan.call.input_ids.shape[1]
    change = boundary(call.traits, past, [past - 1])
    reasons = {
        "the model is sharded itself": call.traits.is_sharded,
        f"the model is given no trees ({plan.reason})": plan.route != "tree",
        "drafts read hidden states, of which each rank has a part": bool(plan.wants.taps),
        "verification is not exact": inexact,
        "static=True has passes of its own": strategy.static is True,
        "the model is another one further on": change is not None and change[0] < past + plan.new_tokens,
    }
    for why, holds in reasons.items():
        if holds:
            raise refusal(why)


def assisted(strategy: Strategy, config: GenerationConfig, given: Mapping[str, Any]) -> Strategy:
    """The strategy, with what a call asks to draft with: its ``assistant_model``, as many of the model's own layers as
    ``assistant_early_exit`` says, or with ``use_mtp`` the model's MTP layers."""
    mtp, early_exit, draft = getattr(config, "use_mtp", None), config.assistant_early_exit, given.get("assistant_model")
    if mtp is not None and not isinstance(mtp, bool):
        raise LookaheadError(f"use_mtp must be True or False: got {mtp!r} of type {type(mtp).__name__}.")
    if mtp and (early_exit is not None or draft is not None):
        raise LookaheadError("use_mtp and an assistant both say what drafts: drop one of them.")
    if early_exit is not None and draft is not None:
        raise LookaheadError("assistant_early_exit and assistant_model both say what drafts: drop one of them.")
    if mtp:
        return strategy.predicting()
    if early_exit is not None:
        return strategy.assisted(early_exit)
    if draft is None:
        return strategy
    other = given.get("assistant_tokenizer")
    return strategy.assisted(draft, None if other is None else (given.get("tokenizer"), other))

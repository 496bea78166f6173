"""The parts of one call: each is made once, in one order, from what was made before it."""

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from jacobi import Step
from lookahead.draft.memory import borrowed
from lookahead.generation.curves import curve_of
from lookahead.generation.group import CallGroup
from lookahead.generation.memories import recall
from lookahead.generation.plan import Plan
from lookahead.generation.watch import watcher
from lookahead.parallel.split import Replicas
from lookahead.parallel.tensor import TensorParallel
from lookahead.runtime.forward import Prompt
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.open import open_tree
from lookahead.runtime.tracing.schedule import Upgrades, faster_passes
from lookahead.runtime.tree import TreeModel
from lookahead.verify.sequences import Sequences


class Session:
    """What a call is decoded with; ``ends`` is closed when it is over.

    Attributes:
        group: its sequences.
        view: this rank's own passes over the model.
        model: the passes as the loop sees them, shared by all ranks where there are several.
        drafters: one a sequence; where there are several ranks, they give what the first one drafts.
    """

    def __init__(self, plan: Plan, ends: ExitStack) -> None:
        call, strategy, sequences = plan.call, plan.strategy, plan.call.sequences()
        assert strategy is not None  # a call that drafts
        ranks = _ranks(plan, sequences)
        memory = ends.enter_context(borrowed(call.model, call.traits.vocab_size, strategy.remembers))
        self.view = ends.enter_context(closing(_view(plan, sequences)))
        recall(memory, call.model, strategy)
        self.model: Any = self.view if ranks is None else ranks.around(self.view)
        # Ranks that stream must choose as those that do not.
        self.group = group = CallGroup(plan, sequences, self.model, ends, in_turn=ranks is None)
        times = memory.times if ranks is None else ranks.times(memory.times)
        curve = partial(curve_of, call.model, self.view, times, strategy.static, call.traits)
        drafts = strategy.drafts(group.context(memory, self.view, curve)) if ranks is None or ranks.leads else None
        group.begin(drafts, watcher())
        self.drafters, self._planner = group.drafters, group.drafts.planner
        self._upgrades: Upgrades | None = None
        if isinstance(self.view, TreeModel):
            renewed = [] if self._planner is None else [self._planner.costs.renew]
            self._upgrades = Upgrades(call.model, self.view, plan.packs, plan.new_tokens, *renewed)
        if ranks is not None:
            ranks.asks(group.verifier)
            self.drafters = ends.enter_context(ranks.call(group.drafters, _in_common(plan), call.traits.device))
        self._first = True

    def see(self, step: Step) -> None:
        """Take in a pass, as far as the next one depends on it."""
        group, planner, sequences, first = self.group, self._planner, self.group.sequences, self._first
        self._first = False
        group.see(step)
        if planner is not None and not first:
            noise = group.verifier.noise
            planner.observe(step if noise is None else noise.without(step))
        if all(sequences.finished):
            return
        if self._upgrades is not None:
            self._upgrades.see(0 if first else sum(map(len, step.trees)), step.forward_ms, max(sequences.lengths()))
        if planner is not None:
            planner.open(self.view.context)
            sequences.in_step = planner.in_step

    def output(self) -> Any:
        """What ``generate`` returns of the call, which is written."""
        output, stats, planner = self.group.output(self.model.store), self.group.stats, self._planner
        if stats is not None:
            stats.fed_again = self.view.replayed
        if stats is not None and planner is not None:
            costs = planner.costs
            times = {"single_ms": costs.single_ms, "own_ms": costs.own_ms, "timed_ms": costs.timed_ms}
            stats.add(asked_ms=planner.asked_ms, **times)
        return output


def _view(plan: Plan, sequences: Sequences) -> TreeModel | LinearModel:
    """The model as the call's route sees it."""
    call, wants, strategy = plan.call, plan.wants, plan.strategy
    prompt = Prompt(call.input_ids, call.config, call.kwargs, call.cache, plan.new_tokens)
    if plan.route == "chain":
        return LinearModel(call.model, call.traits, prompt, wants)
    goes_on = plan.new_tokens > 1  # a single token comes from the prompt's pass, which is the model's own
    traces, packs = plan.traces and goes_on, plan.packs and goes_on
    traced, packed = faster_passes(
        call.model, call.traits, wants.taps, traces=traces, packs=packs, limits=plan.bits.limits
    )
    static = None if strategy is None else strategy.static
    return open_tree(call.model, call.traits, prompt, sequences, wants, static=static, traced=traced, packed=packed)


def _ranks(plan: Plan, sequences: Sequences) -> TensorParallel | None:
    """The ranks over which trees are split, or the model is sharded; None = there are none."""
    if getattr(plan.strategy, "parallel", None) is not None:
        return Replicas(plan.call.model, sequences)
    return TensorParallel(plan.call.model, sequences) if plan.call.traits.is_sharded else None


def _in_common(plan: Plan) -> dict[str, Any]:
    """What all ranks must have in common, by name; what only steers drafts may differ."""
    call, strategy = plan.call, plan.strategy
    assert strategy is not None  # a call that drafts
    settings = call.config.to_diff_dict()
    drafts = ("use_lookahead", "lookahead_strategy")
    return {
        "prompts": call.input_ids,
        "attention masks": call.kwargs.get("attention_mask"),
        "generation settings": {name: value for name, value in settings.items() if name not in drafts},
        "strategy": [type(strategy).__name__, strategy.verification, strategy.draws_candidates],
        "processors": [type(each).__name__ for each in call.processors],
        "stopping rules": [type(each).__name__ for each in call.criteria],
    }

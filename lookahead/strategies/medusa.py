"""Decoding with Medusa's heads: the strategy, its fixed tree, and the heads as one source among others."""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache, partial
from os import PathLike
from pathlib import Path as FilePath
from time import perf_counter
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi import LookaheadError, Path, Successors, TokenTree
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.output_layer import output_layer, output_sizes, placement
from lookahead.sources.medusa.choices import ChoiceTree, choices_from
from lookahead.sources.medusa.heads import MedusaHeads, best_of
from lookahead.sources.medusa.stacked import fast_heads
from lookahead.strategies.automatic import FREE_SOURCES, Budgeted
from lookahead.strategies.base import CallContext, Drafts
from lookahead.verify.acceptance import nucleus, typical

_DEFAULT_CHOICES = "mc_sim_7b_63"
_TREE_FILE = "tree.json"
_BEST = 10  # candidates of a head in the budgeted tree, as many as the published trees use
_LEAST = 0.002  # a candidate that its head gives less is not proposed
_RANKS = 3  # that are told apart: the first, the second, later ones
_STEPS = tuple(0.75 * step for step in range(-6, 8))  # strengths at which the next level begins
_LEVELS = len(_STEPS) + 1
_PRIORS = tuple(1.0 / (1.0 + math.exp(0.375 - strength)) for strength in (*_STEPS, _STEPS[-1] + 0.75))


class HeadCandidates:
    """The best candidates of every head for the rows of one call.

    The heads run on the accepted node only, and when the first row's next tree is drafted: on all rows that wrote
    something in the last pass in one go, with one transfer to the host.

    Args:
        heads: the heads.
        output: the model's output layer.
        hidden: what it reads in each pass.
        count: candidates of a head.
        batch: number of rows.

    Attributes:
        spent_ms: what running the heads has taken.
    """

    def __init__(self, heads: MedusaHeads, output: nn.Module, hidden: HiddenStates, count: int, batch: int) -> None:
        self.num_heads = heads.num_heads
        self.spent_ms = 0.0
        self._heads = fast_heads(heads)
        self._output = output
        self._hidden = hidden
        self._count = count
        self._found: list[tuple[list[list[int]], list[list[float]]] | None] = [None] * batch
        self._nodes: dict[int, int] = {}  # rows for which the heads have not run yet
        self._pass = 0

    def note(self, row: int, node: int) -> None:
        """The walk of the last pass ended in ``node`` of ``row``'s tree."""
        if self._pass != self._hidden.passes:  # hidden states of earlier passes are gone
            self._nodes.clear()
            self._pass = self._hidden.passes
        self._found[row] = None
        self._nodes[row] = node

    def of(self, row: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """Token ids and log-probabilities ``[head][rank]`` below a row's next root, best first.

        None where the row's last pass is not known any more, because nobody asked after it.
        """
        if self._nodes and self._pass == self._hidden.passes:
            self._run()
        return self._found[row]

    @torch.no_grad()
    def _run(self) -> None:
        start, hidden = perf_counter(), self._hidden.last
        assert hidden is not None  # a pass was noted
        rows = list(self._nodes)
        at = torch.tensor([rows, list(self._nodes.values())], device=hidden.device)
        chances, tokens = best_of(self._heads(hidden[at[0], at[1]], self._output), self._count)
        # Integers and floats of 32 bits travel in one tensor.
        both = torch.stack([tokens.int(), chances.float().view(torch.int32)]).transpose(1, 2).cpu()
        ids, logs = both[0].tolist(), both[1].contiguous().view(torch.float32).tolist()
        for place, row in enumerate(rows):
            self._found[row] = ids[place], logs[place]
        self._nodes.clear()
        self.spent_ms += 1e3 * (perf_counter() - start)


class MedusaDrafter:
    """One row's drafter with a tree of fixed shape (Cai et al., arXiv 2401.10774, section 2.1.2).

    Args:
        candidates: of the call's rows.
        row: number of the row.
        choices: the shape.
    """

    def __init__(self, candidates: HeadCandidates, row: int, choices: ChoiceTree) -> None:
        self._candidates = candidates
        self._row = row
        shape = choices.token_tree()
        self._places = list(zip(shape.parents[1:], shape.depths[1:], shape.tokens[1:], strict=True))
        self._root = 0

    def draft(self, room: int) -> TokenTree:
        """The heads' candidates in their places; those deeper than ``room`` are left out."""
        tree = TokenTree(self._root)
        found = self._candidates.of(self._row) if room > 0 else None
        if found is None:
            return tree
        tokens, _ = found
        for parent, depth, rank in self._places:
            if depth > room:
                break
            tree.add(parent, tokens[depth - 1][rank])  # candidates of a head differ, so nodes keep their numbers
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Remember the last decided token, and where the heads have to run."""
        self._root = path.tokens[-1]
        self._candidates.note(self._row, path.nodes[-1])


class HeadsSource:
    """The heads as one source of the budgeted tree: head k has candidates for every node at depth k, from 0.

    A candidate's kind is its head, its rank, and its strength: the log-odds that the head gives it against all that it
    does not propose, which is how :class:`lookahead.draft.acceptance.Acceptance` weighs candidates.

    Args:
        candidates: of the call's rows.
        row: number of the row.
    """

    name = "heads"

    def __init__(self, candidates: HeadCandidates, row: int) -> None:
        self.priors = _PRIORS * (_RANKS * candidates.num_heads)
        self._candidates = candidates
        self._row = row
        self._offers: list[list[tuple[int, int]]] | None = None

    @property
    def spent_ms(self) -> float:
        """What running the heads has taken."""
        return self._candidates.spent_ms

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        """The prompt's hidden states come with its pass."""

    def root(self) -> int:
        """Depth 0."""
        return 0

    def step(self, state: int, token: int) -> int:
        """One deeper; the heads do not see which token they follow."""
        return state + 1

    def propose(self, state: int) -> list[tuple[int, int]]:
        """The candidates of the head for this depth."""
        if self._offers is None:
            found = self._candidates.of(self._row)
            lines = () if found is None else zip(*found, strict=True)
            self._offers = [_offer(head, tokens, logs) for head, (tokens, logs) in enumerate(lines)]
        return self._offers[state] if state < len(self._offers) else []

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        """Remember where the heads have to run."""
        self._offers = None
        self._candidates.note(self._row, path.nodes[-1])


def _offer(head: int, tokens: list[int], logs: list[float]) -> list[tuple[int, int]]:
    """One head's candidates with their kinds."""
    chances = [0.0 if math.isnan(log) else math.exp(min(0.0, log)) for log in logs]
    rest = max(1e-3, 1.0 - sum(chances))
    offers = []
    for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
        if chance < _LEAST:
            break
        level = bisect_right(_STEPS, math.log(chance / rest))
        offers.append((token, (head * _RANKS + min(rank, _RANKS - 1)) * _LEVELS + level))
    return offers


@dataclass(frozen=True)
class Medusa(Budgeted):
    """Decoding with Medusa's heads (Cai et al., arXiv 2401.10774), which guess the tokens after the next one.

    By default as published: a tree of fixed shape, filled from the heads' best candidates, is scored in one pass (for
    a model that can only be given one branch a pass, the chain of every head's best candidate). With
    ``sources`` it is the automatic mode of :class:`lookahead.Lookahead`, in which the heads are one source among
    others in a tree that is as large as pays.

    Attributes:
        heads: the heads, or a folder (or hub name) that holds them, which is read once.
        choices: the tree's shape, in any form that :func:`lookahead.medusa.choices_from` reads. None is the calibrated
            tree that lies beside the heads (``tree.json``), else the published tree ``mc_sim_7b_63``, cut down to what
            the heads can fill.
        acceptance: ``"exact"`` writes the text of plain ``generate``. The other two are *lossy*: sampled text no longer
            follows the model's distribution, but drifts towards what the heads guess. ``"typical"`` keeps candidates
            that are likely enough (section 2.3.1), ``"nucleus"`` those inside the top-p set; of the longest paths kept
            the likeliest one is written, and after it the most likely token. Without sampling both are greedy decoding.
            Logits processors are asked along several candidate paths, so those of the caller's own must not keep state.
        posterior_threshold: (typical) epsilon: no candidate has to be likelier than this. Above 0, below 1.
        posterior_alpha: (typical) delta: the share of ``exp(-entropy)`` that a candidate has to be likelier than.
        top_p: (nucleus) probability of the set; above 0, at most 1.
        sources: the automatic mode, where candidates come from, in the order in which they are credited: ``"heads"``
            and any of ``"recycling"``, ``"suffix"``, ``"pool"``, ``"window"``, or functions that make a
            :class:`lookahead.sources.Source` from a :class:`lookahead.strategy.RowContext`.
        nodes, max_nodes, tuning, remember: (automatic) see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Medusa("folder of the heads"))
        model.generate(**inputs, lookahead_strategy=Medusa(heads, sources=("heads", "recycling", "suffix")))
    """

    name: ClassVar[str] = "medusa"
    reads_hidden: ClassVar[bool] = True
    known_sources: ClassVar[tuple[str, ...]] = ("heads", *FREE_SOURCES)

    heads: MedusaHeads | str | PathLike[str] | None = None
    choices: Any = None
    _: KW_ONLY
    acceptance: Literal["exact", "typical", "nucleus"] = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    top_p: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("acceptance", ("exact", "typical", "nucleus"))
        self._between("posterior_threshold", "above 0 and below 1", lambda value: 0.0 < value < 1.0)
        self._between("posterior_alpha", "above 0", lambda value: 0.0 < value < math.inf)
        self._between("top_p", "above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
        if self.acceptance != "exact" and self.verification != "exact":
            raise LookaheadError(
                f"Medusa(acceptance={self.acceptance!r}) has a rule of its own for what is accepted: got "
                f"verification={self.verification!r} as well. Drop one of the two."
            )
        if isinstance(self.heads, PathLike):
            object.__setattr__(self, "heads", str(self.heads))
        if not isinstance(self.heads, MedusaHeads | str):
            raise LookaheadError(f"Medusa(heads=) must be MedusaHeads or the folder they lie in: got {self.heads!r}.")
        if self.choices is not None and not isinstance(self.choices, str):
            given = self.choices
            object.__setattr__(self, "choices", str(given) if isinstance(given, PathLike) else choices_from(given))
        if not self.automatic:
            self._refuse_automatic("no sources. Name them, or drop it.")
            self.tree(self._stored.vocab_size or sys.maxsize)
            return
        if self.choices is not None:
            raise LookaheadError(
                f"Medusa(choices=) belongs to the fixed tree: got sources={self.sources!r} as well. Drop one of them."
            )
        if "heads" not in (self.sources or ()):
            raise LookaheadError(
                f"Medusa(sources=) must name 'heads': got {self.sources!r}. Add it, or use Lookahead(sources=...)."
            )
        _ = self._stored  # what cannot be read is told now

    def _between(self, field: str, range_: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise LookaheadError(f"Medusa({field}=) must be a number {range_}: got {value!r}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: nothing of it changes, and ``generate`` copies its settings, weights and all, in every call."""
        return self

    @property
    def automatic(self) -> bool:
        """Whether sources are named: then sizes are chosen while decoding."""
        return self.sources is not None

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """The lossy rule; None with exact acceptance."""
        if self.acceptance == "typical":
            return partial(typical, posterior_threshold=self.posterior_threshold, posterior_alpha=self.posterior_alpha)
        return partial(nucleus, top_p=self.top_p) if self.acceptance == "nucleus" else None

    def tree(self, vocab_size: int) -> ChoiceTree:
        """The shape of the fixed tree, for a model with so many tokens.

        Raises:
            LookaheadError: it asks for more than the heads and the vocabulary have.
        """
        num_heads = self._stored.num_heads
        if self._chosen is not None:
            self._chosen.check(num_heads, vocab_size)
            return self._chosen
        published = choices_from(_DEFAULT_CHOICES).paths
        return ChoiceTree(tuple(path for path in published if len(path) <= num_heads and max(path) < vocab_size))

    @cached_property
    def _chosen(self) -> ChoiceTree | None:
        """The shape that was given, or lies beside the heads."""
        if self.choices is not None:
            return choices_from(self.choices)
        beside = FilePath(self.heads).expanduser() / _TREE_FILE if isinstance(self.heads, str) else None
        return choices_from(beside) if beside is not None and beside.is_file() else None

    @property
    def _stored(self) -> MedusaHeads:
        """The heads, wherever they lie."""
        return _read(self.heads, _stamp(self.heads)) if isinstance(self.heads, str) else self._given

    @property
    def _given(self) -> MedusaHeads:
        assert isinstance(self.heads, MedusaHeads)  # as __post_init__ saw
        return self.heads

    def heads_for(self, model: PreTrainedModel) -> MedusaHeads:
        """The heads as they run beside ``model``: those read from a folder lie where it computes, and as it does.

        Raises:
            LookaheadError: they are another model's, or broken.
        """
        heads = self._stored
        heads.check(model)
        if isinstance(self.heads, str):
            heads = _placed(self.heads, _stamp(self.heads), *placement(model))
        return heads

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON; ``from_dict`` reads it back if the heads were given as a folder.

        Otherwise, and for sources of the caller's own, it holds names that ``from_dict`` does not know.
        """
        settings = super().to_dict()
        if isinstance(self.heads, MedusaHeads):
            settings["heads"] = type(self.heads).__name__
        if isinstance(self.choices, ChoiceTree):
            settings["choices"] = [list(path) for path in self.choices.paths]
        return settings

    def drafts(self, call: CallContext) -> Drafts:
        """The rows' drafters, which share one run of the heads a pass.

        Raises:
            LookaheadError: the heads do not fit the model.
        """
        heads, layer = self.heads_for(call.model), output_layer(call.model)
        hidden = HiddenStates(layer)
        _, vocab_size = output_sizes(call.model)
        tree = None if self.automatic else self.tree(vocab_size)
        if tree is not None and call.rows[0].chain:
            tree = ChoiceTree(tuple((0,) * depth for depth in range(1, heads.num_heads + 1)))
        most = min(_BEST, vocab_size) if tree is None else max(tree.candidates)
        candidates = HeadCandidates(heads, layer, hidden, most, len(call.rows))
        if tree is not None:
            return Drafts([MedusaDrafter(candidates, row.index, tree) for row in call.rows], hidden=hidden)
        lossy = None if self.rule is None else (self.acceptance, self.posterior_threshold, self.posterior_alpha)
        drafts = self.budgeted_drafts(
            replace(call, choice=(call.choice, lossy, self.top_p)),
            self.sources or (),
            {"heads": lambda row, memory: HeadsSource(candidates, row.index)},
        )
        return replace(drafts, hidden=hidden)


def _stamp(folder: str) -> float:
    """Changes when what lies in a folder (or file) does."""
    path = FilePath(folder).expanduser()
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


@lru_cache(maxsize=4)
def _read(folder: str, stamp: float) -> MedusaHeads:
    return MedusaHeads.from_pretrained(folder)


@lru_cache(maxsize=4)
def _placed(folder: str, stamp: float, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    heads = _read(folder, stamp)
    first = next(heads.parameters())
    return heads if (first.device, first.dtype) == (device, dtype) else deepcopy(heads).to(device, dtype)

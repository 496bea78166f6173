"""What strategies share that draft with a head beside the model; and trees of fixed shape, EAGLE-1's and Medusa's."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from os import PathLike
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from jacobi import LookaheadError, TokenTree
from lookahead._per_model import PerModel
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.draft.drawn_trees import Urn
from lookahead.draft.published import Grow, HeadDrafter
from lookahead.heads.storage import stored_head
from lookahead.models.fingerprint import broken_weight, weights_stamp
from lookahead.models.output_layer import Head, beside, copyable_weight, output_sizes, placement
from lookahead.sources.draft_model import BEST, Branch, Passes, Said
from lookahead.sources.perturbed import Draw
from lookahead.sources.vocabularies import SameVocabulary
from lookahead.strategies.automatic import AutomaticStrategy
from lookahead.strategies.draft_models import check_whole

_log = logging.getLogger("lookahead")
_warned: PerModel[WeakSet[Any]] = PerModel(WeakSet)  # heads that name another model
_lent: WeakKeyDictionary[Any, tuple[Any, Tensor]] = WeakKeyDictionary()  # rows of a weight, by network


@dataclass(frozen=True, kw_only=True)
class HeadStrategy(AutomaticStrategy):
    """A strategy whose head is a source of the strategy's name in the automatic tree, or fills a published one alone.

    A subclass says in which ``field`` the head is, of what ``kind`` unless where it lies is given, what messages call
    it (``expected`` as a value, ``title`` as a subject), and whether it drafts for a model that is ``sharded`` over
    ranks as well: without parts of the model's own. Its field ``tree``, if there is one, names a published tree.
    """

    field: ClassVar[str] = "head"
    kind: ClassVar[Any]
    expected: ClassVar[str]
    title: ClassVar[str]
    sharded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self._given
        if isinstance(given, PathLike):
            object.__setattr__(self, self.field, str(given))
        elif not isinstance(given, self.kind | str):
            raise LookaheadError(f"{type(self).__name__}({self.field}=) must be {self.expected}: got {given!r}.")
        if not self.automatic and isinstance(tree := vars(self).get("tree"), str):
            self._refuse_automatic(f"tree={tree!r} as well. Drop one of the two.")
        own = self.known_sources[0]
        if self.sources is not None and own not in self.sources:
            got = f"got {self.sources!r}. Add it, or use Lookahead."
            raise LookaheadError(f"{type(self).__name__}(sources=) must name {own!r}: {got}")
        _ = self._read  # raises now what cannot be read

    @property
    def _given(self) -> Any:
        return getattr(self, self.field)

    @property
    def automatic(self) -> bool:
        return getattr(self, "tree", None) is None

    @property
    def draws_candidates(self) -> bool:
        """Where the head alone fills a given number of nodes."""
        return self._draws_from(self.name)

    @cached_property
    def _read(self) -> Any:
        return stored_head(self.kind, self._given) if isinstance(self._given, str) else self._given

    def heads_for(self, model: PreTrainedModel) -> Any:
        """The head as it runs beside ``model``: one that was read computes as the model does."""
        return beside(model, self._read) if isinstance(self._given, str) else self._read

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data; a head in memory is named by its class only."""
        given = self._given
        return super().to_dict() | {self.field: given if isinstance(given, str | None) else type(given).__name__}

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a head that is another model's, cannot be read, computes elsewhere, or has weights that are NaN."""
        self._check_causal(model)
        if not self.sharded:
            check_whole(model, type(self).__name__)
        head = self.heads_for(model)
        device, where = next(head.parameters()).device, placement(model)[0]
        if device != where:
            raise LookaheadError(
                f"{self.title} on {device} and the model's output layer is on {where}: call .to('{where}') on it, or "
                "name the folder that it lies in."
            )
        if (broken := broken_weight(head)) is not None:
            raise LookaheadError(f"{self.title} broken: {broken}. Train it again, or read another checkpoint.")
        head.check(model)

    def _drafts_of(self, call: CallContext, passes: Callable[[RowContext], Passes], grow: Grow | None = None) -> Drafts:
        """Drafts of a head's ``passes`` beside each sequence: by ``grow`` alone, else as one source of the tree."""
        if grow is not None:
            return Drafts([HeadDrafter(self.name, row.prompt, passes(row), grow, row.chain) for row in call.rows])
        return self.passes_drafts(call, passes, self.name)


def fitted(head: Head, model: Any) -> Head:
    """A head as it was read; with ``model`` checked, told its vocabulary, and put where its output layer computes."""
    given: Any = head
    if model is not None:
        given.check(model)
        if hasattr(given, "network"):
            given.network.sizes = replace(given.network.sizes, vocab_size=output_sizes(model)[1])
        given.to(*placement(model))
    return head


def check_sizes(what: str, sizes: Mapping[str, tuple[int | None, int]], model: Any) -> None:
    """Refuse a ``model`` of other sizes than the head, a ``what``: by what that does, its own and the model's."""
    for does, (own, its) in sizes.items():
        if own is not None and own != its:
            raise LookaheadError(f"{what} {does} {own}, and {type(model).__name__} has {its}: it is another model's.")


def warn_of_another(what: str, head: Any, theirs: str | None, model: Any) -> None:
    """Tell once that a head, a ``what``, was made for a model of another name."""
    ours, warned = str(getattr(model, "name_or_path", None) or ""), _warned.of(model)
    if ours and (theirs or "").rstrip("/").rpartition("/")[2].lower() not in ours.lower() and head not in warned:
        warned.add(head)
        _log.warning("This %s was made for %s, and the model is %s: drafts may be of no use.", what, theirs, ours)


class Scoring(nn.Module):
    """A network that scores by the model's output layer where it has none of its own; ``d2t`` ``[draft token]`` are
    offsets from its tokens to the model's, where these are not all."""

    d2t: Tensor | None

    def scored(self) -> Tensor:
        """The model's ids of the tokens that it scores, where these are not all, ``[draft token]``."""
        assert self.d2t is not None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def lent(self, states: Tensor, output: nn.Module) -> Tensor:
        """Scores ``[..., draft token]`` of states by ``output``; of some tokens only, by a copy of those rows."""
        given, weight = getattr(output, "weight", None), copyable_weight(output)
        states = states.to(given.dtype if isinstance(given, Tensor) else states.dtype)
        if self.d2t is None or weight is None or getattr(output, "bias", None) is not None:
            scores: Tensor = output(states)
            return scores if self.d2t is None else scores[..., self.scored()]
        stamp = weights_stamp((weight,))
        if self not in _lent or _lent[self][0] != stamp:
            with torch.inference_mode(False):  # else a head that is trained later could not use them
                _lent[self] = stamp, weight[self.scored()]
        return linear(states, _lent[self][1])


class ResBlock(nn.Module):
    """``x + silu(W x + b)``, ``[..., hidden]``. W and b start as zeros, so a fresh block changes nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + silu(self.linear(hidden))


def best_next(scores: Tensor, vocab_size: int, offsets: Tensor | None = None) -> list[Said]:
    """What a head says after branches, by its ``scores`` ``[branch, token]``: the best tokens of those that the model
    can be fed, with ``offsets`` ``[token]`` from the head's tokens to the model's."""
    values, ids = scores.float().topk(min(BEST, scores.shape[-1]))
    tokens = ids if offsets is None else ids + offsets[ids]
    vocabulary = SameVocabulary(vocab_size, vocab_size)
    lines = zip(np.asarray(tokens.cpu()), np.asarray(values.cpu()), strict=True)
    return [vocabulary.proposed(*line) for line in lines]


def fixed_tree(
    shape: Iterable[Branch], root: int, passes: Passes, room: int, chain: bool = False, *, draw: Draw | None = None
) -> TokenTree:
    """The tree below ``root`` of a ``shape``, paths of ranks behind their prefixes: a node holds the token of its rank
    among those that ``passes`` give for its parent. It is at most ``room`` deep; a ``chain`` has first ranks only. With
    ``draw`` a rank is not that of a token's logit, but says when it was drawn among its siblings."""
    tree = TokenTree(root)
    nodes: dict[Branch, tuple[Branch, int]] = {(): ((), 0)}  # by ranks: the branch, and its node
    fitting = [ranks for ranks in shape if len(ranks) <= room and not (chain and any(ranks))]
    for _, level in groupby(sorted(fitting, key=lambda ranks: (len(ranks), ranks)), len):
        below = {above: list(each) for above, each in groupby(level, lambda ranks: ranks[:-1]) if above in nodes}
        if not below:
            break
        for above, said in zip(below, passes.after([nodes[above][0] for above in below]), strict=True):
            branch, parent = nodes[above]
            tokens = _tokens(tree, parent, said, len(below[above]), draw)
            for ranks in below[above]:
                if ranks[-1] < len(tokens):
                    token = tokens[ranks[-1]]
                    nodes[ranks] = (*branch, token), tree.add(parent, token)
    return tree


def _tokens(tree: TokenTree, parent: int, said: Said | None, count: int, draw: Draw | None) -> list[int]:
    """A node's tokens by rank; of drawn ones so many, and the tree is told what they were drawn from."""
    if draw is None:
        return [] if said is None else said[0].tolist()
    urn = Urn(said, draw)
    tree.drawn_from = (tree.drawn_from or {}) | {parent: urn.chances}
    return [drawn[0] for _ in range(count) if (drawn := urn.take()) is not None]

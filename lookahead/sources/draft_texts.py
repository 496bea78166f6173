"""A draft model that reads the texts of a call, and what it says of their drafts: a pass a level, for all sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from transformers import PreTrainedModel

from jacobi import Path, Scores, TokenTree
from lookahead.models.traits import ModelTraits, boundary
from lookahead.runtime.session import masked_inputs, read_prompt, unread
from lookahead.runtime.tracing.schedule import Upgrades, faster_passes
from lookahead.runtime.tree import TreeModel
from lookahead.sources.base import Together
from lookahead.sources.draft_model import BEST, Branch, DraftModelSource, Said
from lookahead.sources.perturbed import Offer
from lookahead.sources.vocabularies import Vocabulary


@dataclass
class _Text:
    """One sequence, in the draft model's tokens.

    Attributes:
        prompt: its first tokens.
        unfed: those behind what is in the KV cache.
        length: of all.
        fed: what the last pass was over: what was not fed yet, then the branches; None = the text has gone on since.
        kept: the nodes of that pass that are the text's by now.
    """

    prompt: list[int] = field(default_factory=list)
    unfed: list[int] = field(default_factory=list)
    length: int = 0
    fed: TokenTree | None = None
    kept: list[int] = field(default_factory=list)

    def go_on(self, new: Sequence[int]) -> None:
        """``new`` tokens were written. What the last draft held of them stays in the cache."""
        self.length += len(new)
        tree, self.fed = self.fed, None
        if tree is None:
            self.unfed += new
            return
        nodes = list(range(len(self.unfed)))
        for token in new[:-1]:  # the next branches stand below a token that is fed with them
            child = tree.children[nodes[-1]].get(token)
            if child is None:
                break
            nodes.append(child)
        self.unfed, self.kept = list(new[len(nodes) - len(self.unfed) :]), nodes

    def tree(self, branches: Sequence[Sequence[int]]) -> tuple[TokenTree, list[int]]:
        """What is to be fed, so that the model says what follows ``branches``, and their nodes."""
        tree = self.fed or TokenTree.chain(self.unfed[0], self.unfed[1:])
        nodes = [tree.extend(len(self.unfed) - 1, branch) for branch in branches]
        tree.top_k, self.fed = BEST, tree
        return tree, nodes


class DraftTexts:
    """A draft model beside the ``batch`` sequences of a call.

    Its KV cache holds each text but for its last tokens. These, and all branches that were asked about since the text
    went on, are fed in one pass, so that a level costs one pass whatever the trees, and however many sequences::

        in the cache         not fed yet      branches
        once upon a time  |  there was     |  a - king
                          |                |    - cat
                          |                |  one
        an apple a        |  day           |  keeps - the

    The prompts are read with the first question. ``closing`` is told how to free what the model holds. As the model's
    own, its passes are traced and run on packed weights where that pays, and ``traces`` and ``pack`` allow it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Vocabulary,
        batch: int,
        new_tokens: int,
        closing: Callable[[Callable[[], None]], object],
        traces: bool = True,
        pack: bool = True,
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._traits = ModelTraits.of(model)
        self._new_tokens = new_tokens
        self._closing = closing
        self._uses_traces = traces
        self._packs = pack and self._traits.device.type == "cpu" and not self._traits.is_sharded
        self._texts = [_Text() for _ in range(batch)]
        self._view: TreeModel | None = None
        self._upgrades: Upgrades | None = None
        self._ends: list[int] = []  # of each text, the first position that the draft model cannot be asked about

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """Take in a sequence's prompt, once, before any question."""
        text = self._texts[row]
        text.prompt = list(self._vocabulary.prompt(prompt))
        text.length = len(text.prompt)

    def write(self, row: int, tokens: Sequence[int]) -> None:
        """A sequence's text goes on."""
        if self._askable(row):  # no more is fed of one that the model cannot be asked about
            self._texts[row].go_on(self._read(tokens))

    def after(self, asked: Mapping[int, Sequence[Branch]]) -> dict[int, Sequence[Said | None]]:
        """What the model says after branches of some sequences, in one pass; None where it cannot be asked."""
        if self._view is None:
            self._view = self._read_prompts()
        self._settle()
        trees, nodes = list[TokenTree](), dict[int, list[int]]()
        for row, text in enumerate(self._texts):
            branches = [self._read(branch) for branch in asked.get(row, ())]
            reach = text.length + max(map(len, branches), default=0)
            if not self._askable(row) or not text.unfed:
                trees.append(TokenTree(0))  # which nobody looks at
                continue
            if branches and reach < self._ends[row]:
                tree, nodes[row] = text.tree(branches)
            else:
                tree, _ = text.tree([])
            trees.append(tree)
        best = self._forward(trees).successors if nodes else None
        said: dict[int, Sequence[Said | None]] = {row: [None] * len(branches) for row, branches in asked.items()}
        for row, each in nodes.items():
            assert best is not None  # it is asked for
            told = best[row]
            said[row] = [self._vocabulary.proposed(told.tokens[node], told.logits[node]) for node in each]
        return said

    def together(self, requests: Sequence[tuple[DraftModelSource, Sequence[Branch]]]) -> list[list[Offer]]:
        """What :meth:`.DraftModelSource.expand` gives, for the sources of several sequences in one pass."""
        start = perf_counter()
        rows = [source.passes.row for source, _ in requests if isinstance(source.passes, DraftPasses)]
        said = self.after({row: branches for row, (_, branches) in zip(rows, requests, strict=True)})
        ms = 1e3 * (perf_counter() - start)
        return [
            source.offers(branches, said[row], ms, len(rows))
            for row, (source, branches) in zip(rows, requests, strict=True)
        ]

    def _askable(self, row: int) -> bool:
        return not self._ends or self._texts[row].length < self._ends[row]

    def _forward(self, trees: Sequence[TokenTree]) -> Scores:
        assert self._view is not None and self._upgrades is not None  # the prompts are read
        start = perf_counter()
        scores = self._view.forward(trees)
        written = max(text.length - len(text.prompt) for text in self._texts)
        self._upgrades.see(sum(map(len, trees)), 1e3 * (perf_counter() - start), written)
        return scores

    def _read_prompts(self) -> TreeModel:
        model, traits = self._model, self._traits
        most = traits.depth_limit or 1 << 60
        fits = [0 < len(text.prompt) < most for text in self._texts]
        prompts = [text.prompt if fit else [0] for text, fit in zip(self._texts, fits, strict=True)]
        widest = max(map(len, prompts))
        limit = boundary(traits, widest, [len(each) - 1 for each in prompts])
        left = most if limit is None else limit[0] - widest
        self._ends = [min(most, left + len(each)) if fit else 0 for each, fit in zip(prompts, fits, strict=True)]
        pads = [widest - len(each) for each in prompts]
        ids = torch.tensor([[0] * pad + each for pad, each in zip(pads, prompts, strict=True)], device=traits.device)
        mask = torch.tensor([[0] * pad + [1] * (widest - pad) for pad in pads], device=traits.device)
        traced, packed = faster_passes(model, traits, traces=self._uses_traces, packs=self._packs)
        inputs = masked_inputs(traits, mask) if any(pads) else {}
        view = unread(model, ids, self._new_tokens, static=None, traced=traced, packed=packed, **inputs)
        self._closing(view.close)
        self._upgrades = Upgrades(model, view, self._packs, self._new_tokens)
        read_prompt(view, len(prompts))
        return view

    def _settle(self) -> None:
        """Leave in the cache what the texts have kept of the last pass."""
        if not any(text.kept for text in self._texts):
            return
        assert self._view is not None  # it has fed what is kept
        self._view.keep([Path(text.kept, [0] * len(text.kept)) for text in self._texts])
        for text in self._texts:
            text.kept, text.fed = [], None

    def _read(self, tokens: Sequence[int]) -> list[int]:
        return [each for token in tokens for each in self._vocabulary.fed(token)]


class DraftPasses:
    """A draft model beside one sequence; ``shared`` with the others of the call."""

    def __init__(self, shared: DraftTexts, row: int) -> None:
        self.shared, self.row = shared, row

    def start(self, prompt: Sequence[int]) -> None:
        self.shared.start(self.row, prompt)

    def write(self, path: Path) -> None:
        self.shared.write(self.row, path.tokens)

    @property
    def together(self) -> Together:
        return self.shared.together

    def after(self, branches: Sequence[Branch]) -> Sequence[Said | None]:
        return self.shared.after({self.row: branches})[self.row]

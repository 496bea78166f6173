"""A small causal model as a source: it says what may follow at all nodes that wait, in one forward pass a level."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from jacobi import Path, Successors, TokenTree
from lookahead.models.traits import ModelTraits, boundary
from lookahead.runtime.session import read_prompt, unread
from lookahead.runtime.tracing.replay import TracedExecutor
from lookahead.runtime.tracing.schedule import traces_for
from lookahead.runtime.tree import TreeModel
from lookahead.sources.perturbed import BINS, Draw, Offer
from lookahead.sources.usual_time import UsualTime
from lookahead.sources.vocabularies import Vocabulary

Branch = tuple[int, ...]  # tokens below the root
Said = tuple[np.ndarray, np.ndarray]  # the best next tokens [rank] and their logits [rank], best first

BEST = 64  # next tokens that are looked at
# Shares that were right with disturbed copies of the bundled model (argmaxes alike in 60 to 90 % of all places), by
# bin: of the best candidate, and of others.
GREEDY_PRIORS = (
    *(0.02, 0.03, 0.06, 0.11, 0.18, 0.43, 0.65, 0.84, 0.88, 0.95, 0.98, 0.99),
    *(0.01, 0.015, 0.02, 0.05, 0.15, 0.26, 0.41, 0.5, 0.6, 0.7, 0.8, 0.9),
)
DRAWN_PRIORS = (
    *(0.01, 0.02, 0.03, 0.05, 0.11, 0.22, 0.4, 0.61, 0.75, 0.85, 0.91, 0.97),
    *(0.01, 0.015, 0.025, 0.05, 0.1, 0.21, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
)


class Passes(Protocol):
    """What drafts for one sequence: a model, or a head."""

    def start(self, prompt: Sequence[int]) -> None:
        """Take in the prompt, once."""

    def write(self, path: Path) -> None:
        """The text goes on along a path of the last pass."""

    def after(self, branches: Sequence[Branch]) -> Sequence[Said | None]:
        """What may follow each branch; None where nothing can be said."""


class DraftPasses:
    """A draft model that reads one sequence's text, and drafts of what may follow.

    Its KV cache holds the text but for its last tokens. These, and all branches that were asked about since the text
    went on, are fed in one pass, so that a level costs one pass whatever the tree::

        in the cache         not fed yet      branches
        once upon a time  |  there was     |  a - king
                                           |    - cat
                                           |  one
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Vocabulary,
        new_tokens: int,
        closing: Callable[[Callable[[], None]], object],
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._traits = ModelTraits.of(model)
        self._new_tokens = new_tokens
        self._closing = closing
        self._view: TreeModel | None = None
        self._end = 0  # the first position that the draft model cannot be asked about
        self._unfed: list[int] = []
        self._length = 0  # tokens of the text
        self._fed: TokenTree | None = None  # what the last pass was over: what was not fed yet, then the branches

    def start(self, prompt: Sequence[int]) -> None:
        """Read the prompt."""
        tokens = self._vocabulary.prompt(prompt)
        self._length = count = len(tokens)
        limit = boundary(self._traits, count, [count - 1])
        ends = [self._traits.depth_limit, None if limit is None else limit[0]]
        self._end = min((end for end in ends if end is not None), default=1 << 60)
        if not 0 < count < self._end:
            return
        traces = traces_for(self._model, 1, traits=self._traits)
        traced = None if traces is None else partial(TracedExecutor, traces)
        given = torch.tensor([tokens], device=self._traits.device)
        self._view = unread(self._model, given, self._new_tokens, static=None, traced=traced)
        self._closing(self._view.close)
        read_prompt(self._view)

    def write(self, path: Path) -> None:
        """The text goes on along a path. What the last draft held of its tokens stays in the cache."""
        new = self._read(path.tokens)
        self._length += len(new)
        tree, self._fed = self._fed, None
        if tree is None or self._view is None:
            self._unfed += new
            return
        nodes = list(range(len(self._unfed)))
        for token in new[:-1]:  # the next branches stand below a token that is fed with them
            child = tree.children[nodes[-1]].get(token)
            if child is None:
                break
            nodes.append(child)
        self._view.keep([Path(nodes, [0] * len(nodes))])
        self._unfed = new[len(nodes) - len(self._unfed) :]

    def after(self, branches: Sequence[Branch]) -> list[Said | None]:
        """What the model says after each branch; None where it cannot be asked."""
        read = [self._read(branch) for branch in branches]
        if self._view is None or self._length + max(map(len, read)) > self._end:
            return [None] * len(branches)
        tree = self._fed or TokenTree.chain(self._unfed[0], self._unfed[1:])
        nodes = [tree.extend(len(self._unfed) - 1, branch) for branch in read]
        tree.top_k = BEST
        said = self._view.forward([tree]).successors
        self._fed = tree
        assert said is not None  # it is asked for
        return [self._vocabulary.proposed(said[0].tokens[node], said[0].logits[node]) for node in nodes]

    def _read(self, tokens: Sequence[int]) -> list[int]:
        return [each for token in tokens for each in self._vocabulary.fed(token)]


class DraftModelSource:
    """Proposes what a draft model or a head says, under the noise of ``draw`` where tokens are drawn. A state is the
    branch of a node; a candidate's kind tells whether it is the best one, and the bin of its share."""

    def __init__(self, passes: Passes, draw: Draw | None, name: str = "draft") -> None:
        self.name = name
        self.priors = GREEDY_PRIORS if draw is None else DRAWN_PRIORS
        self.spent_ms = 0.0
        self._time = UsualTime()  # of a pass
        self._passes = passes
        self._draw = Draw(lambda index: None) if draw is None else draw
        self._index = 0  # of the next token

    @property
    def ask_ms(self) -> float:
        """What a pass takes."""
        return self._time.ms

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self._passes.start(prompt)

    def root(self) -> Branch:
        return ()

    def step(self, state: Branch, token: int) -> Branch:
        return (*state, token)

    def propose(self, state: Branch) -> Offer:
        return self.expand([state])[0]

    def expand(self, states: Sequence[Branch]) -> list[Offer]:
        start = perf_counter()
        offers = [self._offer(state, said) for state, said in zip(states, self._passes.after(states), strict=True)]
        taken = 1e3 * (perf_counter() - start)
        self.spent_ms += taken
        self._time.observe(taken)
        return offers

    def _offer(self, state: Branch, said: Said | None) -> Offer:
        if said is None or not len(said[1]):
            return []
        tokens, logits = said
        best = self._draw.best(tokens, self._draw.chances(logits), self._draw.line(self._index + len(state)))
        return [(token, BINS * (rank > 0) + level) for rank, (token, level) in enumerate(best)]

    def rollback(self, path: Path) -> None:
        """Nothing: which branches stay is known by the tokens that were written."""

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        self._index += len(path.tokens)
        self._passes.write(path)

"""Models that can only be given one branch a pass: a linear draft, and a way back where it is cut short.

A state whose scan is not known (`models.families.scans`) follows no tree, and what a rejected token did to it stays. So
states (small, whatever the text's length) are copied before a drafted pass. If that is cut short the copy goes back,
and the accepted tokens are *replayed* at the head of the next pass, until a pass ends on an accepted token::

    kept so far   a b c | snapshot
    pass 1        d e f      e accepted, f rejected: back to the snapshot
    pass 2        d e g h    d and e are replayed, g and h are the draft

The self-test tries whether the model gives for several tokens what it gives one by one. Where the cache itself can take
tokens back (attention layers, convolutions without a recurrent state), it is cropped, and nothing replayed. Masks,
positions and kernels are plain decoding's: transformers prepares the inputs, and the cache is its own.
"""

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from jacobi import LookaheadError, Path, Scores, TokenTree, Wants
from lookahead.models.families.overrides import overriding
from lookahead.models.families.scans import Scans, scans_of
from lookahead.models.hidden_states import HiddenStates, tapped, watched
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import tree_forward
from lookahead.runtime.cache.snapshots import Snapshot, record_past, recurrent_layers, states_of
from lookahead.runtime.forward import Prompt
from lookahead.runtime.scores import prompt_scores, score


class Repeats:
    """Expects each token to be what last followed the two before it; ``prompts`` are told, and not counted::

        text      a b c d | a b c d a     c, d and the second a are expected: 3 tokens, the last 3 in a run
        expected  . . . . | . . c d a

    Attributes:
        tokens: written tokens that were expected, of the sequence with the fewest.
        in_a_row: the same, of those without a break up to the last one written.
    """

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        self.tokens = self.in_a_row = 0
        self._known: list[dict[tuple[int, ...], int]] = []
        self._last: list[tuple[int, ...]] = []
        for prompt in prompts:
            self._known.append(dict(zip(pairwise(prompt), prompt[2:], strict=False)))
            self._last.append((-1, -1, *prompt)[-2:])
        self._counts, self._runs = [0] * len(self._last), [0] * len(self._last)

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Sequence ``row`` has written these."""
        known, last = self._known[row], self._last[row]
        for token in tokens:
            right = known.get(last) == token
            self._counts[row] += right
            self._runs[row] = self._runs[row] + 1 if right else 0
            known[last] = token
            last = last[1], token
        self._last[row] = last
        self.tokens, self.in_a_row = min(self._counts), min(self._runs)


_MOST_AGAIN = 64  # tokens replayed in one pass at most; the next pass then drafts nothing


class LinearModel:
    """One call's view of a model that is given one branch a sequence (implements :class:`jacobi.Model`).

    All sequences keep equally many tokens of a pass, because a recurrent state cannot be padded inside a text.

    Args:
        model, traits: a causal model that passed the self-test of linear drafts.
        prompt: the text is left in its cache, which may already hold an earlier call's; None = in a new one.
    """

    route = "chain"
    typical = True
    plain_ms: float | None = None  # passes are the model's own

    def __init__(self, model: PreTrainedModel, traits: ModelTraits, prompt: Prompt, wants: Wants) -> None:
        self._model = model
        config = model.config.get_text_config(decoder=True)
        self._cache: Any = DynamicCache(config=config) if prompt.cache is None else prompt.cache
        self._input_ids, self._config, self.batch = prompt.input_ids, prompt.config, len(prompt.input_ids)
        self._kwargs = prompt.kwargs | {traits.cache_argument: self._cache, "use_cache": True}
        self._depth_limit = traits.depth_limit  # positions from here on are never drafted; None = there are all
        self.hidden = HiddenStates(tapped(model, wants.taps)) if wants.taps else None
        self._top_k, self._prompt_tokens = wants.top_k, wants.prompt_top_k
        self.replayed = 0  # tokens that were fed more than once, summed over passes (of one sequence)
        self.repeated = self.in_a_row = 0  # written tokens that would have been drafted rightly, and the last of them
        self._repeats = Repeats(self._input_ids.tolist())
        self._overrides = scans_of(model)
        self.replays = True  # accepted tokens of a draft that is cut short; else the cache gives tokens back
        self._records = False  # the cache can take tokens of the last pass back
        self._held = False  # passes are only measured
        self._live = True  # the cache ends with the last kept token
        self._before = 0  # tokens before the prompt's pass and in it
        self._committed = 0  # tokens after the prompt that the snapshot (or the live cache) holds
        self._again: list[list[int]] = [[] for _ in self._input_ids]  # kept since, to be replayed
        self._fed: list[list[int]] = []  # the drafts of the pass that is being decided
        self._undecided = 0  # tokens of it
        self._last = 0  # position of the last prompt token, of the sequence that is the furthest

    @property
    def context(self) -> int:
        """Tokens in the cache and to be replayed, of the longest sequence."""
        return self._before + self._committed + self.again

    @property
    def again(self) -> int:
        """Tokens of each sequence that the next pass replays."""
        return len(self._again[0])

    def prefill(self) -> Scores:
        kwargs = dict(self._kwargs)
        if self._top_k and "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = self._prompt_tokens
        outputs = watched(self.hidden, lambda: self._model._prefill(self._input_ids, self._config, kwargs), last=None)
        positions, self._before = self._kwargs.get("position_ids"), self._length()
        self._last = self._before - 1 if positions is None else int(positions.max())
        self._snapshot = Snapshot(self._cache)
        self.replays = not getattr(self._cache, "is_croppable", False)
        return prompt_scores(outputs.logits, self._top_k)

    def _length(self) -> int:
        if any(isinstance(layer, DynamicLayer) for layer in self._cache.layers):
            return int(self._cache.get_seq_length())
        embeds = self._kwargs.get("inputs_embeds")  # nothing else knows it where all layers are recurrent
        return (self._input_ids if embeds is None else embeds).shape[1]

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of every linear draft in one pass, after the replayed tokens."""
        width = max(map(len, trees))
        for row, tree in enumerate(trees):
            if tree.parents != list(range(-1, len(tree) - 1)):
                told = f"expected a chain, because {type(self._model).__name__} cannot follow a tree. Got {tree}."
                raise LookaheadError(f"Row {row}'s draft branches: {told}")
        self._fed = [tree.tokens + tree.tokens[:1] * (width - len(tree)) for tree in trees]
        tokens = [again + fed for again, fed in zip(self._again, self._fed, strict=True)]
        if not self.replays:
            if self._undecided:  # passes that are only measured
                self._cache.crop(-self._undecided)
            self._records = record_past(self._cache, width > 1 or self._held)
        elif not self._live:
            self._snapshot.restore()
        elif width > 1:
            self._snapshot.take()
        self._live = False
        self.replayed += self.again
        self._undecided = width
        return self._run(tokens, width, max(tree.top_k for tree in trees))

    def _run(self, tokens: list[list[int]], scored: int, top_k: int) -> Scores:
        ids = torch.tensor(tokens, device=self._input_ids.device)
        inputs, width = self._inputs(ids, scored), len(tokens[0])
        scans = Scans.over([TokenTree.chain(tokens[0][0], tokens[0][1:])], ids.device)
        with tree_forward(width=width), overriding(self._overrides if width > 1 else [], lambda: scans):
            outputs = watched(self.hidden, lambda: self._model(**inputs, return_dict=True), last=scored)
        scans.keep(torch.full((self.batch,), width - 1, device=ids.device))
        return score(outputs.logits[:, -scored:], top_k)

    def _inputs(self, tokens: Tensor, scored: int) -> dict[str, Any]:
        kwargs = dict(self._kwargs)
        count, after = tokens.shape[1], self._committed
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones((mask.shape[0], after + count))], dim=-1)
        positions = kwargs.get("position_ids")
        if positions is not None:
            steps = torch.arange(after + 1, after + count + 1, dtype=positions.dtype, device=positions.device)
            kwargs["position_ids"] = positions[..., -1:] + steps
        for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if (kinds := kwargs.get(name)) is not None:  # only text is written
                last = kinds[:, -1:] if name == "token_type_ids" else torch.zeros_like(kinds[:, :1])
                kwargs[name] = last.expand(-1, count)
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(tokens, next_sequence_length=count, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = scored
        return inputs

    def keep(self, paths: Sequence[Path]) -> None:
        """Count each sequence's visited nodes as kept."""
        for row, path in enumerate(paths):
            self._repeats.learn(row, path.tokens)
        self.repeated, self.in_a_row = self._repeats.tokens, self._repeats.in_a_row
        if not self._undecided:  # the prompt's pass, which is kept whole
            return
        count, *others = {len(path.nodes) for path in paths}
        if others:
            raise LookaheadError(
                f"The rows of a batch kept {sorted([count, *others])} tokens of a pass: expected one number, because a "
                "recurrent state cannot be padded."
            )
        width, self._undecided = self._undecided, 0
        if self._records:
            self._cache.crop(count - width)
        self._live = not self.replays or count == width
        if self._live:
            self._committed += self.again + count
            self._again = [[] for _ in paths]
            return
        for again, fed in zip(self._again, self._fed, strict=True):
            again += fed[:count]

    def fork(self) -> Self:
        """The same place in the same text, to go on from separately; before anything was drafted."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        other._kwargs = {key: other._cache if value is self._cache else value for key, value in self._kwargs.items()}
        other._snapshot = Snapshot(other._cache)
        other._again = [[] for _ in self._again]
        return other

    def hold(self) -> None:
        """Let passes that are never decided start from here again and again, for measuring."""
        self._held = True
        if self.replays:
            self._snapshot.take()

    def store(self, cache: Cache) -> None:
        """Leave the text in ``cache``, the one that was given; costs a pass if tokens wait for their replay."""
        if self._live:
            return
        self.hidden = None  # nobody drafts any more
        self._snapshot.restore()
        if self.again:
            self._run(self._again, 1, 0)
            self._committed += self.again
            self._again = [[] for _ in self._again]
        self._live = True

    def states(self) -> list[Tensor]:
        """Copies of the recurrent and convolution states, as the last pass left them."""
        return [state.clone() for layer in recurrent_layers(self._cache) for state in states_of(layer).values()]

    def bucket(self, nodes: int) -> int:
        return nodes

    def holds(self, row: int) -> bool:
        """No sequence waits for the others: all advance together."""
        return False

    def close(self) -> None:
        """The call is over: the cache is plain decoding's again."""
        if not self.replays:
            record_past(self._cache, False)

    def room(self) -> list[int] | None:
        """How long each sequence's draft may be; 0 where too much would be replayed."""
        written = self._committed + self.again
        if self.again >= _MOST_AGAIN:
            return [0] * self.batch
        if self._depth_limit is None:
            return None
        return [max(0, self._depth_limit - self._last - written - 2)] * self.batch

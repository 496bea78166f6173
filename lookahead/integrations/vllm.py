"""vLLM: a proposer of linear drafts behind its custom-class interface. It needs no part of vLLM::

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "lookahead.integrations.vllm.LookaheadProposer", "num_speculative_tokens": 8}'

vLLM tells a proposer token ids and no logits, so drafts come from each request's own text (:class:`.SuffixSource`), and
where that has no match from what the model wrote in any request (token recycling without the model's other choices).
The interface is that of vLLM 0.33; the contract is tested against arrays, inside vLLM it has not been run.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jacobi import Path, TokenTree
from lookahead.sources import SuffixSource

_LEAST = 0.05  # chance of a whole chain, by the sources' priors, below which it goes no further
_RECYCLED = 0.35  # chance of a recycled token
_ORDER = 2  # tokens in the context of a recycled one
_MOST_RECYCLED = 1 << 16
_PATH = Path([0], [0])


class _Recycled:
    """The newest token that followed each context, in any request; bounded, the longest unused goes first."""

    def __init__(self) -> None:
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def learn(self, text: Sequence[int], start: int) -> None:
        for place in range(max(start, _ORDER), len(text)):
            context = tuple(text[place - _ORDER : place])
            self._next[context] = text[place]
            self._next.move_to_end(context)
        while len(self._next) > _MOST_RECYCLED:
            self._next.popitem(last=False)

    def after(self, context: tuple[int, ...]) -> int | None:
        return self._next.get(context)


class _Request:
    """The text of one request, and where its repetitions are."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._source = SuffixSource()

    def fits(self, tokens: np.ndarray) -> bool:
        """Whether ``tokens`` go on from this text."""
        known = len(self.text)
        return known <= len(tokens) and bool(np.array_equal(tokens[:known], self.text))

    def extend(self, tokens: list[int]) -> None:
        tree = TokenTree(0)
        for token in tokens:
            _PATH.tokens[0] = token
            self._source.learn(tree, _PATH, None)
        self.text += tokens

    def chain(self, most: int, recycled: _Recycled) -> list[int]:
        """The likeliest continuation of at most so many tokens."""
        source, drafted = self._source, list[int]()
        state, chance = source.root(), 1.0
        while len(drafted) < most:
            found = source.propose(state)
            if found:
                token, kind = max(found, key=lambda candidate: source.priors[candidate[1]])
                chance *= source.priors[kind]
            else:
                known = recycled.after(tuple([*self.text[-_ORDER:], *drafted][-_ORDER:]))
                if known is None:
                    break
                token, chance = known, chance * _RECYCLED
            if chance < _LEAST:
                break
            drafted.append(token)
            state = source.step(state, token)
        return drafted


class LookaheadProposer:
    """Drafts for vLLM's scheduler. One for an engine; not for several threads."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._kept = 2 * int(vllm_config.scheduler_config.max_num_seqs)
        self._requests: OrderedDict[int, _Request] = OrderedDict()  # by a number of our own, used last at the end
        self._rows: dict[int, int] = {}  # by vLLM's row: which request it held in the last step
        self._made = 0
        self._recycled = _Recycled()

    def load_model(self, *args: Any, **settings: Any) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each row of a step.

        Args:
            sampled_token_ids: the tokens that each row has just written; a row with none is still in its prefill, or
                asks for no drafts, and gets none.
            num_tokens_no_spec: int ``[row]``, the tokens of each row's text, those included.
            token_ids_cpu: int ``[row, position]``, the texts; what lies behind is not read.
            slot_mappings: not needed.

        Returns:
            For each row at most ``num_speculative_tokens`` tokens, and never past ``max_model_len``.
        """
        drafts: list[list[int]] = []
        rows: dict[int, int] = {}
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            room = min(self._most, self._max_length - length)
            if not len(sampled) or room <= 0:
                if row in self._rows:
                    rows[row] = self._rows[row]
                drafts.append([])
                continue
            tokens = np.asarray(token_ids_cpu[row, :length])
            number = self._request_of(row, tokens, taken=set(rows.values()))
            rows[row] = number
            request = self._requests[number]
            known = len(request.text)
            request.extend(tokens[known:].tolist())
            self._recycled.learn(request.text, max(known, length - len(sampled)))
            drafts.append(request.chain(room, self._recycled))
        self._rows = rows
        while len(self._requests) > self._kept:
            self._requests.popitem(last=False)
        return drafts

    def _request_of(self, row: int, tokens: np.ndarray, taken: set[int]) -> int:
        """The request whose text goes on in a row: mostly the one that was there, as rows seldom move."""
        before = self._rows.get(row, -1)
        others = (number for number in reversed(self._requests) if number != before)
        for number in (before, *others):
            request = self._requests.get(number)
            if request is not None and number not in taken and request.text and request.fits(tokens):
                self._requests.move_to_end(number)
                return number
        self._made += 1
        self._requests[self._made] = _Request()
        return self._made

"""A model without weights: its next token is any function of the whole prefix, so that tests can try all of them."""

import random
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st

from jacobi import Drafter, GreedyVerifier, Path, Scores, Step, TokenTree, solve

NextToken = Callable[[Sequence[int]], int]


def examples(count: int) -> settings:
    """The same examples in every run, with no clock involved."""
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


def hashed(seed: int, vocab: int, order: int | None = None) -> NextToken:
    """An arbitrary function of the last ``order`` tokens (None: of all of them); low orders soon run in circles."""

    def next_token(prefix: Sequence[int]) -> int:
        seen = prefix if order is None else prefix[len(prefix) - min(order, len(prefix)) :]
        return (zlib.crc32(bytes([seed % 256, *seen])) >> 5) % vocab

    return next_token


def functions(vocab: int = 5) -> st.SearchStrategy[NextToken]:
    """Next-token functions from the simple to the chaotic."""
    return st.builds(hashed, st.integers(0, 255), st.integers(1, vocab), st.sampled_from([0, 1, 2, 3, None]))


def plain(
    next_token: NextToken, prompt: Sequence[int], count: int, end_tokens: frozenset[int] = frozenset()
) -> list[int]:
    """Plain decoding written out: one token after the other."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(next_token(text))
        if text[-1] in end_tokens:
            break
    return text[len(prompt) :]


class ToyModel:
    """The solver's model over a next-token function; it also refuses trees that do not start at the decided token."""

    def __init__(self, next_token: NextToken, prompts: Sequence[Sequence[int]], vocab: int = 32) -> None:
        self.next_token = next_token
        self.vocab = vocab
        self.history = [list(prompt[:-1]) for prompt in prompts]
        self.roots = [prompt[-1] for prompt in prompts]
        self.trees: list[TokenTree] = []

    def prefill(self) -> Scores:
        self.trees = [TokenTree(root) for root in self.roots]
        return self._score()

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        self.trees = list(trees)
        return self._score()

    def _score(self) -> Scores:
        logits = torch.zeros(len(self.trees), max(map(len, self.trees)), self.vocab)
        for row, tree in enumerate(self.trees):
            for node in range(len(tree)):
                branch = [tree.tokens[ancestor] for ancestor in tree.path(node)]
                logits[row, node, self.next_token(self.history[row] + branch)] = 1.0
        return Scores(logits, logits.argmax(-1).tolist())

    def keep(self, paths: Sequence[Path]) -> None:
        for row, (tree, path) in enumerate(zip(self.trees, paths, strict=True)):
            if not path.nodes:
                continue
            assert tree.tokens[0] == self.roots[row], "the root must be the last decided token"
            self.history[row] += [tree.tokens[node] for node in path.nodes]
            self.roots[row] = path.tokens[-1]


def decode(
    drafter: Drafter, next_token: NextToken, prompt: Sequence[int], count: int, end_tokens: frozenset[int] = frozenset()
) -> tuple[list[int], list[Step]]:
    """One row through the common loop: the text, and every step with the prompt's pass first."""
    verifier = GreedyVerifier(1, count, end_tokens)
    steps = list(solve(ToyModel(next_token, [prompt]), [drafter], verifier))
    return verifier.tokens[0], steps


def rooms(steps: Iterable[Step], count: int) -> list[tuple[TokenTree, int]]:
    """Each drafted tree with the depth that was left for it when ``count`` tokens are to be written."""
    left, pairs = count, []
    for index, step in enumerate(steps):
        if index:
            pairs.append((step.trees[0], left - 1))
        left -= len(step.paths[0].tokens)
    return pairs


def decoded_as_plain(
    drafter: Drafter, next_token: NextToken, prompt: Sequence[int], count: int, end_tokens: frozenset[int]
) -> list[Step]:
    """The steps of a decode whose text is plain decoding's, in no more passes, with no tree deeper than its room."""
    text, steps = decode(drafter, next_token, prompt, count, end_tokens)
    assert text == plain(next_token, prompt, count, end_tokens)
    assert len(steps) <= len(text)
    assert all(max(tree.depths) <= room for tree, room in rooms(steps, count))
    return steps


def seeded(seed: int) -> random.Random:
    """A source of randomness of the caller's own."""
    return random.Random(seed)

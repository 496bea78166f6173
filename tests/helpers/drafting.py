"""A source and a head whose candidates stand in a table, and estimates with given rates."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from helpers.models import VOCAB, prompts, same_as_plain

from jacobi import Path, Successors, TokenTree
from lookahead.models.names import CACHE

SLOTS = 2  # of a kind: first to propose a token, or in agreement


class TableSource:
    """Candidates by the path from the root; what is not in the table has none."""

    def __init__(
        self, name: str, table: dict[tuple[int, ...], list[tuple[int, int]]], priors: Sequence[float] = (0.5,)
    ) -> None:
        self.name = name
        self.priors = priors
        self.table = table
        self.asked: list[tuple[int, ...]] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        pass

    def root(self) -> tuple[int, ...]:
        return ()

    def step(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def propose(self, state: tuple[int, ...]) -> list[tuple[int, int]]:
        self.asked.append(state)
        return self.table.get(state, [])

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        pass


class Told:
    """Passes that say what a table says, and nothing after other branches; they note what they are asked."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.asked: list[list[Any]] = []
        self._table = {tuple(map(ord, branch)): said for branch, said in table.items()}

    def after(self, branches: Sequence[Any]) -> list[Any]:
        self.asked.append(["".join(map(chr, branch)) for branch in branches])
        said = [self._table.get(tuple(branch)) for branch in branches]
        return [each and (np.array([*map(ord, each[0])]), np.array(each[1])) for each in said]

    def start(self, prompt: Any) -> None: ...
    def write(self, path: Any) -> None: ...


def questions(passes: Any, rng: random.Random) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Branches that grow by chance, and what passes of a head say after each."""
    branches: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(0, 3)):
        asked = [(*rng.choice(branches), rng.randrange(VOCAB)) for _ in range(rng.randint(1, 3))]
        yield from zip(asked, passes.after(asked), strict=True)
        branches += asked


def with_few_hidden_states(model: Any, strategy: Any, **settings: Any) -> list[Any]:
    """Outputs for prompts of which few hidden states are seen: read in chunks, given as embeddings, or behind a cache
    that is continued; their texts are plain decoding's."""
    inputs = prompts(1)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
    before = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    kept = {CACHE: copy.deepcopy(before[CACHE])}
    longer = {"input_ids": before.sequences, "attention_mask": torch.ones_like(before.sequences)}
    length = settings["max_new_tokens"]
    plain = model.generate(**longer, **kept, max_new_tokens=length)
    ours = {"return_dict_in_generate": True, "use_lookahead": True, "lookahead_strategy": strategy}
    continued = model.generate(**longer, **{CACHE: before[CACHE]}, max_new_tokens=length, **ours)
    assert continued.sequences.tolist() == plain.tolist()
    return [
        same_as_plain(model, inputs, strategy, prefill_chunk_size=5, **settings),
        same_as_plain(model, given, strategy, **settings),
        continued,
    ]


def tokens_of(candidates: Sequence[tuple[int, int]]) -> list[int]:
    return [token for token, _ in candidates]


def successors(*lines: Sequence[int]) -> Successors:
    """Nodes after which the model likes these tokens equally."""
    return Successors(np.array(lines, np.int32), np.zeros((len(lines), len(lines[0])), np.float32))


def spread(*lines: Sequence[float]) -> Successors:
    """Nodes after which tokens 4, 5, ... have these logits."""
    tokens = np.arange(4, 4 + len(lines[0]), dtype=np.int32)
    return Successors(np.tile(tokens, (len(lines), 1)), np.array(lines, np.float32))

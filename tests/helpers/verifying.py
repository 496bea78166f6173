"""A verifier on its own: sequences, limits and scores without a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from jacobi import Scores
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier


class Limits:
    """No limit but what a test sets."""

    def __init__(self) -> None:
        self.rooms: list[int] | None = None
        self.held: set[int] = set()

    def room(self) -> list[int] | None:
        return self.rooms

    def holds(self, row: int) -> bool:
        return row in self.held


def settings(*, end: Sequence[int] = (), length: int | None = None, **fields: Any) -> tuple[Any, GenerationConfig]:
    """Stopping criteria and a config as ``generate`` prepares them; 0 pads."""
    criteria = StoppingCriteriaList()
    if length is not None:
        criteria.append(MaxLengthCriteria(length))
    if end:
        criteria.append(EosTokenCriteria(torch.tensor(end)))
    config = GenerationConfig(**fields)
    config._pad_token_tensor = torch.tensor(0)
    return criteria, config


def sequences_of(prompts: list[list[int]], *, keep_up: bool = False, **given: Any) -> Sequences:
    """Sequences that have written nothing yet."""
    criteria, config = settings(**given)
    return Sequences(torch.tensor(prompts), criteria, config, keep_up=keep_up)


def verifier_of(
    prompts: list[list[int]],
    *,
    keep_up: bool = False,
    processors: Sequence[Any] = (),
    verification: Any = "exact",
    in_lockstep: bool = False,
    rule: Any = None,
    more: Sequence[Any] = (),
    **given: Any,
) -> tuple[Verifier, Sequences, Limits]:
    """A verifier, what it writes into, and what limits it; ``more`` are stopping criteria."""
    criteria, config = settings(**given)
    criteria = StoppingCriteriaList([*criteria, *more])
    sequences, limits = Sequences(torch.tensor(prompts), criteria, config, keep_up=keep_up), Limits()
    made = Verifier(
        sequences,
        LogitsProcessorList(processors),
        criteria,
        config,
        limits,
        verification=verification,
        in_lockstep=in_lockstep,
        rule=rule,
    )
    return made, sequences, limits


def scores_of(logits: Tensor) -> Scores:
    """Scores ``[batch, node, vocab]`` as a pass gives them."""
    broken = frozenset((int(row), int(node)) for row, node in logits.isnan().any(-1).nonzero())
    return Scores(logits, logits.argmax(-1).tolist(), broken)


def writes(tokens: Sequence[Sequence[int]], vocab: int = 12) -> Scores:
    """Scores under which node n of row r is followed by ``tokens[r][n]``."""
    logits = torch.zeros(len(tokens), max(map(len, tokens)), vocab)
    for row, line in enumerate(tokens):
        for node, token in enumerate(line):
            logits[row, node, token] = 9.0
    return scores_of(logits)

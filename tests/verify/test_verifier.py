"""The verifier on its own: how the sequences of a batch are walked, who waits, what is recorded and refused."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.verifying import scores_of, verifier_of, writes
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    InfNanRemoveLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import StoppingCriteria

from jacobi import Path, TokenTree

CHAIN = TokenTree.chain(1, [2, 3, 4])  # nodes 0 to 3
RIGHT = [2, 3, 4, 5]  # what makes all of it accepted, and 5 the bonus token
WRONG = [2, 7, 4, 5]  # two tokens are written


class Shown(LogitsProcessor):
    """A processor of the caller's own, which notes the batch it is shown."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids.tolist())
        return scores


class Ends(StoppingCriteria):
    """A rule of the caller's own: says what a test wants said of every batch."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.said


@pytest.mark.parametrize("processors", [[], [TemperatureLogitsWarper(0.5)], [RepetitionPenaltyLogitsProcessor(1.01)]])
def test_each_sequence_goes_at_its_own_pace(processors: list[Any]) -> None:
    verifier, sequences, _ = verifier_of([[1], [1]], processors=processors)
    paths = verifier.decide([CHAIN, CHAIN], writes([RIGHT, WRONG]))
    assert [path.nodes for path in paths] == [[0, 1, 2, 3], [0, 1]]
    assert sequences.written == [RIGHT, [2, 7]]


def test_in_lockstep_all_wait_for_the_first_that_leaves_its_tree() -> None:
    """The model asks for it, or a processor that may look at the whole batch, which is shown whole."""
    seen = Shown()
    for given in ({"in_lockstep": True}, {"processors": [seen]}):
        verifier, sequences, _ = verifier_of([[1], [1]], **given)
        verifier.decide([CHAIN, CHAIN], writes([RIGHT, WRONG]))
        assert sequences.written == [[2, 3], [2, 7]]
    assert seen.texts == [[[1], [1]], [[1, 2], [1, 2]]]


def test_in_step_those_that_are_ahead_wait() -> None:
    verifier, sequences, _ = verifier_of([[1], [1], [1]])
    verifier.decide([CHAIN] * 3, writes([RIGHT, WRONG, [7, 7, 7, 7]]))
    sequences.in_step = True
    for lengths in ([4, 2, 2], [4, 3, 3], [4, 4, 4], [5, 5, 5]):
        verifier.decide([TokenTree.chain(5, [6, 6])] * 3, writes([[6, 6, 6]] * 3))
        assert sequences.lengths() == lengths


def test_alone_the_callers_processor_sees_every_prefix() -> None:
    seen = Shown()
    verifier, _, _ = verifier_of([[1]], processors=[seen])
    assert verifier.decide([CHAIN], writes([RIGHT])) == [Path([0, 1, 2, 3], RIGHT)]
    assert seen.texts == [[[1, 2, 3, 4][:count]] for count in range(1, 5)]


def test_an_end_token_ends_the_walk_and_finished_sequences_catch_up() -> None:
    verifier, sequences, _ = verifier_of([[1], [1]], end=[3], length=20, keep_up=True)
    verifier.decide([CHAIN, CHAIN], writes([WRONG, RIGHT]))
    assert sequences.written == [[2, 7], [2, 3]]
    assert verifier.room()[1] == 0
    padding = TokenTree.chain(3, [0, 0, 0])
    verifier.decide([TokenTree.chain(7, [8]), padding], writes([[8, 9], [5, 5, 5, 5]]))
    assert sequences.written == [[2, 7, 8, 9], [2, 3, 0, 0]]
    assert sequences.lengths() == [4, 2]
    assert not verifier.done
    verifier.decide([TokenTree(9), padding], writes([[3], [5]]))
    assert sequences.written == [[2, 7, 8, 9, 3], [2, 3, 0, 0, 0]]
    assert verifier.done


def test_room_is_what_fits_the_text_and_the_model() -> None:
    verifier, sequences, limits = verifier_of([[1], [1]], length=9)
    assert verifier.room() == [7, 7], "the root decides one token of eight"
    limits.rooms = [3, 99]
    sequences.written[1] += [4, 4]
    assert verifier.room() == [3, 5]


def test_who_is_held_by_the_model_writes_nothing() -> None:
    verifier, sequences, limits = verifier_of([[1], [1]])
    limits.held = {0}
    paths = verifier.decide([CHAIN, CHAIN], writes([RIGHT, RIGHT]))
    assert paths[0] == Path()
    assert sequences.written == [[], RIGHT]


@pytest.mark.parametrize("said", [True, torch.tensor(True), torch.tensor([True]), torch.tensor([True, True])])
def test_a_rule_may_say_it_in_any_form(said: Any) -> None:
    """One answer for all, or one a sequence."""
    for stop, count in ((said, 1), (not said if isinstance(said, bool) else ~said, 4)):
        verifier, sequences, _ = verifier_of([[1], [1]], more=[Ends(stop)])
        verifier.decide([CHAIN, CHAIN], writes([RIGHT, RIGHT]))
        assert [len(written) for written in sequences.written] == [count, count]
        assert sequences.finished == [count == 1] * 2


@pytest.mark.parametrize("keywords", [{}, {"in_lockstep": True}, {"do_sample": True}])
def test_nan_is_told_by_pass_row_and_token(keywords: dict[str, Any]) -> None:
    verifier, _, _ = verifier_of([[1], [1]], **keywords)
    right = writes([RIGHT, RIGHT])
    verifier.decide([TokenTree(1), TokenTree(1)], writes([[2], [2]], 12))
    right.logits[1, 1] = torch.nan
    refuses(r"NaN at step 2 \(row 1, token 3\)", verifier.decide, [CHAIN, CHAIN], scores_of(right.logits))


def test_nan_that_a_processor_removes_is_none_of_ours() -> None:
    verifier, sequences, _ = verifier_of([[1]], processors=[InfNanRemoveLogitsProcessor()])
    scores = writes([RIGHT])
    scores.logits[0, 3, 7] = torch.nan
    verifier.decide([CHAIN], scores_of(scores.logits))
    assert sequences.written == [RIGHT]


def test_what_is_recorded_is_what_was_written() -> None:
    """One ``[batch, vocab]`` an index: scores after the processors, logits before them."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    verifier, _, _ = verifier_of([[1], [1]], in_lockstep=True, processors=[TemperatureLogitsWarper(0.5)], **asked)
    verifier.decide([CHAIN, CHAIN], writes([RIGHT, RIGHT]))
    scores, logits = verifier.recorded("scores"), verifier.recorded("logits")
    assert scores is not None
    assert logits is not None
    assert [line.argmax(-1).tolist() for line in scores] == [[token, token] for token in RIGHT]
    assert torch.equal(torch.stack(scores), 2 * torch.stack(logits))
    assert verifier_of([[1]])[0].recorded("scores") is None


@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_recorded_is_not_held_twice(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a batch's lines are put together, those of earlier indices are gone."""
    asked = {"return_dict_in_generate": True, "output_scores": True}
    verifier, _, _ = verifier_of([[1]] * batch, processors=[TemperatureLogitsWarper(0.5)], **asked)
    verifier.decide([CHAIN] * batch, writes([RIGHT] * batch))
    lines = [[weakref.ref(line) for line in row.values()] for row in verifier._sampler.records._lines["scores"]]
    alive: list[int] = []
    stack = torch.stack

    def counted(tensors: Any, *given: Any, **named: Any) -> Tensor:
        alive.append(sum(line() is not None for row in lines for line in row))
        return stack(tensors, *given, **named)

    monkeypatch.setattr(torch, "stack", counted)
    assert len(verifier.recorded("scores") or ()) == len(RIGHT)
    assert alive == [batch * left for left in range(len(RIGHT), 0, -1)]


TARGET = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.15, 0.05])
DRAFTS = torch.tensor([0.1, 0.3, 0.1, 0.0, 0.1, 0.4])


def test_rejection_knows_what_candidates_were_drawn_from() -> None:
    """The tokens have the model's distribution, and more drafts are accepted than without knowing."""
    verifier, sequences, _ = verifier_of([[1]], verification="rejection", do_sample=True)
    scores = scores_of(TARGET.log().repeat(1, 3, 1))
    torch.manual_seed(0)
    accepted = {}
    for known in (True, False):
        del sequences.written[0][:]
        counts: Counter[int] = Counter()
        kept = 0
        for _ in range(3000):
            tree = TokenTree(1)
            for token in torch.multinomial(DRAFTS, 2).tolist():
                tree.add(0, token)
            tree.drawn_from = {0: dict(enumerate(DRAFTS.tolist()))} if known else None
            (path,) = verifier.decide([tree], scores)
            counts[path.tokens[0]] += 1
            kept += len(path.tokens) - 1
        statistic = sum((counts[token] - 3000 * float(p)) ** 2 / (3000 * float(p)) for token, p in enumerate(TARGET))
        assert statistic < 20.52, "the upper 0.1 % point of chi-square with five degrees of freedom"
        accepted[known] = kept
    assert accepted[True] > 1.1 * accepted[False]

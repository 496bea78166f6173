"""Choices that walks wait for: one after the other, or those of several sequences together."""

from collections.abc import Generator, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from lookahead.verify.sampler import Place, Sampler, ScoredPass

_T = TypeVar("_T")


class Choice(NamedTuple):
    """Choice that a walk waits for: the tokens at one place of each of several rows of a pass."""

    sampler: Sampler
    now: ScoredPass
    places: Sequence[Place]

    def tokens(self) -> list[int]:
        return self.sampler.choose(self.now, self.places)


def walked(walk: Generator[Choice, list[int], _T]) -> _T:
    """Result of a walk."""
    try:
        choice = next(walk)
        while True:
            choice = walk.send(choice.tokens())
    except StopIteration as end:
        return end.value


def walked_together(walks: Sequence[Generator[Choice, list[int], _T]]) -> list[_T | Exception]:
    """Results of several walks, or the error of each that fails. They go from choice to choice in step, and those
    made alike are made in one computation::

        first sequence, T 0.8     root    node 3    done
        second, T 0.8             root    done
        third, with a penalty     root    node 1    done
        computations                 2         2
    """
    found: dict[int, _T | Exception] = {}
    asked: dict[int, Any] = dict.fromkeys(range(len(walks)))  # what each is told next; None = it begins
    while asked:
        choices: dict[int, Choice] = {}
        for place, told in asked.items():
            try:
                choices[place] = walks[place].send(told)
            except StopIteration as end:
                found[place] = end.value
            except Exception as error:
                found[place] = error
        asked = _chosen(choices, found)
    return [found[place] for place in range(len(walks))]


def _chosen(choices: dict[int, Choice], found: dict[int, _T | Exception]) -> dict[int, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for place, choice in choices.items():
        alike = choice.sampler.alike(choice.now.scores.logits) if len(choice.places) == 1 else None
        groups.setdefault((alone := alike is None, place if alone else alike), []).append(place)
    told: dict[int, list[int]] = {}
    for places in groups.values():
        given = [(each.sampler, each.now, each.places[0]) for each in map(choices.__getitem__, places)]
        together = given[0][0].choose_alike(given) if len(places) > 1 else None
        for at, place in enumerate(places):
            try:
                told[place] = choices[place].tokens() if together is None else [together[at]]
            except Exception as error:
                found[place] = error
    return told

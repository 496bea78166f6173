"""Whose answer is begun next, where more are asked for than can be written at a time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lookahead.serve.jobs import Job


class FairTurns:
    """Gives turns to addresses, there to their users, and there to jobs: to the one for whom fewest rows write, of
    several to the one that has waited longest for a turn, and of these to who came first::

        rows          asking                          next
        A A A B       A's fourth, B's second          B
        A B           A's second, B's second, C       C
        (none)        A's second, B (A was last)      B

    So nobody waits for all that another asks, whoever they say they are: users of one address share its turns.
    """

    def __init__(self) -> None:
        self._last: dict[Any, int] = {}  # number of the last turn of an address and of a user, while they ask
        self._number = 0

    def next(self, asking: Sequence[Job], writing: Sequence[Job]) -> Job | None:
        """The job of those ``asking`` to which the next row goes, beside the rows of those ``writing``."""
        if not asking:
            return None
        rows = Counter[Any]()
        for job in writing:
            rows.update({job.address: len(job.tasks), job.client: len(job.tasks)})
        known = {key for job in (*asking, *writing) for key in (job.address, job.client)}
        last = self._last = {key: turn for key, turn in self._last.items() if key in known}

        def waits(job: Job) -> tuple[int, ...]:
            of_both = [(rows[key], last.get(key, 0)) for key in (job.address, job.client)]
            return (*of_both[0], *of_both[1], len(job.tasks))

        found = min(asking, key=waits)
        self._number += 1
        last[found.address] = last[found.client] = self._number
        return found

"""Messages between the ranks that run one call: one collective a pass, of one shape.

Every rank adds its part to one int64 tensor, and the sum is what all of them read: rank 0's trees (the others add
zeros), and for each rank a place for its status and one for its checksum. So nobody waits for a message that nobody
sends: a rank that fails says so in the message that the others wait for::

    rank 0    0 .  8f3c .     17 tokens and parents
    rank 1    . 1  .    8f3c  0 0 0 ...                 rank 1 has failed
    sum       0 1  8f3c 8f3c  17 tokens and parents     all ranks raise

The messages have a group of their own, over gloo on the host: they never mix with the collectives of the model's
passes, and no device waits for them.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jacobi import LookaheadError


class RankError(LookaheadError):
    """Some rank has failed, is gone, or does something else than the others."""


class Messages:
    """Messages between the ranks of one group in a call. Every method that says so is called by all ranks."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._checksum = 0

    def agree(self, what: dict[str, Any]) -> None:
        """All ranks: raise a :class:`RankError` unless all of them say the same, and name what differs."""
        told = [_hash(value) for value in what.values()]
        table = torch.zeros(self.size, len(told), dtype=torch.int64)
        table[self.rank] = torch.tensor(told)
        self._sum(table)
        differs = [name for name, column in zip(what, table.T.tolist(), strict=True) if len(set(column)) > 1]
        if differs:
            raise RankError(
                f"The ranks' calls differ in {', '.join(differs)}: expected the same call on all {self.size} ranks."
            )

    def share_generators(self, device: torch.device) -> None:
        """All ranks: go on from the state of rank 0's generators, the host's and the device's."""
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        for state in states:
            with _told():
                dist.broadcast(state, group_src=0, group=self._group)
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)

    def note(self, tokens: Sequence[int]) -> None:
        """Take tokens into this rank's checksum; which is compared in the next message."""
        self._checksum = zlib.crc32(json.dumps(list(tokens)).encode(), self._checksum)

    def exchange(self, content: Tensor, failed: bool = False) -> Tensor:
        """All ranks: the sum of their contents, int64 of one shape.

        Raises:
            RankError: a rank has failed, is gone, or has written another text.
        """
        head = torch.zeros(2, self.size, dtype=torch.int64)
        head[0, self.rank], head[1, self.rank] = int(failed), self._checksum
        message = torch.cat([head.flatten(), content])
        self._sum(message)
        if failed:
            return content
        status, sums = message[: 2 * self.size].view(2, self.size).tolist()
        if any(status):
            gone = ", ".join(str(rank) for rank, code in enumerate(status) if code)
            raise RankError(f"Rank {gone} of {self.size} has failed, and its own error says why: the call has ended.")
        if len(set(sums)) > 1:
            raise RankError(
                f"The ranks have written different texts (checksums {sums}): their logits differ, or a processor or "
                "stopping rule does. Check that all of them load the same weights and are given the same arguments."
            )
        return message[2 * self.size :]

    @contextmanager
    def failing(self, size: int) -> Iterator[None]:
        """Around the passes of a call: tell the others if this rank fails. ``size`` is that of a content."""
        try:
            yield
        except RankError:
            raise
        except BaseException:
            with suppress(RankError):  # where nobody listens any more, the error at hand says more
                self.exchange(torch.zeros(size, dtype=torch.int64), failed=True)
            raise

    def _sum(self, tensor: Tensor) -> None:
        with _told():
            dist.all_reduce(tensor, group=self._group)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise RankError(
            "Another rank is gone, has not answered in time, or decodes without parallel= or lookahead: "
            f"expected the same call on every rank ({reason})."
        ) from error


def message_group(group: Any) -> Any:
    """A new group of the same ranks for messages, with the same patience; called by all of them."""
    ranks = dist.get_process_group_ranks(group)
    settings: dict[str, Any] = {"backend": "gloo", "use_local_synchronization": True}
    return dist.new_group(ranks, timeout=_patience(group), **settings)


def _patience(group: Any) -> timedelta:
    for kind in ("cuda", "cpu"):
        try:
            found = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return timedelta(seconds=found.total_seconds())
    return timedelta(minutes=10)


def _hash(value: Any) -> int:
    if isinstance(value, Tensor):
        value = [list(value.shape), value.tolist()]
    return zlib.crc32(json.dumps(value, sort_keys=True, default=repr).encode())

"""What ranks tell each other, and what is said where nobody answers."""

import pytest
import torch
import torch.distributed as dist

from lookahead.parallel.messages import Messages, RankError


def test_a_rank_that_does_not_answer_may_decode_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*given: object, **settings: object) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", gone)
    told = r"without parallel= .*expected the same call on every rank \(Connection closed by peer\)\.$"
    with pytest.raises(RankError, match=told):
        Messages(None).exchange(torch.zeros(1, dtype=torch.int64))

"""A batch's requests answered by replicas, on Ray Data."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lookahead.ray.cluster import share
from lookahead.serve.batches import Answerer, Line, Outcome

_ROUNDS = 4  # times that a replica's rows are filled by one task: fewer lose less to a kill, more waste less at its end


class _Actor:
    """A replica: answers the lines of one task after the other."""

    def __init__(self, make: Callable[[], Answerer]) -> None:
        self._answerer = make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        lines = [Line(**json.loads(text)) for text in batch["line"]]
        return {"outcome": [json.dumps(vars(outcome)) for outcome in self._answerer.answer(lines)]}

    def __del__(self) -> None:
        if hasattr(self, "_answerer"):
            self._answerer.cut()
            self._answerer.close()


def answered(
    ray: Any,
    make: Callable[[], Answerer],
    lines: Sequence[Line],
    replicas: int,
    rows: int = 8,
    resources: dict[str, Any] | None = None,
) -> Iterator[Outcome]:
    """What becomes of requests, in the order in which tasks end. A task whose replica dies is done again by another
    one; nothing of it has been told before.

    Args:
        ray: the module, connected (:func:`lookahead.ray.cluster.connected`).
        make: makes what answers, in each replica's process.
        replicas: processes with a model.
        rows: answers that each of them writes at a time.
        resources: ``num_cpus`` and ``num_gpus`` of each; None = an even part of the cluster.
    """
    size = max(1, min(_ROUNDS * rows, -(-len(lines) // (2 * replicas))))
    tasks = -(-len(lines) // size)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    texts = [{"line": json.dumps(vars(line))} for line in lines]
    found = ray.data.from_items(texts, override_num_blocks=tasks).map_batches(
        _Actor,
        fn_constructor_args=(make,),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=replicas),
        **(share(ray, replicas) if resources is None else resources),
    )
    for row in found.iter_rows():
        yield Outcome(**json.loads(row["outcome"]))

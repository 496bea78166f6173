"""The ranks of a lookahead-parallel call: replicas that score parts of rank 0's trees."""

from typing import Any

import torch.distributed as dist

from lookahead._per_model import PerModel
from lookahead.parallel.split import SplitModel, refusal
from lookahead.parallel.tensor import TensorParallel
from lookahead.runtime.tree import TreeModel
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier

_times: PerModel[dict[Any, Any]] = PerModel(dict)


class Replicas(TensorParallel):
    """One call's ranks, all of torch.distributed's default group: as in tensor parallelism rank 0 drafts, but each rank
    scores its part of a tree by itself. Two messages of one shape a pass: the trees, and what was found at their nodes.
    """

    _tells_top_k = True

    def __init__(self, model: Any, sequences: Sequences) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise refusal("torch.distributed is not initialised, as it is under torchrun after init_process_group")
        super().__init__(model, sequences)
        self._model = model
        self._split: SplitModel | None = None

    def _ranks(self, model: Any) -> Any:
        return dist.group.WORLD

    def times(self, kept: dict[Any, Any]) -> dict[Any, Any]:
        """Passes over parts have curves of their own."""
        return _times.of(self._model)

    def around(self, model: TreeModel) -> SplitModel:
        """The model whose passes the ranks share."""
        self._split = SplitModel(model, self.messages, self._size)
        return self._split

    def asks(self, verifier: Verifier) -> None:
        assert self._split is not None
        why = verifier.why_not_ahead()
        if why is not None:
            raise refusal(why)
        self._split.choices = verifier.choices if verifier.chooses else None

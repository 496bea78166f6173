"""Its settings, and its training beside a model."""

from typing import Any, Self

from torch import Tensor
from torch.nn.functional import cross_entropy

from bigram_head.head import BigramHead
from bigram_head.strategy import Bigram
from lookahead.models.output_layer import output_sizes
from lookahead.training.drafter import Seen, TrainedHead
from lookahead.training.settings import TrainingSettings


class BigramSettings(TrainingSettings):
    def rate(self, hidden_size: int) -> float:
        return self.learning_rate or 0.1


class TrainedBigram(TrainedHead):
    settings, source, strategy, title = BigramSettings, "bigram", Bigram, "Bigram head"
    use = "model.generate(**inputs, custom_generate=Bigram('folder'))"

    @classmethod
    def fresh(cls, model: Any, settings: Any, examples: Any = (), name: str | None = None) -> Self:
        return cls(BigramHead(output_sizes(model)[1]), settings)

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = cross_entropy(self.head(seen.tokens[:, :-1]).flatten(0, 1), seen.labels[:, 1:].flatten())
        return loss, {"loss_0": loss.detach()}

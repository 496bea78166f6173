"""Options that several commands have: dataclasses to inherit from, and single options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from transformers import PreTrainedModel
from typer import Option

from lookahead.bundled import BUNDLED
from lookahead.cli import common
from lookahead.strategies.base import Stats, Strategy
from lookahead.strategies.lookahead import Lookahead

NewTokensOption = Annotated[int, Option("--max-new-tokens", "--new-tokens", min=1, help="Most tokens, per prompt.")]
JsonOption = Annotated[bool, Option("--json", help="One JSON document instead of text and tables.")]
DeviceOption = Annotated[str, Option(help="cpu, cuda, cuda:1, ...; auto is CUDA where there is one.")]
Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
_DTYPE_HELP = "Of the weights; auto is the checkpoint's own. Texts are exact in float32 and float64."
DtypeOption = Annotated[Dtype, Option(help=_DTYPE_HELP)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: Annotated[str | None, Option(metavar="DIR", help="A model with its tokenizer. Default: bundled.")] = None
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"

    @property
    def model_name(self) -> str:
        """The model as JSON documents name it."""
        return "bundled" if self.model is None else self.model

    def load(self) -> tuple[PreTrainedModel, Any]:
        return common.load(self.model, self.dtype, self.device)

    def described(self, model: PreTrainedModel, strategy: Strategy | None, others: dict[str, Any]) -> dict[str, Any]:
        """What decided about a text, for a JSON document."""
        named = {"strategy": "plain"} if strategy is None else strategy.to_dict()
        ends = {"dtype": common.dtype_name(model), "device": str(model.device)}
        return {"model": self.model_name, "strategy": named} | others | ends


@dataclass(frozen=True, kw_only=True)
class ServedOptions(ModelOptions):
    served_model_name: Annotated[str | None, Option(help="What requests call the model. Default: its folder.")] = None

    @property
    def name(self) -> str:
        """What requests call the model."""
        folder = BUNDLED if self.model is None else Path(self.model).absolute()
        return self.served_model_name or folder.name


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    window_size: Annotated[int | None, Option(help="W, columns of the window. Default: automatic.")] = None
    ngram_size: Annotated[int | None, Option(help="N, length of an n-gram. Default: automatic.")] = None
    verification_set_size: Annotated[int | None, Option(help="G, most guesses in a pass. Default: automatic.")] = None

    def sizes(self) -> dict[str, Any]:
        """W, N and G as published, by their names in :class:`Lookahead`; all None is the automatic mode."""
        return {name: getattr(self, name) for name in ("window_size", "ngram_size", "verification_set_size")}

    def lookahead(self, seed: int | None = None, stats: Stats = "summary") -> Lookahead:
        """The strategy, which remembers nothing: a text that is written twice is not easier the second time."""
        return Lookahead(**self.sizes(), seed=seed, stats=stats, remember=False)

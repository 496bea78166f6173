"""A recurrent head as users hold it, read from Apple's files, with their names. The tensors decide what a head is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from jacobi import LookaheadError
from jacobi import Path as Walk
from lookahead.heads.base import ResBlock, best_next, check_sizes, fitted
from lookahead.heads.storage import fill, read_head, some, write_head
from lookahead.models.output_layer import output_sizes
from lookahead.sources.draft_model import Branch, Said

MODEL_TYPE = "recurrent_drafting_drafter"


@dataclass(frozen=True)
class RecurrentSizes:
    """What a head looks like.

    Attributes:
        vocab_size: tokens that it scores, all of the model's.
        hidden_size: of the model; the recurrent state and embeddings are as wide.
        exit_size: what the residual blocks work on; None = twice ``hidden_size``, and nothing is projected.
        layers: residual blocks before the output layer.
        rnn: whether the state is that of a recurrent network, or a sum of embeddings.
    """

    vocab_size: int
    hidden_size: int
    exit_size: int | None = None
    layers: int = 1
    rnn: bool = True


def sizes_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str) -> RecurrentSizes:
    """What the tensors are of, by their names; ``name`` is named in errors."""
    layers = 0
    while f"lm_head.{layers}.linear.weight" in tensors:
        layers += 1
    output = tensors.get(f"lm_head.{layers}.weight")
    if output is None or output.ndim != 2:
        found = some(sorted(tensors)) or "nothing"
        raise LookaheadError(
            f"{name} is no ReDrafter head: expected lm_head.0.linear.weight and so on, and the output layer behind "
            f"them as lm_head.{layers}.weight; it has {found}."
        )
    vocab, exit_size = output.shape
    projection, rnn = tensors.get("input_proj.weight"), any(name.startswith("rnn_") for name in tensors)
    if config.get("rnn") and not rnn:
        raise LookaheadError(f"{name} is no whole ReDrafter head: config.json says rnn, and it lacks rnn_u and rnn_w.")
    joined = exit_size if projection is None or projection.ndim != 2 else projection.shape[1]
    if joined % 2:
        raise LookaheadError(
            f"{name}: the head reads {joined} channels, expected twice the model's hidden size: a hidden state "
            "beside the recurrent state."
        )
    return RecurrentSizes(vocab, joined // 2, None if projection is None else exit_size, layers, rnn)


class RecurrentHead(nn.Module):
    """One head, ready to draft beside models of its sizes (Cheng et al., arXiv 2403.09919, section 3.1).

    It walks along a draft from the last decided token on. The model's hidden state ``h`` at the token before stays the
    same; the state ``s`` takes in one token after the other::

        decided    once  upon  a            h = what the output layer read at "upon", where it chose "a"
        draft                  a   time     s = 0 -> "a" -> s1     scores of (h, s1) say what follows "a"
                                                 -> "time" -> s2   scores of (h, s2) say what follows "a time"
    """

    formats: ClassVar[tuple[str, ...]] = ("apple",)  # that it is written in

    def __init__(self, sizes: RecurrentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, exit_size = sizes.hidden_size, sizes.exit_size or 2 * sizes.hidden_size
        self.input_proj = nn.Linear(2 * hidden, exit_size) if sizes.exit_size else None
        blocks = (ResBlock(exit_size) for _ in range(sizes.layers))
        self.lm_head = nn.Sequential(*blocks, nn.Linear(exit_size, sizes.vocab_size, bias=False))
        self.rnn_u = nn.Linear(hidden, hidden) if sizes.rnn else None
        self.rnn_w = nn.Linear(hidden, hidden, bias=False) if sizes.rnn else None

    def step(self, states: Tensor, embedded: Tensor) -> Tensor:
        """The states ``[branch, hidden]`` one token further on, by its embedding."""
        if self.rnn_u is None or self.rnn_w is None:
            return states + embedded
        return silu(self.rnn_w(embedded) + self.rnn_u(states))

    def forward(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Scores ``[branch, vocab]`` of what follows ``states`` ``[branch, hidden]``, beside the model's ``hidden``."""
        joined = torch.cat([hidden, states], dim=-1)
        return self.lm_head(joined if self.input_proj is None else self.input_proj(joined))

    @property
    def weight(self) -> Tensor:
        """The output layer's: it has the head's device and dtype."""
        return cast(nn.Linear, self.lm_head[-1]).weight

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str], *, model: PreTrainedModel | None = None, **hub: Any) -> Self:
        """Read a head from a folder, a file or a repository of the hub (``hub`` says how to download).

        With ``model`` it is checked against that, and put on its device in the dtype that it computes in.

        Raises:
            LookaheadError: what is missing, foreign, broken, or does not fit the model.
        """
        tensors, config = read_head(source, hub, "ReDrafter head")
        with torch.device("meta"):
            head = cls(sizes_of(tensors, config, str(source)))
        return fitted(fill(head, tensors, str(source), "ReDrafter head"), model)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` as Apple's; a LookaheadError if that fails, or for NaN."""
        sizes = self.sizes
        config = {
            "architectures": ["Drafter"],
            "exit_dim": self.weight.shape[1],
            "hidden_size": sizes.hidden_size,
            "model_type": MODEL_TYPE,
            "num_draft_layers": sizes.layers,
            "rnn": sizes.rnn,
            "torch_dtype": str(self.weight.dtype).removeprefix("torch."),
            "vocab_size": sizes.vocab_size,
        }
        write_head(folder, self.state_dict(), config)

    def facts(self) -> dict[str, Any]:
        """What it looks like."""
        return asdict(self.sizes)

    def check(self, model: PreTrainedModel) -> None:
        """Refuse, with a LookaheadError, a model that the head was not made for."""
        hidden, vocab = output_sizes(model)
        embedded = model.get_input_embeddings().weight.shape[1]
        facts: dict[str, tuple[int | None, int]] = {
            "reads hidden states of size": (self.sizes.hidden_size, hidden),
            "reads embeddings of size": (self.sizes.hidden_size, embedded),
            "scores a vocabulary of": (self.sizes.vocab_size, vocab),
        }
        check_sizes("This ReDrafter head", facts, model)


class RecurrentPasses:
    """What a head says at the nodes of one sequence's drafts.

    States live for one draft: where the text goes on, they begin anew at its last token::

        text    once upon a        h: read at "upon"; s("a") from nothing
        draft   a -+- time - ,     s("a", "time") from s("a"), s("a", "time", ",") from that
                   +- day          s("a", "day") from s("a"), too

    Args:
        features: gives what the model's output layer read in the last pass, ``[row, node, hidden]``.
        embed: the model's embeddings.
        vocab_size: tokens that the model can be fed.
    """

    def __init__(
        self, head: RecurrentHead, features: Callable[[], Tensor], row: int, embed: nn.Module, vocab_size: int
    ) -> None:
        self._head, self._features, self._row, self._embed = head, features, row, embed
        self._vocab_size = vocab_size
        self._hidden = torch.empty(0)  # [hidden], where the last token was chosen
        self._root = -1
        self._states: dict[Branch, Tensor] = {}  # [hidden], of the last token's own state and below

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing: of the prompt, only where its next token was chosen matters."""

    def write(self, path: Walk) -> None:
        self._hidden = self._features()[self._row, path.nodes[-1]].to(self._head.weight, copy=True)
        self._root = path.tokens[-1]
        self._states.clear()

    @torch.no_grad()
    def after(self, branches: Sequence[Branch]) -> list[Said]:
        missing = {branch[:end] for branch in branches for end in range(len(branch) + 1)} - self._states.keys()
        weight, nothing = self._head.weight, torch.zeros_like(self._hidden)
        for depth in sorted({len(branch) for branch in missing}):  # the parents of a depth are known
            new = sorted(branch for branch in missing if len(branch) == depth)
            tokens = torch.tensor([branch[-1] if branch else self._root for branch in new], device=weight.device)
            above = torch.stack([self._states[branch[:-1]] if branch else nothing for branch in new])
            self._states.update(zip(new, self._head.step(above, self._embed(tokens).to(weight)), strict=True))
        states = torch.stack([self._states[branch] for branch in branches])
        return best_next(self._head(self._hidden.expand(len(branches), -1), states), self._vocab_size)

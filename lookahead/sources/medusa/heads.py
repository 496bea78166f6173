"""The extra heads of Medusa: each guesses one token further ahead from the model's last hidden state.

Cai et al., arXiv 2401.10774, section 2.1.1. Head k (from 0) reads the hidden state of a token and predicts the token
k + 2 places after it; the model's own output layer predicts the next one. A head is a few residual blocks and an output
layer, its own or the model's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn.functional import silu

from jacobi import LookaheadError
from lookahead.models.output_layer import copyable_weight
from lookahead.models.output_layer import output_layer as output_layer
from lookahead.models.output_layer import output_sizes as output_sizes
from lookahead.models.output_layer import placement as placement

Output = Callable[[Tensor], Tensor]

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # of the hub

_CARD = """---
{{ card_data }}
---

# Medusa heads{% if base_model %} for {{ base_model }}{% endif %}

{{ num_heads }} Medusa heads of {{ num_layers }} residual block{{ "" if num_layers == 1 else "s" }} each, with
{{ "output layers of their own" if own_output else "the output layer of the model they belong to" }}
(hidden size {{ hidden_size }}{% if vocab_size %}, vocabulary {{ vocab_size }}{% endif %}).
They are of use only beside the model that they were trained for, whose text they do not change where acceptance is
exact.

```python
from lookahead.medusa import Medusa, MedusaHeads

heads = MedusaHeads.from_pretrained("folder or name of this repository")
model.generate(**inputs, custom_generate=Medusa(heads))
```

Method: [Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads]({{ paper_url }}).
"""


class ResBlock(nn.Module):
    """``x + silu(W x + b)``. W and b start as zeros, so a fresh block changes nothing.

    Args:
        hidden_size: channels in and out.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states in and out, ``[..., hidden]``."""
        return hidden + silu(self.linear(hidden))


class MedusaHeads(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="lookahead",
    tags=["medusa", "speculative-decoding"],
    paper_url="https://arxiv.org/abs/2401.10774",
    model_card_template=_CARD,
):
    """Medusa's heads, kept apart from the model that they run beside.

    Use :meth:`for_model` for fresh heads and :meth:`from_pretrained` for trained ones.

    Args:
        hidden_size: channels of what the model's output layer reads.
        vocab_size: tokens that it scores; None where heads without an output layer do not say, then any will do.
        num_heads: K; head k (from 0) predicts the token k + 2 places after the one it reads.
        num_layers: residual blocks of a head.
        own_output: whether each head has an output layer of its own, without a bias. Otherwise the heads use the
            model's output layer, and do not store it.
        base_model: name or folder of the model that the heads belong to.

    Attributes:
        blocks: the residual blocks ``[head][layer]``.
        outputs: the heads' own output layers; empty if they use the model's.
        token_map: the tokens that own output layers score, int64 ``[scored]``, where those are not all of the
            vocabulary (vLLM's ``truncated_vocab_size``); else None. Such heads are read, and not made here.

    Raises:
        LookaheadError: a size that is not a natural number, or heads without anything to learn.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int | None,
        num_heads: int = 4,
        num_layers: int = 1,
        own_output: bool = False,
        base_model: str | None = None,
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("hidden_size", hidden_size, 1),
            ("vocab_size", 1 if vocab_size is None and not own_output else vocab_size, 1),
            ("num_heads", num_heads, 1),
            ("num_layers", num_layers, 0 if own_output else 1),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise LookaheadError(f"MedusaHeads cannot have {name}={size!r}: expected an integer from {least} on.")
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.own_output = own_output
        self.base_model = base_model
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(hidden_size) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size or 0, bias=False) for _ in range(num_heads if own_output else 0)
        )
        self.token_map: Tensor | None
        self.register_buffer("token_map", None, persistent=False)

    @classmethod
    def for_model(cls, model: Any, num_heads: int = 4, num_layers: int = 1, own_output: bool = False) -> Self:
        """Fresh heads for ``model``, each of which starts as the model's own output layer.

        They are made on the device of the output layer and in the dtype that the model computes in. Nothing of the
        model is changed, so it may be quantised.

        Args:
            model: a causal model.
            num_heads: K.
            num_layers: residual blocks of a head.
            own_output: whether each head gets a copy of the output layer, to be trained apart from it; a bias of the
                layer is left out, as in the published heads.

        Raises:
            LookaheadError: the output layer cannot be reached, or ``own_output`` asks for copies of one that is
                quantised, sharded or offloaded.
        """
        hidden_size, vocab_size = output_sizes(model)
        layer = output_layer(model)
        weight = copyable_weight(layer)
        if own_output and weight is None:
            raise LookaheadError(
                f"The output layer of {type(model).__name__}, a {type(layer).__name__}, cannot be copied into the "
                "heads: expected a plain floating weight in memory, not a quantised, sharded or offloaded one. Use "
                "own_output=False, or load the output layer without that."
            )
        base_model = getattr(getattr(model, "config", None), "_name_or_path", None) or None
        with torch.device("meta"):
            heads = cls(hidden_size, vocab_size, num_heads, num_layers, own_output, base_model)
        device, dtype = placement(model)
        heads.to(dtype).to_empty(device=device)
        with torch.no_grad():
            for parameter in heads.blocks.parameters():
                parameter.zero_()
            for copy in heads.outputs.parameters():
                copy.copy_(cast(Tensor, weight))
        return heads

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        model: Any = None,
        map_location: str | torch.device = "cpu",
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
    ) -> "MedusaHeads":
        """Read heads from a folder, a file or a repository of the hub, in any of the published formats.

        Their number, layers and sizes are taken from the tensors, because config.json may be wrong. The heads are in
        evaluation mode. See :mod:`lookahead.sources.medusa.checkpoints.reading`.

        Args:
            pretrained_model_name_or_path: the folder, file or repository.
            model: the model that they are for: they are checked against it, and moved to its device and dtype. Without,
                they stay in the dtype that they are stored in.
            map_location: the device they go to where no model is given.
            force_download: do not use what was downloaded before.
            token: for the hub.
            cache_dir: where downloads are kept.
            local_files_only: download nothing.
            revision: branch, tag or commit of the repository.

        Raises:
            LookaheadError: there are no heads, they are not complete, or they do not fit the model.
        """
        from lookahead.sources.medusa.checkpoints import reading as checkpoints  # not at the top: it makes heads

        heads = checkpoints.read_heads(
            pretrained_model_name_or_path,
            model,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )
        return heads if model is not None else heads.to(map_location)

    def _save_pretrained(self, save_directory: Path) -> None:
        from lookahead.sources.medusa.checkpoints import reading as checkpoints  # not at the top: it makes heads

        checkpoints.write_files(self, save_directory)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that :meth:`save_pretrained` writes as README.md: what the heads are, and which model they need."""
        info = self._hub_mixin_info
        data = type(info.model_card_data)(**info.model_card_data.to_dict())
        if self.base_model and _REPOSITORY.fullmatch(self.base_model) and not Path(self.base_model).exists():
            data.base_model = self.base_model
        facts = {
            name: getattr(self, name) for name in ("num_heads", "num_layers", "own_output", "hidden_size", "vocab_size")
        }
        return ModelCard.from_template(
            data,
            template_str=info.model_card_template,
            paper_url=info.paper_url,
            **facts | {"base_model": data.base_model} | kwargs,
        )

    def check(self, model: Any) -> None:
        """Refuse to run beside a model that the heads do not fit.

        Raises:
            LookaheadError: the model's output layer cannot be reached or has other sizes, or the heads hold numbers
                that are not finite.
        """
        hidden_size, vocab_size = output_sizes(model)
        for what, ours, theirs in (
            ("vocabulary", self.vocab_size or vocab_size, vocab_size),
            ("hidden size", self.hidden_size, hidden_size),
        ):
            if ours != theirs:
                belongs = f" and belong to {self.base_model}" if self.base_model else ""
                raise LookaheadError(
                    f"The heads are those of another model: they have a {what} of {ours}{belongs}, and "
                    f"{type(model).__name__} has one of {theirs}. Use heads that were trained for it."
                )
        self.check_finite()

    def check_finite(self) -> None:
        """Refuse weights that are not finite.

        Raises:
            LookaheadError: with the name of the first such parameter.
        """
        with torch.no_grad():
            for name, weight in self.named_parameters():
                # A sum takes no memory; where one overflows, a closer look decides.
                if weight.sum(dtype=_wide(weight)).isfinite():
                    continue
                if bad := int((~weight.isfinite()).sum()):
                    raise LookaheadError(
                        f"The heads are broken: {bad} of {weight.numel()} numbers of {name} are NaN or infinite. Train "
                        "them again with a lower learning rate, or read another checkpoint."
                    )

    def states(self, hidden: Tensor) -> Tensor:
        """What the output layers read.

        Args:
            hidden: what the model's output layer reads, ``[..., hidden]``, on any device and in any floating dtype.

        Returns:
            ``[head, ..., hidden]``, on the device and in the dtype of ``hidden``.
        """
        first = next(self.parameters())
        inner = hidden.to(first.device, first.dtype)
        states = []
        for layers in self.blocks:
            state = inner
            for layer in layers.children():
                state = layer(state)
            states.append(state)
        return torch.stack(states).to(hidden.device, hidden.dtype)

    def forward(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """The logits of all heads.

        Args:
            hidden: what the model's output layer reads, ``[..., hidden]``.
            output: the model's output layer, see :func:`output_layer`; needed by heads without their own.

        Returns:
            ``[head, ..., vocab]``.

        Raises:
            LookaheadError: the heads have no output layer, and none is given.
        """
        return self.logits(self.states(hidden), output)

    def logits(self, states: Tensor, output: Output | None = None) -> Tensor:
        """What the output layers make of :meth:`states`; see :meth:`forward`."""
        if self.own_output:
            first = next(self.outputs.parameters())
            states = states.to(first.device, first.dtype)
            scored = torch.stack([layer(state) for layer, state in zip(self.outputs, states, strict=True)])
            return self.over_vocabulary(scored)
        if output is None:
            raise LookaheadError(
                "These heads use the model's output layer: expected it as the second argument, got none. Pass "
                "output_layer(model)."
            )
        return output(states)  # one product for all heads

    def over_vocabulary(self, scored: Tensor) -> Tensor:
        """What own output layers say, ``[..., scored]``, as logits ``[..., vocab]``; -inf where they do not score."""
        if self.token_map is None:
            return scored
        logits = scored.new_full((*scored.shape[:-1], self.vocab_size or 0), -torch.inf)
        logits[..., self.token_map] = scored
        return logits

    def top(self, hidden: Tensor, output: Output | None, count: int) -> tuple[Tensor, Tensor]:
        """The best candidates of every head, the best first.

        Args:
            hidden: what the model's output layer reads, ``[..., hidden]``.
            output: the model's output layer; needed by heads without their own.
            count: candidates of a head.

        Returns:
            Their log-probabilities, float32, and their token ids, int64, both ``[head, ..., count]``.

        Raises:
            LookaheadError: ``count`` is not between 1 and the vocabulary.
        """
        return best_of(self(hidden, output), count)


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best candidates of every head; see :meth:`MedusaHeads.top`.

    Args:
        logits: ``[head, ..., vocab]``.
        count: candidates of a head.
    """
    logits = logits.float()
    if not 1 <= count <= logits.shape[-1]:
        raise LookaheadError(
            f"{count} candidates are asked of each head: expected 1 to {logits.shape[-1]}, all of the vocabulary."
        )
    best, ids = logits.topk(count, dim=-1)
    return best - logits.logsumexp(-1, keepdim=True), ids


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype is torch.float64 else torch.float32

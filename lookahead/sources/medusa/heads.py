"""Medusa's heads with all that is around the network: fresh ones for a model, checkpoints, the card, checks."""

import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self, cast

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import Tensor

from jacobi import LookaheadError
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement
from lookahead.sources.medusa.checkpoints.formats import HeadsConfig, HeadTensors
from lookahead.sources.medusa.checkpoints.reading import read_checkpoint
from lookahead.sources.medusa.checkpoints.writing import write_medusa
from lookahead.sources.medusa.network import HeadsNetwork

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # of the hub

_CARD = """---
{{ card_data }}
---

# Medusa heads{% if base_model %} for {{ base_model }}{% endif %}

{{ num_heads }} Medusa heads of {{ num_layers }} residual block{{ "" if num_layers == 1 else "s" }} each, with
{{ "output layers of their own" if own_output else "the output layer of the model they belong to" }}
(hidden size {{ hidden_size }}{% if vocab_size %}, vocabulary {{ vocab_size }}{% endif %}).
They are of use only beside the model that they were trained for. With exact acceptance they do not change its text.

```python
from lookahead.medusa import Medusa, MedusaHeads

heads = MedusaHeads.from_pretrained("folder or name of this repository")
model.generate(**inputs, custom_generate=Medusa(heads))
```

Method: [Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads]({{ paper_url }}).
"""


class MedusaHeads(
    HeadsNetwork,
    PyTorchModelHubMixin,
    library_name="lookahead",
    tags=["medusa", "speculative-decoding"],
    paper_url="https://arxiv.org/abs/2401.10774",
    model_card_template=_CARD,
):
    """Medusa's heads, kept apart from the model that they run beside.

    Use :meth:`for_model` for fresh heads and :meth:`from_pretrained` for trained ones; the constructor takes the sizes
    that :class:`HeadsNetwork` lists.
    """

    @classmethod
    def for_model(cls, model: Any, num_heads: int = 4, num_layers: int = 1, own_output: bool = False) -> Self:
        """Fresh heads for ``model``, each of which starts as the model's own output layer.

        They are on the device of the output layer, in the dtype that the model computes in; the model, which may be
        quantised, stays as it is. With ``own_output`` each head trains its own copy of the output layer, without a
        bias, as in the published heads.

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
        base_model = getattr(getattr(model, "config", None), "name_or_path", None) or None
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
    def from_tensors(cls, tensors: HeadTensors, model: Any = None) -> Self:
        """Heads that hold these very tensors, in evaluation mode; checked against their ``model``, if that is given."""
        vocab_size, token_map = tensors.config.vocab_size, tensors.token_map
        scored = vocab_size if token_map is None else len(token_map)
        with torch.device("meta"):
            heads = cls(**asdict(tensors.config) | {"vocab_size": scored})
        heads.load_state_dict(tensors.state, assign=True)
        heads.token_map, heads.vocab_size = token_map, vocab_size
        if model is not None:
            heads.check(model)
        return heads.eval()

    def tensors(self) -> HeadTensors:
        """As a checkpoint takes them."""
        sizes = {field.name: getattr(self, field.name) for field in fields(HeadsConfig)}
        return HeadTensors(HeadsConfig(**sizes), self.state_dict(), self.token_map)

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
    ) -> Self:
        """Read heads from a folder, a file or a repository of the hub, in any of the published formats.

        Their number, layers and sizes are those of the tensors, because config.json may be wrong. The heads are in
        evaluation mode.

        Args:
            pretrained_model_name_or_path: a folder, file of tensors, index of a sharded model, or ``owner/name``.
            model: the heads' model: they are checked against it and moved to its device and dtype. Without one, they
                stay in the dtype that they are stored in.
            map_location: the device they go to without a model.
            force_download, token, cache_dir, local_files_only, revision: see :func:`huggingface_hub.hf_hub_download`.

        Raises:
            LookaheadError: there are no heads, they are incomplete, would have to run code, or do not fit the model.
        """
        hub = {"force_download": force_download, "token": token, "cache_dir": cache_dir}
        hub |= {"local_files_only": local_files_only, "revision": revision}
        heads = cls.from_tensors(read_checkpoint(pretrained_model_name_or_path, model, hub=hub).tensors, model)
        return heads.to(map_location) if model is None else heads.to(*placement(model))

    def _save_pretrained(self, save_directory: Path) -> None:
        write_medusa(self.tensors(), save_directory)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that :meth:`save_pretrained` writes as README.md: what the heads are, and which model they need."""
        info = self._hub_mixin_info
        data = type(info.model_card_data)(**info.model_card_data.to_dict())
        if self.base_model and _REPOSITORY.fullmatch(self.base_model) and not Path(self.base_model).exists():
            data.base_model = self.base_model
        facts = asdict(self.tensors().config) | {"base_model": data.base_model, "paper_url": info.paper_url}
        return ModelCard.from_template(data, template_str=info.model_card_template, **facts | kwargs)

    def check(self, model: Any) -> None:
        """Raise a LookaheadError if the model's output layer is out of reach or has other sizes, or a weight is NaN."""
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
        """Raise a LookaheadError that names the first parameter with numbers that are not finite."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                # A sum takes no memory; where one overflows, a closer look decides.
                wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
                if weight.sum(dtype=wide).isfinite():
                    continue
                if bad := int((~weight.isfinite()).sum()):
                    raise LookaheadError(
                        f"The heads are broken: {bad} of {weight.numel()} numbers of {name} are NaN or infinite. Train "
                        "them again with a lower learning rate, or read another checkpoint."
                    )

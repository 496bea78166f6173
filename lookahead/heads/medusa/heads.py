"""Medusa's heads with all that is around the network: fresh ones for a model, files in all formats, card, checks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from safetensors.torch import save_file
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead._files import whole_folder
from lookahead.heads.medusa.choices import ChoiceTree, choices_from
from lookahead.heads.medusa.network import HeadsNetwork
from lookahead.heads.medusa.reading import MEDUSA, read_checkpoint
from lookahead.heads.storage import HEADS_FILE
from lookahead.models.fingerprint import broken_weight, look_for_broken_weight
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement

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
_TOLD = ("hidden_size", "vocab_size", "num_heads", "num_layers", "own_output")  # in the card


class MedusaHeads(
    HeadsNetwork,
    PyTorchModelHubMixin,
    library_name="lookahead",
    tags=["medusa", "speculative-decoding"],
    paper_url="https://arxiv.org/abs/2401.10774",
    model_card_template=_CARD,
):
    """Medusa's heads, kept apart from the model that they run beside.

    Use :meth:`for_model` for fresh heads and :meth:`from_pretrained` for trained ones; the constructor takes sizes.
    """

    formats: ClassVar[tuple[str, ...]] = ("medusa",)  # that they are written in

    @classmethod
    def for_model(cls, model: Any, num_heads: int = 4, num_layers: int = 1, own_output: bool = False) -> Self:
        """Fresh heads for ``model``, each of which starts as the model's own output layer.

        They are on the device of the output layer, in the dtype that the model computes in; the model, which may be
        quantised, stays as it is. With ``own_output`` each head trains its own copy of the output layer, without a
        bias, as in the published heads. A LookaheadError if the output layer cannot be reached, or copies are asked for
        of one that is quantised, sharded or offloaded.
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
    def as_stored(cls, source: str | Path, *, model: Any = None, **hub: Any) -> Self:
        """Heads in the dtype that they are stored in; the arguments are those of :meth:`from_pretrained`."""
        read = read_checkpoint(source, model, hub)
        with torch.device("meta"):
            heads = cls(**read.sizes)
        heads.load_state_dict(read.state, assign=True)
        heads.stored = read.told
        if model is not None:
            heads.check(model)
        return heads.eval()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        model: Any = None,
        map_location: str | torch.device = "cpu",
        **hub: Any,
    ) -> Self:
        """Read heads in any published format, in evaluation mode.

        Their number, layers and sizes are those of the tensors, because config.json may be wrong.

        Args:
            pretrained_model_name_or_path: a folder, file of tensors, index of a sharded model, or ``owner/name``.
            model: the heads' model: they are checked against it and moved to its device and dtype. Without one, they
                stay in the dtype that they are stored in.
            map_location: the device they go to without a model.
            hub: how to download, see :func:`huggingface_hub.hf_hub_download`.

        Raises:
            LookaheadError: there are no heads, they are incomplete, would have to run code, or do not fit the model.
        """
        heads = cls.as_stored(pretrained_model_name_or_path, model=model, **hub)
        return heads.to(map_location) if model is None else heads.to(*placement(model))

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write heads as version 1, or as version 2 if they use the model's output layer."""
        self.check_finite()
        config = {
            "base_model_name_or_path": self.base_model,
            "hidden_size": self.hidden_size,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "version": "1" if self.own_output else "2",
            "vocab_size": self.vocab_size,
        }
        outputs, state = range(self.num_heads if self.own_output else 0), self.state_dict()
        names = MEDUSA.names(self.num_heads, self.num_layers, ("weight", "bias"), outputs)
        tensors = {theirs: state[ours].detach().cpu().contiguous() for ours, theirs in names.items()}
        save_file(tensors, save_directory / HEADS_FILE, {"format": "pt"})
        (save_directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def facts(self) -> dict[str, Any]:
        """What they look like, and where they were read from."""
        sizes = {
            "heads": self.num_heads,
            "layers": self.num_layers,
            "output_layers": "own" if self.own_output else "the model's",
            "hidden_size": self.hidden_size,
            "vocabulary": self.vocab_size,
            "dtype": str(next(self.parameters()).dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
            "base_model": self.base_model,
        }
        return self.stored | sizes

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that :meth:`save_pretrained` writes as README.md: what the heads are, and which model they need."""
        info = self._hub_mixin_info
        data = type(info.model_card_data)(**info.model_card_data.to_dict())
        name = self.base_model or ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():  # a repository of the hub
            data.base_model = name
        facts = {name: getattr(self, name) for name in _TOLD}
        facts |= {"base_model": data.base_model, "paper_url": info.paper_url}
        return ModelCard.from_template(data, template_str=info.model_card_template, **facts | kwargs)

    def check(self, model: Any) -> None:
        """Raise a LookaheadError if the model's output layer is out of reach or has other sizes, or a weight is NaN."""
        hidden_size, vocab_size = output_sizes(model)
        scored = self.vocab_size or vocab_size
        for what, ours, theirs in (("vocabulary", scored, vocab_size), ("hidden size", self.hidden_size, hidden_size)):
            if ours != theirs:
                belongs = f" and belong to {self.base_model}" if self.base_model else ""
                raise LookaheadError(
                    f"The heads are those of another model: they have a {what} of {ours}{belongs}, and "
                    f"{type(model).__name__} has one of {theirs}. Use heads that were trained for it."
                )
        self.check_finite(broken_weight)

    def check_finite(self, look: Callable[[nn.Module], str | None] = look_for_broken_weight) -> None:
        """Raise a LookaheadError that names the first parameter with numbers that are not finite."""
        if (broken := look(self)) is not None:
            cure = "Train them again with a lower learning rate, or read another checkpoint."
            raise LookaheadError(f"The heads are broken: {broken}. {cure}")


def read_heads(source: str | Path, model: Any = None, **hub: Any) -> MedusaHeads:
    """Read heads in any published format: :meth:`MedusaHeads.from_pretrained` by another name, with its arguments."""
    return MedusaHeads.from_pretrained(source, model=model, **hub)


def write_heads(heads: MedusaHeads, folder: str | Path, *, replace: bool = False) -> None:
    """Write heads to a folder, new or empty: all of it or nothing. With ``replace``, files in it are deleted.

    The format is that of :meth:`MedusaHeads.save_pretrained`: version 1, or version 2 if the heads use the model's
    output layer. A LookaheadError if the folder is not empty or cannot be written to, the heads hold NaN, or score only
    some of the tokens, which this format cannot say.
    """
    try:
        with whole_folder(folder, replace) as part:
            heads.save_pretrained(part)
    except OSError as error:
        raise LookaheadError(f"{folder} cannot be written: {error}.") from error


def tree_beside(folder: str) -> ChoiceTree | None:
    file = Path(folder).expanduser() / "tree.json"
    return choices_from(file) if file.is_file() else None

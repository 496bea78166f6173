"""Where heads are stored: in a file, in the shards of a model, in a folder or in a repository of the hub; and what
their configs say."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary
from zipfile import ZipFile, is_zipfile

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead._files import on_hub, write_text

Stored = TypeVar("Stored", bound=nn.Module)

HEADS_FILE = "medusa_lm_head.safetensors"
MODEL_FILE = "model.safetensors"

WHOLE_MODELS = ("model.safetensors.index.json", MODEL_FILE, "pytorch_model.bin.index.json", "pytorch_model.bin")
_SCALE = ".scale"  # follows the name of a matrix of 8 bits
_MOST_TIES = 4  # times that a file's numbers may be in tensors: models tie a layer or two
_FILES = (HEADS_FILE, "medusa_lm_head.pt", *WHOLE_MODELS)


@dataclass(frozen=True)
class StoredTensors:
    """The file of each tensor, and ``get``, which reads one of them to the CPU."""

    files: dict[str, Path]
    get: Callable[[str], Tensor]


@dataclass(frozen=True)
class Location:
    """A folder, or a repository of the hub, and the one file in it that was named, if any."""

    name: str  # as the caller wrote it
    folder: Path | None  # None for a repository
    file: str | None  # None if only the folder was named
    hub: Mapping[str, Any]  # how to download

    def find(self, file: str) -> Path | None:
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.name, file, **self.hub))
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise LookaheadError(f"{self.name} cannot be read from the hub: {error}") from error

    def config(self) -> dict[str, Any]:
        return {} if (path := self.find("config.json")) is None else read_json(path)

    def tensors(self, files: Sequence[str] = _FILES, what: str = "Medusa heads") -> StoredTensors:
        """The tensors of the file that was named, or of the first of ``files`` that is there; ``what`` is sought."""
        for file in files if self.file is None else (self.file,):
            if (path := self.find(file)) is not None:
                return self._open(path)
        if self.folder is None:
            raise LookaheadError(
                f"{self.name} on the hub has none of {', '.join(files)}, or cannot be reached: expected a folder here "
                f"or a repository with {what}."
            )
        suffixes = (".safetensors", ".pt", ".bin")
        others = sorted(path.name for path in self.folder.iterdir() if path.suffix in suffixes and path.is_file())
        if len(others) == 1:
            return self._open(self.folder / others[0])
        found = f"found {', '.join(others)}; name the one to read" if others else "found no file of tensors"
        raise LookaheadError(f"{self.name} holds no {what}: expected one of {', '.join(files)}, {found}.")

    def _open(self, path: Path) -> StoredTensors:
        if path.suffix == ".json":
            return self._shards(path)
        names, get = _open(path)
        return StoredTensors(dict.fromkeys(names, path), get)

    def _shards(self, index: Path) -> StoredTensors:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise LookaheadError(f"{index} is no index of a sharded model: expected a weight_map from names to files.")
        for shard in set(shards.values()):
            if shard != Path(shard).name:
                raise LookaheadError(f"{index} names the shard {shard!r}: expected a file beside it.")
        readers: dict[str, Callable[[str], Tensor]] = {}

        def get(name: str) -> Tensor:
            shard = shards[name]
            if shard not in readers:
                if (path := self.find(shard)) is None:
                    raise LookaheadError(f"{index} names {shard}, which is not there. Copy it beside the index.")
                held, readers[shard] = _open(path)
                if lost := sorted(key for key in shards if shards[key] == shard and key not in held):
                    raise LookaheadError(f"{path} lacks {some(lost)}, which {index.name} says it holds.")
            return readers[shard](name)

        return StoredTensors({name: index.with_name(shard) for name, shard in shards.items()}, get)


def locate(source: str | PathLike[str], hub: Mapping[str, Any]) -> Location:
    """Where ``source`` is: a local folder or file, or else a repository of the hub."""
    path, name = Path(source).expanduser(), fspath(source)
    if path.is_file():
        return Location(name, path.parent, path.name, hub)
    if not path.is_dir() and not on_hub(name):
        raise LookaheadError(f"{source} does not exist: expected a folder, a file, or a repository like owner/name.")
    return Location(name, path if path.is_dir() else None, None, hub)


def read_json(path: Path, name: str = "") -> dict[str, Any]:
    """The JSON object in a file, whose ``name`` is for messages."""
    name = name or str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LookaheadError(f"{name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise LookaheadError(f"{name} holds {type(content).__name__}: expected a JSON object.")
    return content


def _open(path: Path) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    if path.suffix == ".safetensors":
        try:
            file = safe_open(path, framework="pt")
            return set(file.keys()), file.get_tensor
        except (SafetensorError, OSError) as error:
            raise LookaheadError(f"{path} cannot be read as safetensors: {error}.") from error
    content = _unpickle(path)
    if not isinstance(content, Mapping):
        raise LookaheadError(f"{path} holds a {type(content).__name__}: expected tensors by name.")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise LookaheadError(
                f"{path} holds a {type(tensor).__name__} under {name!r}: expected tensors by name, and nothing else."
            )
    real = [tensor for tensor in content.values() if tensor.layout is torch.strided and not tensor.is_meta]
    stored, stated = path.stat().st_size, sum(tensor.nbytes for tensor in real)
    if stated > _MOST_TIES * stored:  # numbers that stand for many, or tensors for others
        told = f"{path} holds {stored} bytes, and its tensors say {stated}: expected all of them to be stored."
        raise LookaheadError(f"{told} Save contiguous copies.")
    return content.keys(), lambda name: content[name].detach().clone()  # the file may be mapped, and go away


def _unpickle(path: Path) -> Any:
    """The content of a torch.save file of tensors and plain containers; no code in it is run."""
    try:
        zipped = is_zipfile(path)  # files from before torch 1.6 are none, and cannot be mapped
        if zipped and any(record.compress_type for record in ZipFile(path).infolist()):
            raise ValueError("its records are compressed, and may be of any size")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a file made to break the reader may raise anything
        reason = str(error).strip().split("\n")[0]
        raise LookaheadError(
            f"{path} is not a plain file of tensors, and nothing in it was executed ({reason}): expected what "
            "torch.save writes of a state dict, or safetensors. Get the heads as safetensors from somebody you trust."
        ) from error


def some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_names(missing: Sequence[str], foreign: Sequence[str], source: str, what: str) -> None:
    """Refuse tensors of a ``what`` that lack some, or that are others."""
    if missing or foreign:
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"has {some(foreign)} besides"] * bool(foreign)
        raise LookaheadError(f"{source} is no whole {what}: it {' and '.join(parts)}.")


def fill(head: Stored, tensors: Mapping[str, Tensor], source: str, what: str) -> Stored:
    """The ``head`` with stored tensors as its weights, for decoding; refused are others, and all but finite floats."""
    expected = {name: value.shape for name, value in head.state_dict().items()}
    check_names(sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys()), source, what)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise LookaheadError(f"{source}: {name} is {list(tensor.shape)}, expected {list(expected[name])}.")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise LookaheadError(f"{source}: {name} holds {tensor.dtype} or infinite numbers, expected finite floats.")
    head.load_state_dict(tensors, assign=True)
    return head.eval()


def read_head(
    source: str | PathLike[str], hub: Mapping[str, Any], what: str, no_part: re.Pattern[str] | None = None
) -> tuple[dict[str, Tensor], Any]:
    """All tensors of a ``what``, but those whose names say that they are ``no_part`` of it, and its config.json, from a
    folder, a file in it, or a repository of the hub. No code from a file is run."""
    location = locate(source, hub)
    stored = location.tensors(WHOLE_MODELS, what)
    names = [name for name in stored.files if no_part is None or not no_part.search(name)]
    found = {name: stored.get(name) for name in names}
    for name in [name for name in names if name + _SCALE in found]:
        found[name] = found[name] * found.pop(name + _SCALE)
    return found, location.config()


def write_head(
    folder: str | PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any], bits: int = 16
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a folder. A LookaheadError if that fails, or for NaN.

    In 8 ``bits`` lines of matrices are whole numbers, ``NAME`` int8 ``[out, in]``, times ``NAME.scale`` ``[out, 1]``.
    """
    if bits not in (8, 16):
        raise LookaheadError(f"bits={bits!r}: expected 8, or 16 for weights as they are.")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in plain.items():
        if not bool(tensor.isfinite().all()):
            raise LookaheadError(f"The head is broken: {name} holds NaN or infinite numbers. Train it again.")
    for name in [name for name, tensor in plain.items() if bits == 8 and tensor.ndim == 2]:
        scale = (plain[name].float().abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-30)
        plain |= {name: (plain[name] / scale).round().to(torch.int8), name + _SCALE: scale}
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        save_file(plain, path / MODEL_FILE, {"format": "pt"})
        write_text(path / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise LookaheadError(f"{folder} cannot be written: {error}.") from error


class Told:
    """What a config says, where None is nothing; a LookaheadError where it is of another kind than expected."""

    def __init__(self, config: Mapping[str, Any], source: str, within: str = "") -> None:
        self.config, self.source, self._within = config, source, within

    def of(self, name: str, expected: str, fits: Any) -> Any:
        value = self.config.get(name)
        if value is not None and not fits(value):
            where = f"{self._within}{name}"
            raise LookaheadError(f"{self.source}: {where} in config.json must be {expected}: got {value!r}. Mend it.")
        return value

    def part(self, name: str) -> "Told":
        found = self.of(name, "an object", lambda value: isinstance(value, dict)) or {}
        return Told(found, self.source, f"{self._within}{name}.")

    def whole(self, name: str) -> int | None:
        return self.of(name, "a whole number from 1 on", lambda value: type(value) is int and value > 0)

    def number(self, name: str, default: float) -> float:
        found = self.of(name, "a number above 0", lambda value: type(value) in (int, float) and 0 < value < inf)
        return default if found is None else float(found)

    def text(self, name: str) -> str | None:
        return self.of(name, "a text", lambda value: isinstance(value, str)) or None

    def layers(self, name: str) -> tuple[int, ...]:
        return tuple(self.of(name, "a list of layer numbers", are_layers) or ())

    def refuse(self, why: str) -> LookaheadError:
        return LookaheadError(f"{self.source}: {why}")


def are_layers(value: Any) -> bool:
    """Whether a value is a list of numbers of layers."""
    return isinstance(value, list | tuple) and all(type(index) is int and index >= 0 for index in value)


def rope_of(layer: Told) -> dict[str, Any]:
    """RoPE as the head's own config says; where it says nothing its base is 10000, whatever the model's is."""
    found = [dict(layer.part(name).config) for name in ("rope_parameters", "rope_scaling")]
    told = found[0] or found[1]
    told.setdefault("rope_type", told.pop("type", None) or "default")
    if told.get("rope_theta") is None:
        told["rope_theta"] = layer.number("rope_theta", 10000.0)
    return told


def offsets_of(offsets: Tensor | None, mask: Tensor | None, rows: int | None, name: str) -> Tensor | None:
    """``d2t``, where a head of so many ``rows`` scores only some tokens; it agrees with ``t2d``, or follows from it."""
    ids = None if mask is None else _marked(mask, rows, name)
    if offsets is None:
        return None if ids is None or mask is None or len(ids) == len(mask) else ids - torch.arange(len(ids))
    if offsets.is_floating_point() or offsets.ndim != 1 or rows not in (None, len(offsets)):
        size = "one" if rows is None else f"[{rows}]"
        raise LookaheadError(f"{name}: d2t is {offsets.dtype} {list(offsets.shape)}, expected {size} whole numbers.")
    offsets = offsets.long()
    scored = offsets + torch.arange(len(offsets))
    if bool((scored < 0).any()) or len(scored.unique()) < len(scored):
        raise LookaheadError(f"{name}: d2t gives negative tokens, or one twice: expected offsets to different tokens.")
    if ids is not None and not torch.equal(scored.sort().values, ids):
        themselves = torch.equal(offsets.sort().values, ids)
        what = "holds the tokens themselves" if themselves else "gives other tokens than t2d"
        raise LookaheadError(
            f"{name}: d2t {what}: expected offsets, the token that t2d marks minus its place in the head's output."
        )
    return offsets


def _marked(mask: Tensor, rows: int | None, name: str) -> Tensor:
    """The tokens that ``t2d`` marks."""
    if mask.ndim != 1 or mask.is_floating_point():
        raise LookaheadError(f"{name}: t2d is {mask.dtype} {list(mask.shape)}, expected a flag for each token.")
    ids = mask.bool().nonzero()[:, 0]
    if rows not in (None, len(ids)):
        raise LookaheadError(
            f"{name}: t2d marks {len(ids)} tokens, and lm_head.weight scores {rows}: expected as many."
        )
    return ids


_held: "WeakValueDictionary[tuple[type, str, float], Any]" = WeakValueDictionary()


def stored_head(kind: type[Stored], source: str) -> Stored:
    """The head of a kind that ``source`` holds: the same for as long as somebody holds it and no file changes."""
    path = Path(source).expanduser()
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    key = kind, source, max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    known: Stored | None = _held.get(key)
    return known if known is not None else _held.setdefault(key, kind.from_pretrained(source))  # type: ignore[attr-defined]

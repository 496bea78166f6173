"""Folders that hold a model: which of their files are read, and what is missing. Nothing here needs torch."""

from importlib.util import find_spec
from pathlib import Path

from jacobi import LookaheadError
from lookahead._files import on_hub

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds files of weights that transformers reads."""
    return any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


def check_exists(
    source: str | None, option: str = "--model", wanted: str = "a folder with config.json and weights"
) -> None:
    """Refuse a folder that does not exist, for which transformers would search the hub."""
    if source is not None and not Path(source).expanduser().exists() and not on_hub(source):
        raise LookaheadError(f"{option} {source} does not exist: expected {wanted}.")


def find_model(source: str | Path, gguf_file: str | None = None) -> tuple[str | Path, str | None]:
    """What transformers loads from: a folder or a name on the hub, and the GGUF file there if weights are read from
    one. ``source`` may be that file itself; a folder's only one is taken where there are no other weights.

    Raises:
        LookaheadError: files are missing, several could be meant, or GGUF files cannot be read here.
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file() and gguf_file in (None, path.name):
        path, gguf_file = path.parent, path.name
    if path.is_dir():
        gguf_file = _chosen(path, gguf_file)
    elif path.exists() or str(source).startswith((".", "/", "~")):
        raise LookaheadError(f"{source} is not a folder: expected one with config.json and weights.")
    if gguf_file is not None and find_spec("gguf") is None:
        raise LookaheadError(f"{gguf_file} cannot be read without the package gguf: pip install gguf.")
    return (path if path.exists() else str(source)), gguf_file


def _chosen(folder: Path, gguf_file: str | None) -> str | None:
    """The GGUF file to read, None if weights are none; all that is needed is there."""
    names = sorted(file.name for file in folder.glob("*.gguf"))
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise LookaheadError(f"{folder} holds no {gguf_file}: it has {', '.join(names) or 'no GGUF files'}.")
        return gguf_file
    if names and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS[:2]):
        if len(names) > 1:
            which = "say by --gguf-file (gguf_file=) which to read, or name that file itself in the folder's place"
            raise LookaheadError(f"{folder} holds {', '.join(names)}: {which}.")
        return names[0]
    if not (folder / "config.json").exists():
        raise LookaheadError(f"{folder} holds no config.json: expected a folder written by save_pretrained.")
    if not names and not has_weights(folder):
        wanted = "expected *.safetensors, *.bin or *.gguf beside config.json. Copy them there, or save the model again"
        raise LookaheadError(f"{folder} holds no weights: {wanted} with save_pretrained.")
    return None

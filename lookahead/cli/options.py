"""Options that several commands have: dataclasses to inherit from, and single options. Nothing that a command's
arguments are read and checked with needs torch, whose import takes longer than to say that one is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal, dataclass_transform

from typer import Option

from jacobi import LookaheadError
from lookahead.cli.prompts import PromptsOption, read_prompts, read_text
from lookahead.cli.speculative import Speculation, speculation
from lookahead.model_folder import check_exists, find_model

PICTURES = (".png", ".svg", ".pdf")  # names of pictures end so
NewTokensOption = Annotated[int, Option("--max-new-tokens", "--new-tokens", min=1, help="Most tokens, per prompt.")]
AnswerTokensOption = Annotated[int, Option(min=1, help="Of a chat answer, where a request does not say.")]
DeviceOption = Annotated[str, Option(help="cpu, cuda, cuda:1, ...; auto is CUDA where there is one.")]
Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
_DTYPE_HELP = "Of the weights; auto is the checkpoint's own. Texts are exact in float32 and float64."
DtypeOption = Annotated[Dtype, Option(help=_DTYPE_HELP)]
_MODEL_HELP = "A model: a folder, a name on the hub, or a GGUF file. Default: the bundled one."
_GGUF_HELP = "The file of weights, in the folder or on the hub. Default: the only one where there are no other weights."
QuantizeOption = Literal["int8", "int4"]
_QUANTIZE_HELP = "Weights of so many bits, on a CPU: int8 for speed, int4 for memory. Tells what that costs the model."
_RAW_HELP = "Prompts as they are, also where the tokenizer has a chat template."


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Arguments:
    """Arguments of a command. All subclasses are frozen dataclasses, which check themselves when they are made."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise a LookaheadError that names the option that is wrong."""


class JsonOptions(Arguments):
    as_json: Annotated[bool, Option("--json", help="One JSON document instead of text and tables.")] = False


class SourceOptions(Arguments):
    model: Annotated[str | None, Option(metavar="DIR", help=_MODEL_HELP)] = None
    gguf_file: Annotated[str | None, Option(metavar="NAME", help=_GGUF_HELP)] = None

    @property
    def model_name(self) -> str:
        """The model as JSON documents name it."""
        return "bundled" if self.model is None else self.model

    def check(self) -> None:
        super().check()
        self.check_model()

    def check_model(self) -> None:
        _check_source("--model", self.model, "--gguf-file", self.gguf_file)


def _check_source(option: str, source: str | None, gguf_option: str, gguf_file: str | None) -> None:
    """Refuse weights that two options name together, and that are not there."""
    check_exists(source, option)
    if source is not None:
        find_model(source, gguf_file)
    elif gguf_file is not None:
        raise LookaheadError(f"{gguf_option} needs {option}: expected the folder that the file is in.")


class ModelOptions(SourceOptions):
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    quantize: Annotated[QuantizeOption | None, Option(help=_QUANTIZE_HELP)] = None

    def check(self) -> None:
        super().check()
        if self.quantize is None:
            return
        if self.device not in ("auto", "cpu"):
            raise LookaheadError(f"--quantize is for a CPU: got --device {self.device}. Drop one of the two.")
        if self.dtype not in ("auto", "bfloat16"):
            raise LookaheadError(
                f"--quantize takes weights in bfloat16: got --dtype {self.dtype}. Drop one of the two."
            )


class ServedOptions(ModelOptions):
    served_model_name: Annotated[str | None, Option(help="What requests call the model. Default: its folder.")] = None
    max_new_tokens: AnswerTokensOption = 1024
    prefix_mib: Annotated[int, Option(min=0, help="Kept for texts with a common beginning.")] = 1024
    rows: Annotated[int, Option(min=1, help="Answers that are written at a time, which share passes.")] = 16
    replicas: Annotated[int, Option(min=0, help="Processes with the model, on Ray; 0 = this process alone.")] = 0


class DraftOptions(Arguments):
    draft: Annotated[str | None, Option(metavar="DIR", help="A small model that drafts, too.")] = None
    draft_gguf_file: Annotated[str | None, Option(metavar="NAME", help="As --gguf-file, of the draft model.")] = None
    speculative_config: Annotated[str | None, Option(metavar="JSON", help="What drafts, in vLLM's words.")] = None
    chat_template: Annotated[Path | None, Option(metavar="FILE", help="Jinja, in place of the tokenizer's.")] = None

    @cached_property
    def drafts(self) -> Speculation:
        return Speculation(self.draft) if self.speculative_config is None else speculation(self.speculative_config)

    @cached_property
    def template(self) -> str | None:
        return None if self.chat_template is None else read_text(self.chat_template, "--chat-template")

    def check(self) -> None:
        super().check()
        if self.draft is not None and self.speculative_config is not None:
            raise LookaheadError("--draft and --speculative-config both say what drafts: drop one of them.")
        _check_source("--draft", self.drafts.draft, "--draft-gguf-file", self.draft_gguf_file)
        _ = self.template


class SizeOptions(Arguments):
    window_size: Annotated[int | None, Option(min=1, help="W, columns of the window. Default: automatic.")] = None
    ngram_size: Annotated[int | None, Option(min=1, help="N, length of an n-gram. Default: automatic.")] = None
    verification_set_size: Annotated[int | None, Option(min=0, help="G, most guesses. Default: automatic.")] = None

    def check(self) -> None:
        super().check()
        if self.ngram_size == 1 and (self.window_size, self.verification_set_size) != (1, 0):
            raise LookaheadError(
                "--ngram-size 1 is plain decoding and needs --window-size 1 and --verification-set-size 0."
            )

    def sizes(self) -> dict[str, Any]:
        """W, N and G as published, by their names in :class:`Lookahead`; all None is the automatic mode."""
        return {name: getattr(self, name) for name in ("window_size", "ngram_size", "verification_set_size")}


class RawOptions(Arguments):
    raw: Annotated[bool, Option("--raw", help=_RAW_HELP)] = False


class PromptOptions(RawOptions):
    prompts: PromptsOption = None

    @cached_property
    def texts(self) -> list[str]:
        """The prompts of the file; none where there is no file."""
        return [] if self.prompts is None else read_prompts(self.prompts)

    def check(self) -> None:
        super().check()
        _ = self.texts


def check_file(option: str, file: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold; ``suffixes``: its endings."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise LookaheadError(f"{option} {file}: there is no folder {file.parent}. Make it first.")
    if file.is_dir():
        raise LookaheadError(f"{option} {file} is a folder: expected the name of a file.")
    try:
        if not file.exists() or file.is_file():
            TemporaryFile(dir=file.resolve().parent).close()
    except OSError as error:
        raise LookaheadError(
            f"{option} {file}: the folder cannot be written to ({error.strerror}). Name another."
        ) from error
    if suffixes and file.suffix not in suffixes:
        raise LookaheadError(f"{option} {file}: expected a name that ends in {', '.join(suffixes)}.")


def check_picture(option: str, file: Path | None) -> None:
    """Refuse a picture that cannot be written, or drawn."""
    check_file(option, file, PICTURES)
    if file is not None and find_spec("matplotlib") is None:
        raise LookaheadError(f'{option} needs matplotlib: pip install "lookahead-decoding[bench]".')

"""Arguments of each command: a dataclass, whose fields are its options and whose docstring is its help."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from jacobi import LookaheadError
from lookahead.cli.options import (
    DraftOptions,
    JsonOptions,
    ModelOptions,
    NewTokensOption,
    PromptOptions,
    RawOptions,
    ServedOptions,
    SizeOptions,
    check_file,
    check_picture,
)
from lookahead.cli.prompts import PROMPTS, read_questions
from lookahead.model_folder import check_exists

_QUESTIONS = "Questions in Spec-Bench's format: JSON lines with category and turns, of which the first is asked."
_KEY_HELP = "Clients must send it as a bearer token. Better given by the environment, which other users cannot list."
_TEMPERATURE_HELP = "0 takes the likeliest tokens. Default, as of all sampling: the model's generation_config."
_SEED_HELP = "Makes a sampled text repeatable in float32, and the number of passes."
_HOST_HELP = "A name by which the server may be called without a key, or whose pages may ask. Repeatable; * = all."
_MEMORY_HELP = "Keep caches and recycled tokens for later requests, of other clients, too."
_MEMORY_FILE_HELP = "What `lookahead learn` made. Default: the model's in the cache folder, if there is one."
_LEARN_HELP = "Add what the model answers to its memory when the server ends. Else nothing of answers is kept."
_OUT_HELP = "Default: in the cache folder, where calls find it."
_SECONDS_HELP = "How long to measure passes and to try drafts, together."
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
SpecialTokensOption = Literal["escape", "refuse", "allow"]
Way = Literal["lookahead", "jacobi", "plain"]


class Batch(ServedOptions):
    """Answer a file of requests in OpenAI's batch format; a run that was killed goes on where it ended."""

    source: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one JSON object a line.")]
    target: Annotated[Path, Argument(metavar="OUT.jsonl", help="Answers; what is there already is not asked again.")]

    @property
    def aside(self) -> Path:
        """The file of lines that are refused."""
        return self.target.with_name(f"{self.target.stem}.errors.jsonl")

    def check(self) -> None:
        super().check()
        if not self.source.is_file():
            raise LookaheadError(f"{self.source} cannot be read: expected a file of requests.")
        if not self.target.parent.is_dir():
            raise LookaheadError(f"{self.target} cannot be written: there is no folder {self.target.parent}.")
        for what, file in (("answers", self.target), ("bad lines", self.aside)):
            if file.exists() and file.samefile(self.source):
                raise LookaheadError(f"{file} holds the requests, and {what} would go there. Give OUT another name.")


class Bench(JsonOptions, ModelOptions, PromptOptions):
    """Race plain decoding, prompt lookup and lookahead on your model and prompts, in less than two minutes."""

    questions: Annotated[Path | None, Option(metavar="FILE", help=_QUESTIONS)] = None
    new_tokens: NewTokensOption = 96
    modes: Annotated[str, Option(help="greedy, and t with a temperature; commas between.")] = "greedy,t0.8"
    minutes: Annotated[float, Option(min=0.05, help="About how long it may take; texts get fewer and shorter.")] = 1.5
    out: Annotated[Path | None, Option(metavar="FILE", help="Save all figures as JSON.")] = None
    plot: Annotated[Path | None, Option(metavar="FILE", help="Save the bars as a picture; needs matplotlib.")] = None

    def temperatures(self) -> list[float | None]:
        """One for each mode; None is greedy decoding."""
        return [_temperature(mode.strip()) for mode in self.modes.split(",")]

    def check(self) -> None:
        self.temperatures()
        if self.prompts and self.questions:
            raise LookaheadError("--prompts and --questions both say what is asked: give one of them.")
        super().check()
        check_file("--out", self.out)
        check_picture("--plot", self.plot)
        if self.questions is not None:
            read_questions(self.questions)


def _temperature(name: str) -> float | None:
    if name == "greedy":
        return None
    try:
        found = float(name.removeprefix("t")) if name.startswith("t") else 0.0
    except ValueError:
        found = 0.0
    if not 0.0 < found < 100.0:
        raise LookaheadError(f"--modes names {name!r}: expected greedy, or t and a temperature above 0, as in t0.8.")
    return found


class Chat(ModelOptions, DraftOptions):
    """Chat with a model in the terminal; tokens that came for free are green."""

    system: Annotated[str | None, Option(help="The system prompt.")] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Of an answer.")] = 1024
    temperature: Annotated[float | None, Option(min=0.0, help=_TEMPERATURE_HELP)] = None
    top_p: Annotated[float | None, Option(min=0.01, max=1.0, help="Draw tokens of so much probability.")] = None
    top_k: Annotated[int | None, Option(min=1, help="Draw one of so many tokens.")] = None
    repetition_penalty: Annotated[float | None, Option(min=0.01, help="Of tokens that were there before.")] = None
    seed: Annotated[int | None, Option(help="Makes drawn answers repeatable in float32.")] = None

    def check(self) -> None:
        super().check()
        for name in ("top_p", "top_k"):
            if self.temperature == 0.0 and getattr(self, name) is not None:
                raise LookaheadError(f"--temperature 0 takes the likeliest tokens: drop {_option(name)}.")


class Demo(ModelOptions, SizeOptions, RawOptions):
    """Write a few texts with and without lookahead, and compare texts and times."""

    new_tokens: NewTokensOption = 96
    prompts: Annotated[int, Option(min=1, max=len(PROMPTS), help="How many prompts.")] = 4
    rounds: Annotated[int, Option(min=1, help="How often each text is written both ways.")] = 3


class Generate(JsonOptions, ModelOptions, SizeOptions, RawOptions):
    """Continue a prompt, or answer it; the text appears as it is written."""

    prompt: Annotated[str | None, Option(help="The text. '-' or none: stdin, less its last line break.")] = None
    strategy: Annotated[Way, Option(help="How drafts are grown; plain is transformers' own decoding.")] = "lookahead"
    max_new_tokens: NewTokensOption = 128
    sample: Annotated[bool, Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False
    temperature: Annotated[float | None, Option(help="Above 0; needs --sample.")] = None
    top_p: Annotated[float | None, Option(help="Above 0, at most 1; needs --sample.")] = None
    top_k: Annotated[int | None, Option(help="At least 1; needs --sample.")] = None
    seed: Annotated[int | None, Option(help=_SEED_HELP)] = None
    stats: Annotated[bool, Option("--stats", help="Counts and times, on stderr.")] = False

    def check(self) -> None:
        wrong = [_option(name) for name, size in self.sizes().items() if size is not None]
        if wrong and self.strategy != "lookahead":
            got = f"got --strategy {self.strategy}. Drop one of the two."
            raise LookaheadError(f"{wrong[0]} belongs to --strategy lookahead: {got}")
        for name, value in self.sampling().items():
            option = _option(name)
            if not self.sample:
                raise LookaheadError(f"{option} needs --sample: without it the likeliest token is taken. Add --sample.")
            if value <= 0:
                raise LookaheadError(f"{option} must be above 0: got {value}.")
            if name == "top_p" and value > 1:
                raise LookaheadError(f"{option} must be at most 1: got {value}.")
        if self.prompt == "":
            raise LookaheadError("The prompt is empty: give --prompt TEXT, or text on stdin.")
        super().check()

    def sampling(self) -> dict[str, float]:
        """Settings given of how tokens are drawn."""
        names = ("temperature", "top_p", "top_k")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Learn(JsonOptions, ModelOptions, PromptOptions):
    """Let a model write, and keep what it said: later calls on it draft better. Their texts stay the same."""

    tokens: Annotated[int, Option(min=1, help="About how many to write; more are better, up to 200,000.")] = 20_000
    out: Annotated[Path | None, Option(metavar="FILE", help=_OUT_HELP)] = None
    seed: Annotated[int, Option(help="Of what is drawn.")] = 0

    def check(self) -> None:
        super().check()
        check_file("--out", self.out)


class Serve(ServedOptions, DraftOptions):
    """Serve a model to OpenAI's clients, with lookahead decoding; a chat page is at /."""

    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 is any free one.")] = 8000
    api_key: Annotated[str | None, Option(envvar="LOOKAHEAD_API_KEY", help=_KEY_HELP)] = None
    allowed_host: Annotated[list[str] | None, Option(help=_HOST_HELP, metavar="NAME")] = None
    max_queue: Annotated[int, Option(min=1, help="Requests that may wait; further ones get 429.")] = 32
    max_body: Annotated[int, Option(min=1024, help="Bytes of a request.")] = 8 << 20
    timeout: Annotated[float, Option(min=0.1, help="Seconds that a request may take, waiting included.")] = 600.0
    client_timeout: Annotated[float, Option(min=0.1, help="Seconds for a client to send a request, or to read.")] = 60.0
    special_tokens: Annotated[SpecialTokensOption, Option(help="Of the model, in messages of a chat.")] = "escape"
    memory: Annotated[Path | None, Option(metavar="FILE", help=_MEMORY_FILE_HELP)] = None
    remember: Annotated[bool, Option("--remember/--no-memory", help=_MEMORY_HELP)] = True
    learn: Annotated[bool, Option("--learn", help=_LEARN_HELP)] = False
    warm_up: Annotated[bool, Option(help="Learn what passes cost before the first request.")] = True
    grace: Annotated[int, Option(min=0, help="Seconds that running requests have when the server is stopped.")] = 30
    max_replicas: Annotated[int, Option(min=0, help="As many under load; 0 = no more than --replicas.")] = 0
    log_level: Annotated[LogLevel, Option(help="How much is told.")] = "info"

    @property
    def hosts(self) -> list[str]:
        """Names that requests without a key may call the server by."""
        return [self.host, *(self.allowed_host or ())]

    def check(self) -> None:
        if self.api_key == "":
            raise LookaheadError("--api-key is empty: give one, or leave it out.")
        if self.max_replicas and not 1 <= self.replicas <= self.max_replicas:
            told = f"--max-replicas {self.max_replicas} with --replicas {self.replicas}"
            raise LookaheadError(f"{told}: expected at least one, and no fewer at most than at least.")
        if self.learn and not self.remember:
            raise LookaheadError("--learn adds to the memory that --no-memory is without. Drop one of the two.")
        if self.memory is not None and not (self.memory.is_file() or self.learn):
            raise LookaheadError(f"--memory {self.memory} cannot be read: expected what `lookahead learn` made.")
        super().check()


class Support(JsonOptions, ModelOptions):
    """Say whether lookahead can decode a model, by which route, and why; exit status 1 if it cannot.

    With weights, the self-test is run. From a config alone, class and config are checked on a model without weights,
    and the rest is what the conformance run found for the class.
    """

    model: Annotated[str, Option(metavar="DIR_OR_CONFIG", help="Folder of a model, or of a config.json, or that file.")]

    def check_model(self) -> None:
        """Weights are not needed."""
        check_exists(self.model)


class TraceOptions(ModelOptions, SizeOptions, RawOptions):
    """Write a page that shows every pass of a decode: its tree, what was accepted, and the time it took."""

    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The page.")] = Path("trace.html")
    prompt: Annotated[str | None, Option(help="Text to continue or answer. Default: a built-in one.")] = None
    max_new_tokens: NewTokensOption = 96
    temperature: Annotated[float | None, Option(min=0.01, help="Draw tokens; default: the likeliest.")] = None
    seed: Annotated[int, Option(help="Of drafts and of drawn tokens.")] = 0
    nodes: Annotated[int | None, Option(min=1, help="Draft so many tokens a pass. Default: as many as pay.")] = None
    png: Annotated[Path | None, Option(metavar="FILE", help="Draw one pass, too; needs matplotlib.")] = None
    number: Annotated[int | None, Option("--pass", min=0, help="Which. Default: the one that wrote most.")] = None

    def check(self) -> None:
        super().check()
        check_file("--output", self.output)
        check_picture("--png", self.png)
        if self.number is not None and self.number >= self.max_new_tokens:  # every pass writes a token
            told = f"--pass {self.number} cannot exist: {self.max_new_tokens} tokens take as many passes at most."
            raise LookaheadError(f"{told} Name an earlier one, or raise --max-new-tokens.")


class Tune(JsonOptions, ModelOptions, PromptOptions):
    """Measure the latency curve of a model on this machine, save it, and recommend a budget and W, N, G."""

    new_tokens: NewTokensOption = 96
    batch: Annotated[int, Option(min=1, help="Sequences in a pass.")] = 1
    seconds: Annotated[float, Option(min=0.1, help=_SECONDS_HELP)] = 16.0
    output: Annotated[Path | None, Option("--output", "-o", help="Also save the curve here.")] = None

    def check(self) -> None:
        super().check()
        if self.output is not None and self.output.parent.is_dir():  # else it will be made
            check_file("--output", self.output)


class Verify(JsonOptions, ModelOptions, SizeOptions, PromptOptions):
    """Compare plain decoding with lookahead: exit status 0 if texts are identical or tied, 1 on a bug."""

    prompt: Annotated[list[str] | None, Option(help="Text to continue; may be given several times.")] = None
    max_new_tokens: NewTokensOption = 128


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

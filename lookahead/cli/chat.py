"""``lookahead chat``: a conversation with a model in the terminal."""

import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer
from typer import Option

from jacobi import LookaheadError
from lookahead.chat_format import render, turns
from lookahead.cli.options import ModelOptions
from lookahead.generation.conversations import Conversations
from lookahead.generation.watch import Pass, watching
from lookahead.loading import load_model
from lookahead.models.names import CACHE
from lookahead.patch import augment_all
from lookahead.pieces import Pieces
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

_HELP = """\
/stats    what the last answer and all answers took
/plain    switch lookahead off, or on again
/system   /system TEXT sets the system prompt and begins anew; /system alone removes it
/clear    begin a new conversation
/help     this
/exit     leave; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C ends an answer, not the program."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    draft: Annotated[str | None, Option(metavar="DIR", help="A small model that drafts beside the free sources.")] = (
        None
    )
    system: Annotated[str | None, Option(help="The system prompt.")] = None
    chat_template: Annotated[Path | None, Option(metavar="FILE", help="Jinja, in place of the tokenizer's.")] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Of an answer.")] = 1024
    temperature: Annotated[float | None, Option(min=0.01, help="Draw tokens; default: the likeliest.")] = None
    top_p: Annotated[float | None, Option(min=0.01, max=1.0, help="Needs --temperature.")] = None
    seed: Annotated[int | None, Option(help="Makes drawn answers repeatable in float32.")] = None


def chat(options: Options) -> None:
    """Chat with a model in the terminal; tokens that came for free are green."""
    if options.top_p is not None and options.temperature is None:
        raise LookaheadError("--top-p needs --temperature.")
    try:
        template = None if options.chat_template is None else options.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LookaheadError(f"--chat-template {options.chat_template} cannot be read: {error}.") from error
    model, tokenizer = options.load()
    draft = None if options.draft is None else load_model(options.draft, model.dtype, model.device)[0]
    sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature is not None}
    sampling |= {"temperature": options.temperature} if options.temperature is not None else {}
    sampling |= {"top_p": options.top_p} if options.top_p is not None else {}
    sampling |= {"eos_token_id": ends} if (ends := turns(model, tokenizer, template)[0]) else {}
    if options.seed is not None:
        torch.manual_seed(options.seed)
    augment_all()
    console = Console(highlight=False)
    talk = Talk(model, tokenizer, Lookahead(draft_model=draft), sampling, console, options.system, template)
    console.print(f"[bold]{options.model_name}[/bold]. /help tells the commands.")
    while (line := _read(console)) is not None:
        if line.startswith("/"):
            if not _command(talk, line, console):
                return
        elif line.strip():
            try:
                talk.answer(line)
            except LookaheadError as error:
                console.print(Text(str(error), style="red"))


def _read(console: Console) -> str | None:
    """What the user says; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = console.input("[bold blue]> [/bold blue]" if not lines else "  ")
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves.", style="dim")
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _command(talk: "Talk", line: str, console: Console) -> bool:
    """Do what a command says; False to leave."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        console.print(_HELP)
    elif name == "/stats":
        console.print(talk.told())
    elif name == "/plain":
        talk.plain = not talk.plain
        console.print("Plain decoding." if talk.plain else "Lookahead decoding.", style="dim")
    elif name in ("/clear", "/system"):
        talk.begin(talk.system if name == "/clear" else rest.strip() or None)
        console.print("A new conversation.", style="dim")
    else:
        console.print(f"There is no command {name}: /help tells them.", style="red", markup=False)
    return True


@dataclass
class Talk:
    """A conversation: its messages, and the KV cache of the text so far."""

    model: Any
    tokenizer: Any
    strategy: Lookahead
    settings: dict[str, Any]
    console: Console
    system: str | None = None
    template: str | None = None
    plain: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    last: str = "Nothing was answered yet."
    stats: DecodingStats = field(default_factory=DecodingStats)

    def __post_init__(self) -> None:
        self._kept = Conversations(self.model, most=1)
        self.begin(self.system)

    def begin(self, system: str | None) -> None:
        """Begin anew."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._kept.clear()

    def answer(self, text: str) -> str:
        """Answer a message; Ctrl-C ends the answer, and what was written of it stays."""
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = render(self.tokenizer, asked, self.template)
        settings = self.settings | {"max_new_tokens": self._room(ids)}
        cache, cached = self._kept.take(ids)
        voice, begin = _Voice(self.tokenizer, self.console), perf_counter()
        inputs = torch.tensor([ids], device=self.model.device)
        given: dict[str, Any] = {CACHE: cache} if cache is not None else {}
        if not self.plain:
            given["lookahead_strategy"] = self.strategy
        try:
            with _stopped_by_interrupts(voice), watching(voice.see):
                output = self.model.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    use_lookahead=not self.plain,
                    streamer=voice,
                    return_dict_in_generate=True,
                    **settings,
                    **given,
                )
            voice.close()
            self._kept.put(output.sequences[0].tolist(), cache)
            stats = getattr(output, "stats", None)
        except KeyboardInterrupt:  # the cache is somewhere in the middle of a pass, and is not kept
            voice.close(" [stopped]")
            stats = voice.seen if voice.seen.steps else None
        if stats is not None:
            self.stats += stats
        seconds = perf_counter() - begin
        self.messages = [*asked, {"role": "assistant", "content": voice.text}]
        self.last = f"{voice.count} tokens in {seconds:.2f} s, {voice.count / seconds:.1f} a second; {cached} cached."
        self.last += f"\n{stats.explain()}" if stats is not None else " Plain decoding." if self.plain else ""
        return voice.text

    def told(self) -> str:
        """What the last answer took, and all of them."""
        return f"{self.last}\nAll answers with lookahead: {self.stats.explain()}"

    def _room(self, ids: Sequence[int]) -> int:
        most, context = (
            self.settings["max_new_tokens"],
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
        )
        if context is None:
            return int(most)
        if len(ids) >= context:
            raise LookaheadError(
                f"The conversation has {len(ids)} tokens, and the model's context {context}. /clear begins anew."
            )
        return int(min(most, context - len(ids)))


class _Voice(BaseStreamer):
    """Writes an answer as it comes, drafted tokens in green."""

    lookahead_draws_nothing = True

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self._pieces, self._console = Pieces(tokenizer, ()), console
        self._drafted: deque[bool] = deque()
        self._prompt_seen = False
        self.text, self.count = "", 0
        self.is_stopped = False
        self.seen = DecodingStats()  # all that is known of an answer that is stopped

    def see(self, record: Pass) -> None:
        self.seen += _counted(record)
        written = len(record.rows[0].written)
        self._drafted.extend(place < written - 1 for place in range(written))

    def put(self, value: Any) -> None:
        if self.is_stopped:
            raise KeyboardInterrupt
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.tolist():
            self.count += 1
            drafted = self._drafted.popleft() if self._drafted else False
            self._say(self._pieces.add(token), "green" if drafted else "")

    def end(self) -> None:
        """Nothing: :meth:`close` ends the line."""

    def close(self, mark: str = "") -> None:
        self._say(self._pieces.close(), "")
        self._console.print(Text(mark, style="dim"))

    def _say(self, piece: str, style: str) -> None:
        if piece:
            self.text += piece
            self._console.print(Text(piece, style=style), end="", soft_wrap=True)


@contextmanager
def _stopped_by_interrupts(voice: _Voice) -> Iterator[None]:
    """Ctrl-C ends what the voice says, at the next token at the latest: a KeyboardInterrupt that is raised in a
    callback of the garbage collector is lost."""
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        yield
        return

    def stop(*_: Any) -> None:
        voice.is_stopped = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _counted(record: Pass) -> DecodingStats:
    """What one pass adds to the counts of its answer."""
    row, times = record.rows[0], ("draft_ms", "verify_ms", "keep_ms")
    written, first = len(row.written), record.index == 0
    return DecodingStats(
        steps=1,
        row_steps=1,
        emitted=written,
        drafted=len(row.tokens) - 1,
        accepted=written - 1,
        histogram={written: 1},
        sources=dict(Counter(filter(None, (row.sources[node] for node in row.accepted[1:written])))),
        prefill_ms=record.forward_ms if first else 0.0,
        forward_ms=0.0 if first else record.forward_ms,
        **{name: getattr(record, name) for name in times},
    )

"""``lookahead chat``: a conversation with a model in the terminal."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from jacobi import LookaheadError, Step, TokenTree
from lookahead.chat_format import context_of, render, sampling_of, turns
from lookahead.cli import common
from lookahead.cli.arguments import Chat
from lookahead.generation.prefixes import Prefixes
from lookahead.generation.watch import Pass, watching
from lookahead.models.names import CACHE
from lookahead.patch import augment_all
from lookahead.pieces import PieceStreamer
from lookahead.stats import DecodingStats, counted, duration
from lookahead.strategies.automatic import AutomaticStrategy

_HELP = """\
/stats    what the last answer and all answers took
/plain    switch lookahead off, or on again
/system   /system TEXT sets the system prompt and begins anew; /system alone removes it
/clear    begin a new conversation
/help     this
/exit     leave; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C ends an answer, not the program."""


def chat(options: Chat) -> None:
    model, tokenizer = common.load_for(options)
    strategy = common.drafting(options, model, tokenizer)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    augment_all()
    console = Console(highlight=False)
    settings = sampling_of(options) | {"max_new_tokens": options.max_new_tokens}
    if ends := turns(model, tokenizer, options.template)[0]:
        settings["eos_token_id"] = ends
    talk = Talk(model, tokenizer, strategy, settings, console, options.system, options.template)
    console.print(Text(common.name_of(options), style="bold").append(". /help tells the commands.", style="not bold"))
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
    """Line that the user writes; None at the end of input."""
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
    strategy: AutomaticStrategy
    settings: dict[str, Any]
    console: Console
    system: str | None = None
    template: str | None = None
    plain: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    last: str = "Nothing was answered yet."
    stats: DecodingStats = field(default_factory=DecodingStats)
    paces: dict[bool, list[float]] = field(default_factory=lambda: {True: [0, 0.0], False: [0, 0.0]})

    def __post_init__(self) -> None:
        self._kept = Prefixes(self.model)
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
            voice.stop()
            self._kept.keep(output.sequences[0].tolist(), cache)
            stats = getattr(output, "stats", None)
        except KeyboardInterrupt:  # the cache is somewhere in the middle of a pass, and is not kept
            voice.stop(" [stopped]")
            stats = voice.seen if voice.seen.steps else None
        if stats is not None:
            self.stats += stats
        seconds = perf_counter() - begin
        pace = self.paces[self.plain]
        pace[0], pace[1] = pace[0] + voice.count, pace[1] + seconds
        self.messages = [*asked, {"role": "assistant", "content": voice.text}]
        rate = f"{duration(1e3 * seconds)}, {voice.count / seconds:.1f} a second"
        told = " Plain decoding." if self.plain else ""
        if stats is not None:
            told = f"\n{stats.explain(self._measured(voice.count / seconds), legend=False)}"
        self.last = f"{counted(voice.count, 'token')} in {rate}; {cached} cached.{told}"
        return voice.text

    def _measured(self, pace: float) -> float | None:
        """Speed of so many tokens a second against this conversation's plain answers; None without any."""
        count, seconds = self.paces[True]
        return pace * seconds / count if count else None

    def told(self) -> str:
        """Figures of the last answer, and of all of them."""
        count, seconds = self.paces[False]
        measured = self._measured(count / seconds) if count else None
        return f"{self.last}\nAll answers with lookahead: {self.stats.explain(measured)}"

    def _room(self, ids: Sequence[int]) -> int:
        most, context = self.settings["max_new_tokens"], context_of(self.model)
        if context is not None and len(ids) >= context:
            raise LookaheadError(
                f"The conversation has {len(ids)} tokens, and the model's context {context}. /clear begins anew."
            )
        return int(most if context is None else min(most, context - len(ids)))


class _Voice(PieceStreamer):
    """Writes an answer as it comes, drafted tokens in green."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer)
        self._console = console
        self.is_stopped = False
        self.seen = DecodingStats()  # all that is known of an answer that is stopped

    def see(self, record: Pass) -> None:
        super().see(record)
        row = record.rows[0]
        drafted = Counter(filter(None, (row.sources[node] for node in row.accepted[1 : len(row.written)])))
        trees = [TokenTree.from_parents(row.tokens, row.parents)]
        step = Step(trees, [], record.draft_ms, record.forward_ms, record.verify_ms, record.keep_ms)
        self.seen.count(step, [len(row.written)], first=record.index == 0, detailed=False)
        self.seen.add(sources=drafted)

    def put(self, value: Any) -> None:
        if self.is_stopped:
            raise KeyboardInterrupt
        super().put(value)

    def tell(self, piece: str, drafted: bool = False, source: str = "") -> None:
        super().tell(piece)
        if piece:
            self._console.print(Text(piece, style="green" if drafted else ""), end="", soft_wrap=True)

    def stop(self, mark: str = "") -> None:
        """End the line, with a mark."""
        self.close()
        self._console.print(Text(mark, style="dim"))


@contextmanager
def _stopped_by_interrupts(voice: _Voice) -> Iterator[None]:
    """Ctrl-C ends what the voice says, at the next token at the latest: a KeyboardInterrupt that is raised in a
    callback of the garbage collector is lost."""

    def stop(*_: Any) -> None:
        voice.is_stopped = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""``lookahead serve``: an OpenAI-compatible server for one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from jacobi import LookaheadError
from lookahead.cli.options import ModelOptions
from lookahead.loading import load_model
from lookahead.serve import Limits, application
from lookahead.serve.server import Server
from lookahead.strategies.lookahead import Lookahead

_KEY_HELP = "Clients must send it as a bearer token. Better given by the environment, which other users cannot list."


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    draft: Annotated[str | None, Option(metavar="DIR", help="A small model that drafts beside the free sources.")] = (
        None
    )
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 is any free one.")] = 8000
    api_key: Annotated[str | None, Option(envvar="LOOKAHEAD_API_KEY", help=_KEY_HELP)] = None
    served_model_name: Annotated[str | None, Option(help="What requests call the model. Default: its folder.")] = None
    chat_template: Annotated[Path | None, Option(metavar="FILE", help="Jinja, in place of the tokenizer's.")] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Of a chat answer, where a request does not say.")] = 1024
    max_queue: Annotated[int, Option(min=1, help="Requests that may wait; further ones get 429.")] = 32
    max_body: Annotated[int, Option(min=1024, help="Bytes of a request.")] = 8 << 20
    timeout: Annotated[float, Option(min=0.1, help="Seconds that a request may take, waiting included.")] = 600.0
    conversations: Annotated[int, Option(min=0, help="KV caches kept for conversations that go on.")] = 4
    rows: Annotated[int, Option(min=1, help="Answers that are written at a time, which share passes.")] = 8
    warm_up: Annotated[bool, Option(help="Learn what passes cost before the first request.")] = True
    grace: Annotated[int, Option(min=0, help="Seconds that running requests have when the server is stopped.")] = 30
    log_level: Annotated[str, Option(help="critical, error, warning, info, debug.")] = "info"


def serve(options: Options) -> None:
    """Serve a model to OpenAI's clients, with lookahead decoding; a chat page is at /."""
    where: dict[str, Any] = {"host": options.host, "port": options.port}
    Server(app_of(options), **where, log_level=options.log_level, grace=options.grace).run()


def app_of(options: Options) -> Any:
    """The application that the options describe."""
    template = None if options.chat_template is None else _read(options.chat_template)
    if options.api_key == "":
        raise LookaheadError("--api-key is empty: give one, or leave it out.")
    model, tokenizer = options.load()
    strategy = Lookahead()
    if options.draft is not None:
        draft, other = load_model(options.draft, model.dtype, model.device)
        same = tokenizer.get_vocab() == other.get_vocab()
        strategy = Lookahead(draft_model=draft, tokenizers=None if same else (tokenizer, other))
        strategy.check(model)
    name = options.served_model_name or ("tiny-coder" if options.model is None else Path(options.model).name)
    limits = Limits(
        context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        new_tokens=options.max_new_tokens,
        queue=options.max_queue,
        body=options.max_body,
        timeout=options.timeout,
    )
    typer.echo(
        f"Serving {name} at http://{options.host}:{options.port} (the chat page; the API is below /v1).", err=True
    )
    settings: dict[str, Any] = {"strategy": strategy, "limits": limits, "api_key": options.api_key}
    settings |= {"template": template, "conversations": options.conversations, "rows": options.rows}
    made = application(model, tokenizer, name, **settings)
    if options.warm_up:
        made.state.service.engine.warm_up()
    return made


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LookaheadError(f"--chat-template {file} cannot be read: {error}.") from error

"""``lookahead serve``: an OpenAI-compatible server for one model."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from jacobi import LookaheadError
from lookahead.cli import common
from lookahead.cli.options import ServedOptions
from lookahead.loading import load_model
from lookahead.ray.cluster import connected
from lookahead.ray.front import Front
from lookahead.ray.replicas import Scale, started, stopped
from lookahead.serve import Limits, application
from lookahead.serve.gate import Gate
from lookahead.serve.plans import SpecialTokens
from lookahead.serve.server import Drains, Server, check_address
from lookahead.strategies.lookahead import Lookahead

_KEY_HELP = "Clients must send it as a bearer token. Better given by the environment, which other users cannot list."
_HOST_HELP = "A name by which the server may be called without a key, or whose pages may ask. Repeatable; * = all."
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, kw_only=True)
class Options(ServedOptions):
    draft: Annotated[str | None, Option(metavar="DIR", help="A small model that drafts beside the free sources.")] = (
        None
    )
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 is any free one.")] = 8000
    api_key: Annotated[str | None, Option(envvar="LOOKAHEAD_API_KEY", help=_KEY_HELP)] = None
    allowed_host: Annotated[list[str] | None, Option(help=_HOST_HELP, metavar="NAME")] = None
    chat_template: Annotated[Path | None, Option(metavar="FILE", help="Jinja, in place of the tokenizer's.")] = None
    max_new_tokens: Annotated[int, Option(min=1, help="Of a chat answer, where a request does not say.")] = 1024
    max_queue: Annotated[int, Option(min=1, help="Requests that may wait; further ones get 429.")] = 32
    max_body: Annotated[int, Option(min=1024, help="Bytes of a request.")] = 8 << 20
    timeout: Annotated[float, Option(min=0.1, help="Seconds that a request may take, waiting included.")] = 600.0
    client_timeout: Annotated[float, Option(min=0.1, help="Seconds for a client to send a request, or to read.")] = 60.0
    special_tokens: Annotated[SpecialTokens, Option(help="Of the model, in messages of a chat.")] = "escape"
    memory: Annotated[
        bool, Option(help="Keep caches and recycled tokens for later requests, of other clients, too.")
    ] = True
    conversations: Annotated[int, Option(min=0, help="KV caches kept for conversations that go on.")] = 4
    rows: Annotated[int, Option(min=1, help="Answers that are written at a time, which share passes.")] = 8
    warm_up: Annotated[bool, Option(help="Learn what passes cost before the first request.")] = True
    grace: Annotated[int, Option(min=0, help="Seconds that running requests have when the server is stopped.")] = 30
    replicas: Annotated[int, Option(min=0, help="Processes with the model, on Ray; 0 = this process alone.")] = 0
    max_replicas: Annotated[int, Option(min=0, help="As many under load; 0 = no more than --replicas.")] = 0
    log_level: Annotated[LogLevel, Option(help="How much is told.")] = "info"


def serve(options: Options) -> None:
    """Serve a model to OpenAI's clients, with lookahead decoding; a chat page is at /."""
    _check(options)
    if options.replicas:
        _serve_replicas(options)
    else:
        application = app_of(options)
        _run(application, application.state.service.engine, options)


def _check(options: Options) -> None:
    if options.api_key == "":
        raise LookaheadError("--api-key is empty: give one, or leave it out.")
    if options.max_replicas and not 1 <= options.replicas <= options.max_replicas:
        told = f"--max-replicas {options.max_replicas} with --replicas {options.replicas}"
        raise LookaheadError(f"{told}: expected at least one, and no fewer at most than at least.")
    common.check_folder(options.model)
    common.check_folder(options.draft, "--draft")
    _template(options)
    check_address(options.host, options.port)


def _serve_replicas(options: Options) -> None:
    with connected(quiet=options.log_level not in ("debug", "trace")) as ray:
        most = options.max_replicas or None
        scale = Scale(replicas=options.replicas, most=most, rows=options.rows, queue=options.max_queue)
        handle = started(ray, partial(app_of, options), replace(scale, grace=options.grace))
        try:
            front = Front(handle, options.timeout, client_timeout=options.client_timeout)
            _run(Gate(front, options.api_key, options.max_body, _hosts(options)), front, options)
        finally:
            stopped(ray)


def _run(application: Any, engine: Drains, options: Options) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host

    def begun(port: int) -> None:
        told = f"Serving {options.name} at http://{host}:{port} (the chat page; the API is below /v1)."
        typer.echo(told, err=True)

    where: dict[str, Any] = {"host": options.host, "port": options.port, "client_timeout": options.client_timeout}
    Server(application, engine, **where, log_level=options.log_level, grace=options.grace, begun=begun).run()


def app_of(options: Options) -> Any:
    """The application that the options describe."""
    model, tokenizer = options.load()
    strategy = Lookahead()
    if options.draft is not None:
        draft, other = load_model(options.draft, model.dtype, model.device)
        same = tokenizer.get_vocab() == other.get_vocab()
        strategy = Lookahead(draft_model=draft, tokenizers=None if same else (tokenizer, other))
        strategy.check(model)
    limits = Limits(
        context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        new_tokens=options.max_new_tokens,
        queue=options.max_queue,
        body=options.max_body,
        timeout=options.timeout,
        client_timeout=options.client_timeout,
        special_tokens=options.special_tokens,
    )
    settings: dict[str, Any] = {"strategy": strategy, "limits": limits, "api_key": options.api_key}
    settings |= {"hosts": _hosts(options), "memory": options.memory}
    settings |= {"template": _template(options), "conversations": options.conversations, "rows": options.rows}
    made = application(model, tokenizer, options.name, **settings)
    if options.warm_up:
        made.state.service.engine.warm_up()
    return made


def _hosts(options: Options) -> list[str]:
    return [options.host, *(options.allowed_host or ())]


def _template(options: Options) -> str | None:
    file = options.chat_template
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LookaheadError(f"--chat-template {file} cannot be read: {error}.") from error

"""``lookahead serve``: an OpenAI-compatible server for one model."""

from dataclasses import replace
from functools import partial
from typing import Any

import typer

from lookahead.chat_format import context_of
from lookahead.cli import common
from lookahead.cli.arguments import Serve
from lookahead.ray.cluster import connected
from lookahead.ray.front import Front
from lookahead.ray.replicas import Scale, started, stopped
from lookahead.serve import Limits, application
from lookahead.serve.gate import Gate
from lookahead.serve.server import Drains, Server, check_address


def serve(options: Serve) -> None:
    check_address(options.host, options.port)
    if not options.replicas:
        application = app_of(options)
        _run(application, application.state.service.engine, options)
        return
    with connected(quiet=options.log_level not in ("debug", "trace")) as ray:
        most = options.max_replicas or None
        scale = Scale(replicas=options.replicas, most=most, rows=options.rows, queue=options.max_queue)
        handle = started(ray, partial(app_of, options), replace(scale, grace=options.grace))
        try:
            front = Front(handle, options.timeout, client_timeout=options.client_timeout)
            _run(Gate(front, options.api_key, options.max_body, options.hosts), front, options)
        finally:
            stopped(ray)


def _run(application: Any, engine: Drains, options: Serve) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host

    def begun(port: int) -> None:
        told = f"Serving {common.name_of(options)} at http://{host}:{port} (the chat page; the API is below /v1)."
        typer.echo(told, err=True)

    where: dict[str, Any] = {"host": options.host, "port": options.port, "client_timeout": options.client_timeout}
    Server(application, engine, **where, log_level=options.log_level, grace=options.grace, begun=begun).run()


def app_of(options: Serve) -> Any:
    """The application that the options describe."""
    model, tokenizer = common.load_for(options)
    strategy = common.drafting(options, model, tokenizer)
    if options.memory is not None and options.memory.exists():
        strategy = replace(strategy, memory=options.memory)
    limits = Limits(
        context=context_of(model),
        new_tokens=options.max_new_tokens,
        queue=options.max_queue,
        body=options.max_body,
        timeout=options.timeout,
        client_timeout=options.client_timeout,
        special_tokens=options.special_tokens,
    )
    names = ("api_key", "hosts", "template", "prefix_mib", "rows")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings |= {"memory": options.remember, "learn": options.learn and (options.memory or True)}
    made = application(model, tokenizer, common.name_of(options), strategy=strategy, limits=limits, **settings)
    if options.warm_up:
        made.state.service.engine.warm_up()
    return made

"""``lookahead learn``: a model writes, and what it said is kept."""

from typing import Any

from lookahead.cli import common
from lookahead.cli.arguments import Learn
from lookahead.stats import counted
from lookahead.training import teaching


def learn(options: Learn) -> None:
    model, tokenizer = common.load_for(options)
    given: dict[str, Any] = {"tokens": options.tokens, "out": options.out, "raw": options.raw, "seed": options.seed}
    with common.progress() as progress:
        bar = common.bar(progress, f"Writing {counted(options.tokens, 'token')}")
        found = teaching.learn(model, tokenizer, options.texts or None, **given, report=bar)
    size, length, count = found.file.stat().st_size, found.stats.mean_acceptance_length, found.stats.emitted
    document = {"model": options.model_name, "file": str(found.file), "bytes": size, "tokens": count, "S": length}
    told = f"{found.file}: {size / 1e6:.1f} MB, of {counted(count, 'token')} ({length:.2f} a pass)."
    common.report(document, options.as_json, lambda console: console.print(told, soft_wrap=True))

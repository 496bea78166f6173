"""Figures for Prometheus, under the names that vLLM gave them, so that its dashboards show them.

In PromQL, over five minutes: the share of drafts that were right, tokens a pass, and how often depth 2 was reached::

    rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / rate(vllm:spec_decode_num_draft_tokens_total[5m])
    1 + rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / rate(vllm:spec_decode_num_drafts_total[5m])
    rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"}[5m])
      / ignoring(position) rate(vllm:spec_decode_num_drafts_total[5m])

Sources are this project's own. `docs/grafana.json` is a board with these and the rest.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lookahead.serve.jobs import Answer

METRICS_TYPE = "text/plain; version=0.0.4"
# Of finished answers.
_COUNTS: tuple[tuple[str, str, Callable[[Answer], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of finished answers.", lambda answer: answer.prompt_tokens),
    ("generation_tokens", "Tokens written.", lambda answer: len(answer.tokens)),
    ("spec_decode_num_drafts", "Passes that had drafted tokens to score.", lambda answer: answer.drafts),
    ("spec_decode_num_draft_tokens", "Drafted tokens that were scored.", lambda answer: answer.stats.drafted),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda answer: answer.stats.accepted),
    ("prefix_cache_queries", "Prompt tokens looked up in kept KV caches.", lambda answer: answer.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in kept KV caches.", lambda answer: answer.cached_tokens),
)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The counts of one server; ``running`` and ``waiting`` are read when somebody looks."""

    def __init__(self, model: str, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def one(kind: Any, name: str, text: str, *labels: str, **settings: Any) -> Any:
            made = kind(f"vllm:{name}", text, ("model_name", *labels), registry=self.registry, **settings)
            return made if labels else made.labels(model)

        one(Gauge, "num_requests_running", "Requests that are decoded now.").set_function(running)
        one(Gauge, "num_requests_waiting", "Requests in the queue.").set_function(waiting)
        self._counts = [(one(Counter, name, text), read) for name, text, read in _COUNTS]
        self._success = one(Counter, "request_success", "Finished answers, by what ended them.", "finished_reason")
        by_depth, accepted = "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by"
        self._depths = one(Counter, by_depth, f"{accepted} their depth in the tree, from 0.", "position")
        self._sources = one(
            Counter, "spec_decode_num_accepted_tokens_per_source", f"{accepted} their source.", "source"
        )
        histogram = partial(one, Histogram, buckets=_SECONDS)
        self.first_token = histogram("time_to_first_token_seconds", "Seconds from a request to its first text.")
        self.latency = histogram("e2e_request_latency_seconds", "Seconds from a request to its end.")

    def count(self, answer: Answer) -> None:
        for counter, read in self._counts:
            counter.inc(read(answer))
        self._success.labels(self._model, answer.finish).inc()
        for written, passes in answer.stats.histogram.items():
            for depth in range(written - 1):  # the last token of a pass is the model's own
                self._depths.labels(self._model, depth).inc(passes)
        for source, tokens in answer.stats.sources.items():
            self._sources.labels(self._model, source).inc(tokens)

    def text(self) -> bytes:
        """Text of ``/metrics``."""
        return generate_latest(self.registry)


def merged(texts: Sequence[str]) -> bytes:
    """The metrics of several replicas on one page: each one's samples with its number as the label ``replica``."""
    families: dict[str, Metric] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                kept.samples.append(sample._replace(labels=sample.labels | {"replica": str(number)}))
    told: Any = SimpleNamespace(collect=families.values)
    return generate_latest(told)

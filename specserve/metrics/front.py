"""What ``/metrics`` shows. Every metric says here what exactly it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.frontend.messages import Stats

GAUGES = {
    "running_requests": "Requests that have pages and a slot in the batch.",
    "waiting_requests": "Requests that wait for a slot or for pages.",
    "kv_pages_total": "Pages of the KV pool.",
    "kv_pages_free": "Pages that hold nothing.",
    "kv_pages_cached": "Pages that the prefix cache holds, whether a request uses them or not.",
    "kv_page_use_ratio": "Part of the pages that hold something, 0 to 1.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests, cached ones included.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens chosen for requests.",
    "spec_steps": "Steps: target forwards that emitted tokens for their batch, prefill not counted.",
    "spec_drafted_tokens": "Nodes verified besides roots.",
    "spec_accepted_tokens": "Drafted tokens that were emitted; bonus tokens are not counted.",
    "preemptions": "Times that a request was put back into the queue for want of pages.",
}
_SHORT = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4)
_LONG = (0.01, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)


class Metrics:
    """The front's own measurements and, through ``stats``, the engine's latest."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._requests = Counter(
            "specserve_requests",
            "Answered HTTP requests; status 499: the client left first.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token",
            "From the tokenized request to its first token, each choice by itself.",
            _LONG,
        )
        self._inter_token = self._histogram(
            "inter_token",
            "From a message of tokens to the next, divided by the tokens of the latter.",
            _SHORT,
        )
        self._request = self._histogram(
            "request", "From the tokenized request to its last token, each choice by itself.", _LONG
        )

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def finished(self, seconds: float) -> None:
        self._request.observe(seconds)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"specserve_{name}_seconds", help, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, value in _gauges(stats).items():
            yield GaugeMetricFamily(f"specserve_{name}", GAUGES[name], value)
        for name, value in _counters(stats).items():
            yield CounterMetricFamily(f"specserve_{name}", COUNTERS[name], value)


def _gauges(stats: Stats) -> dict[str, float]:
    return {
        "running_requests": stats.running,
        "waiting_requests": stats.waiting,
        "kv_pages_total": stats.pages_total,
        "kv_pages_free": stats.pages_free,
        "kv_pages_cached": stats.pages_cached,
        "kv_page_use_ratio": 1 - stats.pages_free / max(stats.pages_total, 1),
    }


def _counters(stats: Stats) -> dict[str, float]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "spec_steps": stats.steps,
        "spec_drafted_tokens": stats.drafted,
        "spec_accepted_tokens": stats.accepted,
        "preemptions": stats.preemptions,
    }

"""The front's Prometheus metrics, each with its definition, exported together with the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specserve.frontend.generation import Job
from specserve.frontend.output import Answer
from specserve.messages import Stats
from specserve.metrics.engine import EngineCollector
from specserve.metrics.vllm import VllmNames
from specserve.version import __version__, commit

_SHORT = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4)
_LONG = (0.01, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_OPENMETRICS = "application/openmetrics-text"
_LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 13, 16)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "queue_seconds": (
        "From a request's arrival at the engine to its first slot and pages. Each choice counts separately.",
        _LONG,
    ),
    "time_to_first_token_seconds": (
        "From the tokenized request to its first token. Each choice counts separately.",
        _LONG,
    ),
    "inter_token_seconds": (
        "From one message of tokens to the next, divided by the number of tokens in the latter; observed once "
        "for each of them.",
        _SHORT,
    ),
    "prefill_seconds": (
        "From a request's first slot and pages to its first token. Each choice counts separately.",
        _LONG,
    ),
    "decode_seconds": (
        "From a request's first token to its last. Each choice counts separately.",
        _LONG,
    ),
    "request_seconds": (
        "From the tokenized request to its last token. Each choice counts separately.",
        _LONG,
    ),
    "request_prompt_tokens": (
        "Prompt tokens of a finished request, cached ones included. Each choice counts separately.",
        _TOKENS,
    ),
    "request_answer_tokens": ("Tokens of a finished answer. Each choice counts separately.", _TOKENS),
    "request_accepted_length_tokens": (
        "Tokens a step of a finished request: 1 + accepted / steps. Each choice counts separately; requests "
        "without a step are left out.",
        _LENGTHS,
    ),
}
_USAGE = {
    "requests": "HTTP requests with an API key. Only if the server has several keys, like all usage by key.",
    "prompt_tokens": "Prompt tokens of requests with an API key whose answer began, cached ones included.",
    "answer_tokens": "Tokens generated for requests with an API key, also for those that did not end.",
}


class _Restarts(Collector):
    def __init__(self, restarts: Callable[[], int]) -> None:
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "specserve_engine_restarts", "Engines started to replace one that died.", self._restarts()
        )


class Metrics:
    """The front's own measurements and, through ``stats``, the engine's latest. ``restarts`` returns how many engines
    replaced another, ``model`` the model's name."""

    def __init__(
        self,
        stats: Callable[[], Stats | None],
        restarts: Callable[[], int] = lambda: 0,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        self._registry = CollectorRegistry()
        engine = EngineCollector(stats)
        self._registry.register(engine)
        self._registry.register(_Restarts(restarts))
        build = Gauge("specserve_build_info", "Always 1.", ("version", "commit"), registry=self._registry)
        build.labels(__version__, commit() or "unknown").set(1)
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "specserve_requests",
            "HTTP requests by the status of their answer. A stream that ended in an error event counts with the "
            "error's status; 499: the client left before the end.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._rejected = Counter(
            "specserve_rejected_requests",
            "Answers refused with 429 because the queue was full. Each choice counts separately.",
            registry=self._registry,
        )
        self._finished = Counter(
            "specserve_finished_requests",
            "Finished requests by reason: length or stop, which tool calls have too. Each choice counts separately.",
            ("reason",),
            registry=self._registry,
        )
        self._usage = [
            Counter(f"specserve_key_{name}", help, ("key",), registry=self._registry)
            for name, help in _USAGE.items()
        ]
        self._histograms = {
            name: Histogram(f"specserve_{name}", help, buckets=buckets, registry=self._registry)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        self._registry.register(VllmNames([engine, self._finished, *self._histograms.values()], model))

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def rejected(self, answers: int) -> None:
        self._rejected.inc(answers)

    def used(self, key: str, prompt: int, answer: int) -> None:
        """Count a call with the key of this name, and its tokens."""
        for counter, count in zip(self._usage, (1, prompt, answer), strict=True):
            counter.labels(key).inc(count)

    def queued(self, seconds: float) -> None:
        self._histograms["queue_seconds"].observe(seconds)

    def first_token(self, seconds: float, prefill: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._histograms["prefill_seconds"].observe(prefill)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._histograms["inter_token_seconds"].observe(seconds / tokens)

    def finished(self, seconds: float, decode: float, job: Job, answer: Answer) -> None:
        self._histograms["request_seconds"].observe(seconds)
        self._histograms["decode_seconds"].observe(decode)
        self._histograms["request_prompt_tokens"].observe(len(job.prompt))
        self._histograms["request_answer_tokens"].observe(len(answer.token_ids))
        self._finished.labels(answer.finish_reason).inc()
        if answer.speculation.steps:
            length = answer.speculation.mean_accepted_length
            self._histograms["request_accepted_length_tokens"].observe(length)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type, in OpenMetrics or Prometheus format as ``accept`` requests. Names
        need no escaping; in OpenMetrics the library's would replace the colon in vLLM's names."""
        encode, kind = choose_encoder(accept)
        if kind.startswith(_OPENMETRICS):
            encode, _ = choose_encoder(f"{_OPENMETRICS}; version=1.0.0; escaping=allow-utf-8")
        return encode(self._registry), kind

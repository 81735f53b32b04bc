"""The engine's part of ``/metrics``, from its latest ``Stats``. Every metric's help says exactly what it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.messages import CostTotals, Stats, StepTotals

_COUNTERS = {
    "preemptions": "Times that a request was put back into the queue because pages or device memory ran out.",
    "violations": "Leaks found while the engine was idle: pages or slots that are neither free nor accounted for.",
    "late_kernels": "Kernels that were compiled, or read from the cache, after the server was ready; requests waited "
    "for them.",
    "eager_steps": "Steps that ran without a CUDA graph although graphs are captured.",
    "prompt_tokens": "Prompt tokens of requests whose prefill has begun, cached ones included.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated for requests, also those that a stop string cuts off.",
    "steps": "Target forwards that emitted tokens for their batch. Plain decoding counts, prefill does not.",
    "drafted": "Draft nodes that were verified; roots are not counted.",
    "accepted": "Drafted tokens that were emitted; bonus tokens are not counted.",
}
"""What fields of ``Stats`` count."""
_NAMES = {
    "violations": "invariant_violations",
    "steps": "spec_steps",
    "drafted": "spec_drafted_tokens",
    "accepted": "spec_accepted_tokens",
}
"""The metrics of these fields, where they have other names."""
_SHAPES = {
    "steps": "Steps of a shape whose results were read.",
    "seconds": "Time that the device spent on steps of a shape.",
}
_LEVELS = {
    "tested": "Times that a draft level was tested: a request's step accepted all levels above it and drafted at least "
    "as many nodes as the level is deep.",
    "accepted": "Times that the target chose a token drafted at a level, also after the request's last token.",
}
_SOURCES = {
    "tested": "First choices of a drafter that were compared with the text, as far as the text followed them, verified "
    "or not. Only for drafters that share a tree.",
    "right": "Tested first choices that matched the text.",
    "accepted": "Accepted tokens that were among a drafter's candidates; a token that both drafters had counts for "
    "both.",
}


class EngineCollector(Collector):
    """Collect the engine's metrics; none before its first message."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield from _load(stats)
        for field, text in _COUNTERS.items():
            yield _counter(_NAMES.get(field, field), text, getattr(stats, field))
        yield from _steps(stats.step_totals)
        if stats.step_totals.cost is not None:
            yield from _cost(stats.step_totals.cost)


def _load(stats: Stats) -> Iterator[Metric]:
    used = 1 - stats.pages_free / max(stats.pages_total, 1)
    yield _gauge("running_requests", "Requests that have a slot in the batch and pages.", stats.running)
    waits = "Requests that wait for a slot, for pages or for their grammar."
    yield _gauge("waiting_requests", waits, stats.waiting)
    yield _gauge("kv_pages", "Pages in the KV pool.", stats.pages_total)
    yield _gauge("kv_pages_free", "Pages that hold nothing.", stats.pages_free)
    cached = "Pages in the prefix cache, whether a request uses them or not."
    yield _gauge("kv_pages_cached", cached, stats.pages_cached)
    yield _gauge("kv_page_use_ratio", "Share of pages that hold something, 0 to 1.", used)
    requested = "Share of pages that requests use, 0 to 1; cached pages that no request uses count as free."
    idle = stats.pages_idle / max(stats.pages_total, 1)
    yield _gauge("kv_page_request_ratio", requested, used - idle)
    if stats.snapshots:
        yield _gauge("state_snapshots", "Snapshots of states that there is room for.", stats.snapshots)
        yield _gauge("state_snapshots_kept", "Snapshots of states in the prefix cache.", stats.snapshots_kept)


def _steps(totals: StepTotals) -> Iterator[Metric]:
    shapes = [([label], shape) for label, shape in sorted(totals.shapes.items())]
    yield from _labelled("specserve_spec_shape_{}", _SHAPES, ["shape"], shapes)
    yield _histogram("step_requests", "Requests in a step, without padding.", totals.batches, totals.requests)
    tokens = "Tokens of an iteration: prompt tokens that were launched, and tokens of answers that were read."
    yield _histogram("iteration_tokens", tokens, totals.iterations, totals.processed)
    if totals.drafter is not None:
        levels = [([totals.drafter, str(number)], level) for number, level in enumerate(totals.levels, 1)]
        yield from _labelled("specserve_spec_level_{}", _LEVELS, ["drafter", "level"], levels)
    if totals.sources:
        sources = [([source], counts) for source, counts in totals.sources.items()]
        yield from _labelled("specserve_spec_source_{}_tokens", _SOURCES, ["source"], sources)


def _labelled(
    name: str, helps: Mapping[str, str], labels: Sequence[str], totals: Sequence[tuple[Sequence[str], object]]
) -> Iterator[Metric]:
    """Yield a counter for each field of ``helps``, whose name is filled in. ``totals``: with the values of labels."""
    for field, text in helps.items():
        family = CounterMetricFamily(name.format(field), text, labels=labels)
        for values, counts in totals:
            family.add_metric(values, getattr(counts, field))
        yield family


def _cost(cost: CostTotals) -> Iterator[Metric]:
    yield _counter(
        "spec_predicted_seconds",
        "Time that the cost model predicted for all steps, each before the model learned from it.",
        cost.predicted_seconds,
    )
    yield _counter(
        "spec_plain_seconds",
        "Time that plain decoding would have needed for the tokens of all steps: for each step, the cost model's "
        "time of a step of the same batch without drafts, times the mean number of tokens that a request got.",
        cost.plain_seconds,
    )
    yield _gauge(
        "spec_cost_error_ratio",
        "Mean relative error of the cost model: how far measured / predicted is from 1 in each step, clipped to "
        "between 1 / 1.5 and 1.5, averaged with weights that decay with age.",
        cost.error,
    )


def _histogram(name: str, help: str, counts: Sequence[int], total: int) -> Metric:
    """``counts[i]``: of values up to 2 ** i that no earlier one counts; the last has no bound."""
    bounds = [*(str(float(2**i)) for i in range(len(counts) - 1)), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    return HistogramMetricFamily(f"specserve_{name}", help, buckets=buckets, sum_value=total)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"specserve_{name}", help, value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"specserve_{name}", help, value)

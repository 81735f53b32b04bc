"""The engine's part of ``/metrics``, from its latest ``Stats``. Every metric's help says exactly what it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.messages import CostTotals, Stats, StepTotals


class EngineCollector(Collector):
    """Collect the engine's metrics; none before its first message."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield from _load(stats)
        yield from _tokens(stats)
        yield from _steps(stats.step_totals)
        if stats.step_totals.drafter is not None:
            yield from _levels(stats.step_totals, stats.step_totals.drafter)
        if stats.step_totals.sources:
            yield from _sources(stats.step_totals)
        if stats.step_totals.cost is not None:
            yield from _cost(stats.step_totals.cost)


def _load(stats: Stats) -> Iterator[Metric]:
    used = 1 - stats.pages_free / max(stats.pages_total, 1)
    yield _gauge("running_requests", "Requests that have a slot in the batch and pages.", stats.running)
    yield _gauge(
        "waiting_requests", "Requests that wait for a slot, for pages or for their grammar.", stats.waiting
    )
    yield _gauge("kv_pages", "Pages in the KV pool.", stats.pages_total)
    yield _gauge("kv_pages_free", "Pages that hold nothing.", stats.pages_free)
    yield _gauge(
        "kv_pages_cached",
        "Pages in the prefix cache, whether a request uses them or not.",
        stats.pages_cached,
    )
    yield _gauge("kv_page_use_ratio", "Share of pages that hold something, 0 to 1.", used)
    yield _gauge(
        "kv_page_request_ratio",
        "Share of pages that requests use, 0 to 1; cached pages that no request uses count as free.",
        used - stats.pages_idle / max(stats.pages_total, 1),
    )
    if stats.snapshots:
        yield _gauge("state_snapshots", "Snapshots of states that there is room for.", stats.snapshots)
        yield _gauge("state_snapshots_kept", "Snapshots of states in the prefix cache.", stats.snapshots_kept)
    yield _counter(
        "preemptions",
        "Times that a request was put back into the queue because pages or device memory ran out.",
        stats.preemptions,
    )
    yield _counter(
        "invariant_violations",
        "Leaks found while the engine was idle: pages or slots that are neither free nor accounted for.",
        stats.violations,
    )
    yield _counter(
        "late_kernels",
        "Kernels that were compiled, or read from the cache, after the server was ready; requests waited for "
        "them.",
        stats.late_kernels,
    )
    yield _counter(
        "eager_steps",
        "Steps that ran without a CUDA graph although graphs are captured.",
        stats.eager_steps,
    )


def _tokens(stats: Stats) -> Iterator[Metric]:
    yield _counter(
        "prompt_tokens",
        "Prompt tokens of requests whose prefill has begun, cached ones included.",
        stats.prompt_tokens,
    )
    yield _counter("cached_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens)
    yield _counter(
        "generated_tokens",
        "Tokens generated for requests, also those that a stop string cuts off.",
        stats.generated_tokens,
    )
    yield _counter(
        "spec_steps",
        "Target forwards that emitted tokens for their batch. Plain decoding counts, prefill does not.",
        stats.steps,
    )
    yield _counter(
        "spec_drafted_tokens", "Draft nodes that were verified; roots are not counted.", stats.drafted
    )
    yield _counter(
        "spec_accepted_tokens",
        "Drafted tokens that were emitted; bonus tokens are not counted.",
        stats.accepted,
    )


def _steps(totals: StepTotals) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "specserve_spec_shape_steps", "Steps of a shape whose results were read.", labels=["shape"]
    )
    seconds = CounterMetricFamily(
        "specserve_spec_shape_seconds", "Time that the device spent on steps of a shape.", labels=["shape"]
    )
    for label, shape in sorted(totals.shapes.items()):
        steps.add_metric([label], shape.steps)
        seconds.add_metric([label], shape.seconds)
    yield steps
    yield seconds
    yield _histogram("step_requests", "Requests in a step, without padding.", totals.batches, totals.requests)
    yield _histogram(
        "iteration_tokens",
        "Tokens of an iteration: prompt tokens that were launched, and tokens of answers that were read.",
        totals.iterations,
        totals.processed,
    )


def _levels(totals: StepTotals, drafter: str) -> Iterator[Metric]:
    tested = CounterMetricFamily(
        "specserve_spec_level_tested",
        "Times that a draft level was tested: a request's step accepted all levels above it and drafted at least "
        "as many nodes as the level is deep.",
        labels=["drafter", "level"],
    )
    accepted = CounterMetricFamily(
        "specserve_spec_level_accepted",
        "Times that the target chose a token drafted at a level, also after the request's last token.",
        labels=["drafter", "level"],
    )
    for number, level in enumerate(totals.levels, 1):
        tested.add_metric([drafter, str(number)], level.tested)
        accepted.add_metric([drafter, str(number)], level.accepted)
    yield tested
    yield accepted


def _sources(totals: StepTotals) -> Iterator[Metric]:
    helps = {
        "tested": "First choices of a drafter that were compared with the text, as far as the text followed them, "
        "verified or not. Only for drafters that share a tree.",
        "right": "Tested first choices that matched the text.",
        "accepted": "Accepted tokens that were among a drafter's candidates; a token that both drafters had "
        "counts for both.",
    }
    for name, text in helps.items():
        family = CounterMetricFamily(f"specserve_spec_source_{name}_tokens", text, labels=["source"])
        for source, counts in totals.sources.items():
            family.add_metric([source], getattr(counts, name))
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

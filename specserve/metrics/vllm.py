"""Our metrics once more under vLLM's names, so that its dashboards, routers and autoscalers find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

NAMES: Mapping[str, str] = {
    "running_requests": "num_requests_running",
    "waiting_requests": "num_requests_waiting",
    "kv_page_request_ratio": "kv_cache_usage_perc",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
    "iteration_tokens": "iteration_tokens_total",
    "finished_requests": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_answer_tokens": "request_generation_tokens",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
    "spec_drafted_tokens": "spec_decode_num_draft_tokens",
    "spec_accepted_tokens": "spec_decode_num_accepted_tokens",
}
"""vLLM's names by ours."""
_LABELS = {"reason": "finished_reason"}


class VllmNames(Collector):
    """Export the metrics of ``sources`` under vLLM's names, labelled with the name of the ``model``."""

    def __init__(self, sources: Sequence[Collector], model: Callable[[], str]) -> None:
        self._sources = sources
        self._model = model

    def collect(self) -> Iterator[Metric]:
        model = {"model_name": self._model()}
        for source in self._sources:
            for metric in source.collect():
                ours = metric.name.removeprefix("specserve_")
                if ours in NAMES:
                    yield _renamed(metric, f"vllm:{NAMES[ours]}", model)
                if ours == "prompt_tokens":
                    yield _renamed(metric, "vllm:prefix_cache_queries", model)
                if ours == "cached_tokens":
                    yield _renamed(metric, "vllm:prefix_cache_hits", model)
                if ours == "spec_level_tested":
                    yield _first_level(metric, model)
                if ours == "spec_level_accepted":
                    yield _by_position(metric, model)


def _renamed(metric: Metric, name: str, model: Mapping[str, str]) -> Metric:
    found = _metric(metric, name)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            own = sample.name.removeprefix(metric.name)
            found.samples.append(Sample(name + own, {**model, **labels}, sample.value))
    return found


def _first_level(metric: Metric, model: Mapping[str, str]) -> Metric:
    """Return the number of drafts: a request's step drafted if its first level was tested."""
    found = _metric(metric, "vllm:spec_decode_num_drafts")
    for sample in metric.samples[:1]:
        found.samples.append(Sample(found.name + "_total", {**model}, sample.value))
    return found


def _by_position(metric: Metric, model: Mapping[str, str]) -> Metric:
    """Return the accepted tokens by position, which counts from 0 while levels count from 1."""
    found = _metric(metric, "vllm:spec_decode_num_accepted_tokens_per_pos")
    for position, sample in enumerate(metric.samples):
        labels = {**model, "position": str(position)}
        found.samples.append(Sample(found.name + "_total", labels, sample.value))
    return found


def _metric(metric: Metric, name: str) -> Metric:
    return Metric(name, f"vLLM's name of {metric.name}.", metric.type)

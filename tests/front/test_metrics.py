"""``/metrics``, the page that defines it, the dashboard that shows it, and ``/server_info``'s summary."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from starlette.testclient import TestClient

from specserve.core import SamplingParams, SpeculationUsage
from specserve.frontend.generation import Job
from specserve.frontend.output import Answer
from specserve.messages import (
    CostTotals,
    LevelTotals,
    ShapeTotals,
    SourceTotals,
    Stats,
    StepTotals,
    Submit,
    Tokens,
    decode_to_front,
    encode,
)
from specserve.metrics.front import Metrics
from tests.engines import Checkpoints, make_scheduler
from tests.front.conftest import Serve

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "specserve.json"
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yaml"
TOTALS = StepTotals(
    drafter="EAGLE3",
    shape="3,1,4",
    shapes={"off": ShapeTotals(1, 0.5), "3,1,4": ShapeTotals(3, 3.5)},
    levels=[LevelTotals(8, 6), LevelTotals(6, 3), LevelTotals(3, 0)],
    sources={"EAGLE3": SourceTotals(9, 5, 6), "NGRAM": SourceTotals(4, 1, 2)},
    batches=[2, 1, 0, 1],
    requests=12,
    iterations=[1, 0, 2],
    processed=90,
    cost=CostTotals(predicted_seconds=4.25, plain_seconds=6.0, error=0.125),
)


def stats(totals: StepTotals) -> Stats:
    return Stats(
        1, 2, 128, 96, 20, 7, 8, 9, 10, 11, 12, 13, totals, pages_idle=16, snapshots=9, snapshots_kept=3
    )


def shown(totals: StepTotals = TOTALS, accept: str = "") -> str:
    """Everything there is to see."""
    metrics = Metrics(lambda: stats(totals), model=lambda: "tiny")
    metrics.answered("/v1/completions", 200)
    metrics.used("team-a", 20, 10)
    usage = SpeculationUsage(steps=4, drafted=12, accepted=6)
    answer = Answer(token_ids=[5] * 10, finish_reason="length", speculation=usage)
    metrics.finished(2.0, 1.5, Job([1] * 20, SamplingParams()), answer)
    return metrics.text(accept)[0].decode()


class Described(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    definition: str


def metrics_shown() -> dict[str, Described]:
    text = shown()
    helps = dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.M))
    kinds = dict(re.findall(r"^# TYPE (\w+) (.*)$", text, re.M))
    return {
        name: Described(kinds[name], labels_of(name, text), definition)
        for name, definition in helps.items()
        if not name.endswith("_created") and not name.startswith("process_")
    }


def labels_of(name: str, text: str) -> tuple[str, ...]:
    samples = re.findall(rf"^{name}(?:_bucket)?{{(.*)}} ", text, re.M)
    return tuple(sorted({label for sample in samples for label in re.findall(r'(\w+)="', sample)} - {"le"}))


def metrics_documented() -> Iterator[tuple[str, Described]]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, kind, labels, definition in re.findall(
        r"^\| `(specserve_\w+)` \| (\w+) \| *(.*?) *\|(?: ([^|]+) \|)?$", page, re.M
    ):
        yield name, Described(kind, tuple(sorted(re.findall(r"\w+", labels))), definition)


def test_the_page_defines_what_is_shown() -> None:
    """Those of speculation with their definitions."""
    rows, known = list(metrics_documented()), metrics_shown()
    assert len(rows) == len(dict(rows))
    assert dict(rows) == {
        name: each if dict(rows)[name].definition else each._replace(definition="")
        for name, each in known.items()
    }
    assert sum(row.definition != "" for _, row in rows) == 13


OPENMETRICS = "application/openmetrics-text;version=1.0.0"
ACCEPTS = [
    "",
    f"{OPENMETRICS};q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # Prometheus 2
    f"{OPENMETRICS};escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*",  # Prometheus 3
    f"{OPENMETRICS};escaping=values",
    "text/plain;version=1.0.0;escaping=underscores",
]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_vllm_names_are_those_of_the_page(accept: str) -> None:
    """Each shows what ours shows, with the model's name."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(vllm:\w+)` \| `(specserve_\w+)`", page, re.M))
    text = shown(accept=accept)
    values: dict[str, list[str]] = {}
    for name, labels, value in re.findall(r"^(vllm:\w+){(.*)} (\S+)$", text, re.M):
        assert 'model_name="tiny"' in labels
        values.setdefault(re.sub("_(bucket|sum|count)$", "", name), []).append(value)
    assert sorted(values) == sorted(rows)
    assert len(re.findall("^# TYPE vllm", text, re.M)) == len(rows)
    for name, ours in rows.items():
        expected = re.findall(rf"^{ours}(?:_bucket|_sum|_count)?(?:{{.*}})? (\S+)$", text, re.M)
        assert values[name] == (expected[:1] if name.startswith("vllm:spec_decode_num_drafts") else expected)


def test_vllm_names_and_labels() -> None:
    lines = shown().splitlines()
    for line in (
        'num_requests_running{model_name="tiny"} 1.0', 'kv_cache_usage_perc{model_name="tiny"} 0.125',
        'prefix_cache_queries_total{model_name="tiny"} 11.0', 'prefix_cache_hits_total{model_name="tiny"} 12.0',
        'request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'e2e_request_latency_seconds_bucket{le="2.0",model_name="tiny"} 1.0',
        'request_decode_time_seconds_sum{model_name="tiny"} 1.5',
        'spec_decode_num_drafts_total{model_name="tiny"} 8.0',
        'spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"} 6.0',
        'spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="2"} 0.0',
    ):  # fmt: skip
        assert f"vllm:{line}" in lines


def test_a_request_is_measured_in_parts(serve: Serve) -> None:
    client, _ = serve("abc")
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 2})
    assert answer.status_code == 200
    lines = client.get("/metrics").text.splitlines()
    assert 'specserve_finished_requests_total{reason="stop"} 2.0' in lines
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 2.0' in lines
    seconds = dict(line.split() for line in lines if re.match(r"specserve_\w+_seconds_sum ", line))
    parts = [
        float(seconds[f"specserve_{name}_seconds_sum"]) for name in ("queue", "prefill", "decode", "request")
    ]
    assert sum(parts[:3]) == pytest.approx(parts[3])
    assert min(parts[1:]) > 0


def test_steps_and_levels() -> None:
    lines = shown().splitlines()
    for line in (
        'spec_shape_steps_total{shape="3,1,4"} 3.0', 'spec_shape_seconds_total{shape="off"} 0.5',
        'spec_level_tested_total{drafter="EAGLE3",level="2"} 6.0',
        'spec_level_accepted_total{drafter="EAGLE3",level="3"} 0.0',
        'step_requests_bucket{le="1.0"} 2.0', 'step_requests_bucket{le="2.0"} 3.0',
        'step_requests_bucket{le="4.0"} 3.0', 'step_requests_bucket{le="+Inf"} 4.0',
        "step_requests_count 4.0", "step_requests_sum 12.0",
        'iteration_tokens_bucket{le="2.0"} 1.0', "iteration_tokens_count 3.0", "iteration_tokens_sum 90.0",
        "spec_predicted_seconds_total 4.25", "spec_plain_seconds_total 6.0", "spec_cost_error_ratio 0.125",
    ):  # fmt: skip
        assert f"specserve_{line}" in lines


def test_what_is_not_known_is_not_shown() -> None:
    """No drafter: no levels. A fixed shape: nobody knows what plain decoding costs."""
    text = shown(StepTotals(shape="off", shapes={"off": ShapeTotals(1, 0.5)}))
    assert "spec_shape_steps" in text
    assert not re.search("spec_(level|plain|predicted|cost)|spec_decode_num_drafts|per_pos", text)


def test_stats_survive_the_way_between_processes() -> None:
    for totals in (TOTALS, StepTotals()):
        assert decode_to_front(encode([stats(totals)])) == [stats(totals)]


def test_accepted_length_of_each_request(serve: Serve) -> None:
    client, _ = serve("abcdefg")  # 8 tokens, 3 a message: the fake's 3 steps accept 2, 2 and 1
    client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 2})
    lines = client.get("/metrics").text.splitlines()
    length = "specserve_request_accepted_length_tokens"
    assert f"{length}_count 2.0" in lines
    assert f'{length}_bucket{{le="2.5"}} 0.0' in lines
    assert f'{length}_bucket{{le="3.0"}} 2.0' in lines


def test_time_in_the_queue(agreeing: Checkpoints) -> None:
    """One slot: the second request waits for the first, however long its own tokens take."""
    scheduler = make_scheduler(agreeing.target, max_running_requests=1)
    queued: dict[str, list[float]] = {"a": [], "b": []}
    for rid in queued:
        scheduler.submit(Submit(rid, [1, 2], SamplingParams(max_tokens=3, ignore_eos=True)))
    time.sleep(0.05)
    while scheduler.has_work:
        for message in scheduler.run_once():
            assert isinstance(message, Tokens)
            queued[message.rid].append(message.queued)
    assert all(len(set(seconds)) == 1 for seconds in queued.values())
    assert 0.05 <= queued["a"][0] < queued["b"][0]
    metrics = Metrics(lambda: None)
    metrics.queued(0.05)
    assert 'specserve_queue_seconds_bucket{le="0.06"} 1.0' in metrics.text()[0].decode()


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_tokens_of_iterations(agreeing: Checkpoints, overlap: str) -> None:
    """All prompts, less what was cached, and all answers; chunks of prompts count with the iteration they ran in."""
    scheduler = make_scheduler(agreeing.target, chunked_prefill_size=4, overlap_schedule=overlap)
    for rid, size in (("a", 3), ("b", 10)):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        scheduler.submit(Submit(rid, [*range(1, size + 1)], params))
    while scheduler.has_work:
        scheduler.run_once()
    found = scheduler.stats()
    totals = found.step_totals
    assert totals.processed == found.prompt_tokens - found.cached_tokens + found.generated_tokens == 13 + 12
    assert sum(totals.iterations) >= 5
    assert sum(totals.iterations[2:]) >= 3, "chunks of four tokens"
    assert not any(totals.iterations[4:])


def test_a_request_without_a_step_has_no_length() -> None:
    metrics = Metrics(lambda: None)
    metrics.finished(1.0, 0.5, Job([1], SamplingParams()), Answer(finish_reason="stop"))
    lines = metrics.text()[0].decode().splitlines()
    assert "specserve_request_seconds_count 1.0" in lines
    assert "specserve_request_accepted_length_tokens_count 0.0" in lines


def test_server_info_reads_the_figures_out(serve: Serve) -> None:
    client, _ = serve()
    assert isinstance(client, TestClient)
    assert client.get("/server_info").json()["speculation"] is None
    client.app.state.front.engine.receive(stats(TOTALS))  # type: ignore[attr-defined]
    assert client.get("/server_info").json()["speculation"] == {
        "drafter": "EAGLE3",
        "shape": "3,1,4",
        "share_of_steps": {"3,1,4": 0.75, "off": 0.25},
        "acceptance_by_level": [0.75, 0.5, 0.0],
        "speed_up": 1.5,
    }


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_the_dashboard_imports() -> None:
    found = dashboard()
    assert found["schemaVersion"] >= 38  # Grafana 10
    assert {each["name"]: each["type"] for each in found["templating"]["list"]} == {
        "datasource": "datasource",
        "instance": "query",
    }
    ids = Counter(panel["id"] for panel in found["panels"])
    assert set(ids.values()) == {1}
    assert [panel["title"] for panel in found["panels"] if panel["type"] == "row"] == [
        "Traffic",
        "Speculation",
        "Memory",
        "Waiting and trouble",
    ]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_ask_for_what_exists(panel: dict[str, Any]) -> None:
    known = metrics_shown()
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    refs = [target["refId"] for target in panel["targets"]]
    assert len(refs) == len(set(refs))
    for part in (panel, *panel["targets"]):
        assert part["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        names = re.findall(r"specserve_\w+", target["expr"])
        assert names
        for name in names:
            assert name in known or known[base(name, known)].kind == "histogram"
        assert target["expr"].count('{instance=~"$instance"}') == len(names)
        grouped = re.findall(r"by \(([\w, ]+)\)", target["expr"])
        labels = {label for name in names for label in known[base(name, known)].labels} | {"le", "instance"}
        assert {label for group in grouped for label in group.split(", ")} <= labels
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels - {"le"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_ask_for_what_exists(rule: dict[str, Any]) -> None:
    known, query = metrics_shown(), rule["expr"]
    names = re.findall(r"specserve_\w+", query) if "up{" not in query else []
    assert names or rule["alert"] == "SpecserveDown"
    labels = {"instance", "le"} | {label for name in names for label in known[base(name, known)].labels}
    for name, matched in re.findall(r"(specserve_\w+){(.*?)}", query):
        assert set(re.findall(r"(\w+)=", matched)) <= set(known[name].labels)
    grouped = re.findall(r"by \(([\w, ]+)\)", query)
    assert {label for group in grouped for label in group.split(", ")} <= labels
    kept = set(grouped[0].split(", ")) if grouped else {"instance"}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_prometheus_reads_the_alerts() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    subprocess.run([promtool, "check", "rules", "--lint-fatal", ALERTS], check=True)


def base(name: str, known: dict[str, Described]) -> str:
    return name if name in known else re.sub("_(bucket|sum|count)$", "", name)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_openmetrics_and_the_process(serve: Serve) -> None:
    client, _ = serve("ab")
    assert "process_resident_memory_bytes" in client.get("/metrics").text
    accepted = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=accepted)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")

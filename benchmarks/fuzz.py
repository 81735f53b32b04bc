"""Random requests drawn from ``/openapi.json``: no status of 500 or more, no undescribed answer, no leak.

    python3 -m venv fuzz && fuzz/bin/pip install schemathesis
    python -m benchmarks.fuzz --schemathesis fuzz/bin/schemathesis [--seconds 600]

schemathesis has its own environment, because its pins may clash with the server's. A third of the time it draws from
the schema as it is, then from one narrowed so that many requests succeed: the served model, short answers, ids of the
vocabulary. At the end every page of the pool must be free, and the engine must be the first one. Exit code 1: something
was wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.common import write_results

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
OF_THE_WHOLE = ("negative_data_rejection",)  # a narrowed schema leaves out what is not wrong
READY_WITHIN = 120.0
IDLE_CHECK = 11.0  # seconds after which an idle engine looks at its books
SAMPLE = re.compile(r"^specserve_(\w+)(?:{(.*)})? (\S+)$", re.M)
SHORT = {"type": "integer", "minimum": 0, "maximum": 32}
FEW = {"type": "integer", "minimum": 1, "maximum": 3}
IDS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 40,
    "items": {"type": "integer", "minimum": 3, "maximum": 500},
}
WORDS = {"type": "string", "minLength": 1, "maxLength": 200}
BIAS = {"type": "number", "minimum": -100, "maximum": 100}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": WORDS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
# What requests may hold in the narrowed schema; None: not at all, as it would mostly be refused next to others.
NARROW: dict[str, Any] = {
    "prompt": {"anyOf": [WORDS, IDS, {"type": "array", "minItems": 1, "maxItems": 3, "items": WORDS}]},
    "messages": {"type": "array", "minItems": 1, "maxItems": 3, "items": MESSAGE},
    "tokens": IDS,
    "max_tokens": {**SHORT, "minimum": 1},
    "max_completion_tokens": None,
    "min_tokens": {"enum": [0, 1]},
    "n": FEW,
    "best_of": None,
    "top_logprobs": None,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[1-9][0-9]{0,2}$"},
        "additionalProperties": BIAS,
    },
    "stop": WORDS,
    "stream_options": None,
    "stop_token_ids": IDS,
    "abort_all": None,
}


class Served:
    """A server with the bundled model and its EAGLE-3 draft, logging to a file."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "specserve.launch", "--port", "0", "--log-format", "json"]
        command += ["--speculative-algorithm", "EAGLE3", "--max-running-requests", "8"]
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stderr=file)
        self.url = self._wait_ready()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline and self._process.poll() is None:
            if found := re.search(r"ready: (http://[\d.:]+)", self._log.read_text()):
                return found[1]
            time.sleep(0.2)
        self.close()
        raise SystemExit("the server did not become ready:\n" + self._log.read_text())

    def get(self, path: str, post: bytes | None = None) -> str:
        request = urllib.request.Request(self.url + path, post, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: str = answer.read().decode()
        return found

    def metrics(self) -> dict[tuple[str, str], float]:
        """By name and labels."""
        return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(self.get("/metrics"))}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def narrowed(schema: dict[str, Any], model: str) -> dict[str, Any]:
    """The schema with requests that are mostly answered."""
    found: dict[str, Any] = copy.deepcopy(schema)
    for name, part in found["components"]["schemas"].items():
        if name.endswith("Request"):
            properties = part["properties"]
            properties["model"] = {"enum": [model]}
            for field in NARROW.keys() & properties.keys():
                if NARROW[field] is None:
                    del properties[field]
                else:
                    properties[field] = NARROW[field]
            part["required"] = [*part.get("required", ()), *({"max_tokens"} & properties.keys())]
    return found


def fuzz(
    args: argparse.Namespace, url: str, schema: Any, seconds: float, directory: Path, narrow: bool = False
) -> dict[str, Any]:
    """Run schemathesis for some seconds. Returns its counts, and the failures in its own words."""
    directory.mkdir()
    file, report = directory / "openapi.json", directory / "report.json"
    file.write_text(json.dumps(schema))
    command = [args.schemathesis, "--no-color", "run", str(file), "--url", url, "--workers", "2"]
    checks = [check for check in CHECKS if not (narrow and check in OF_THE_WHOLE)]
    command += ["--checks", ",".join(checks), "--max-time", str(int(seconds))]
    command += ["--phases", "fuzzing", "--mode", "positive"] if narrow else ["--phases", "coverage,fuzzing"]
    command += ["--request-timeout", "120", "--generation-database", "none", "--seed", str(args.seed)]
    command += ["--continue-on-failure", "--suppress-health-check", "all", "--output-truncate", "false"]
    command += ["--report", "json", "--report-json-path", str(report)]
    run = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=seconds + 300, check=False
    )
    print(run.stdout, run.stderr)
    said = run.stdout if run.returncode else ""
    summary = run.stdout.partition("= SUMMARY =")[2].splitlines()
    cases = next((line.strip() for line in summary if re.match(r"\s*\d+ generated", line)), "")
    return {"seconds": seconds, "exit_code": run.returncode, "cases": cases, "failures": said[-20000:]}


def problems(server: Served) -> list[str]:
    """What is wrong with a server that has nothing to do any more."""
    time.sleep(IDLE_CHECK)
    server.get("/flush_cache", b"{}")
    time.sleep(1.5)  # for the engine's next message
    found, metrics = [], server.metrics()
    for name, expected in {
        "running_requests": 0.0,
        "waiting_requests": 0.0,
        "kv_pages_cached": 0.0,
        "kv_pages_free": metrics["kv_pages_total", ""],
        "invariant_violations_total": 0.0,
        "engine_restarts_total": 0.0,
    }.items():
        if metrics[name, ""] != expected:
            found.append(f"{name} is {metrics[name, '']}, not {expected}")
    for labels, count in _answers(metrics).items():
        if labels[1] >= "500":
            found.append(f"{count} answers {labels[1]} of {labels[0]}")
    return found


def _answers(metrics: dict[tuple[str, str], float]) -> dict[tuple[str, str], int]:
    """Answers by route and status."""
    found = {}
    for (name, labels), count in metrics.items():
        if name == "requests_total":
            route, status = re.findall(r'"(.*?)"', labels)
            found[route, status] = int(count)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="where the figures go; else benchmarks/results/fuzz.json")
    args = parser.parse_args()
    version = subprocess.run([args.schemathesis, "--version"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        server = Served(directory / "log")
        try:
            schema = json.loads(server.get("/openapi.json"))
            model = json.loads(server.get("/v1/models"))["data"][0]["id"]
            runs = {
                "as it is": fuzz(args, server.url, schema, args.seconds / 3, directory / "whole"),
                "narrowed": fuzz(
                    args,
                    server.url,
                    narrowed(schema, model),
                    args.seconds * 2 / 3,
                    directory / "narrow",
                    True,
                ),
            }
            wrong, metrics = problems(server), server.metrics()
        finally:
            server.close()
        errors = [line for line in (directory / "log").read_text().splitlines() if '"level": "error"' in line]
    answers = _answers(metrics)
    figures = {
        "schemathesis": version.stdout.strip(),
        "runs": runs,
        "requests": sum(answers.values()),
        "answers": {f"{route} {status}": count for (route, status), count in sorted(answers.items())},
        "generated_tokens": metrics["generated_tokens_total", ""],
        "accepted_drafts": metrics["spec_accepted_tokens_total", ""],
        "errors_logged": errors[:20],
        "problems": wrong,
    }
    print(json.dumps(figures, indent=1), write_results("fuzz", figures, args.output))
    return int(bool(wrong or errors or any(run["exit_code"] for run in runs.values())))


if __name__ == "__main__":
    sys.exit(main())

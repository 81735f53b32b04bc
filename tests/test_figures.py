"""The figures in README.md and docs/performance.md match the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import acceptance

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


def figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())[
        "figures"
    ]
    return found


def rows(start: str) -> list[list[str]]:
    """The cells of the rows of a table whose first cell matches."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(rf"^\| (?:{start}) \|.*\|$", PERFORMANCE, re.M)
    ]


def test_milliseconds_a_step() -> None:
    measured = {
        (str(tuple(each["shape"])) if each["shape"] else "off", each["batch"]): each
        for each in figures("single_stream")
    }
    shown = rows(r"off|\(\d, \d, \d+\)")
    steps = [row for row in shown if len(row) == 7]
    assert len(steps) == 11
    for shape, batch, ours, floor, ratio, *peers in steps:
        found = measured[shape, int(batch)]
        assert ours == f"{found['ms_per_step']:.2f}"
        assert floor == f"{found['floor_ms']:.2f}"
        assert ratio == f"{found['ratio_to_floor']:.2f}"
        assert peers == [str(found["peers_ms"].get(peer, "no trees")) for peer in ("SGLang", "vLLM")]


def test_prefill() -> None:
    shown = rows(r"\d+ x \d+")
    measured = {f"{each['batch']} x {each['prompt_tokens']}": each for each in figures("prefill")}
    assert len(shown) == 3
    for prompts, ours, floor, speed, *_ in shown:
        found = measured[prompts]
        assert [ours, floor] == [f"{found['ms']:.1f}", f"{found['floor_ms']:.1f}"]
        assert speed == f"{found['tflops']:.0f}"


def test_the_controller() -> None:
    shares = []
    for each in figures("adaptive_h200"):
        speed = {policy: run["tokens_per_second"] for policy, run in each["policies"].items()}
        best = max(value for policy, value in speed.items() if policy != "adaptive")
        shares.append(speed["adaptive"] / best)
    words = f"{min(shares):.2f} to {max(shares):.2f} times the tokens a second of the best"
    assert words in " ".join(PERFORMANCE.split())


def test_over_http() -> None:
    names = {"bfloat16": "bfloat16", "FP8": "fp8", "4 bits": "int4"}
    loads = {"plain": "T0", "greedy": "T0", "temperature 1": "T1"}
    found = {(each["weights"], each["name"]): each for each in figures("serving")}
    shown = rows(rf"(?:{'|'.join(names)}), (?:{'|'.join(loads)})")
    assert len(shown) == 15
    for number, (label, *cells) in enumerate(shown):
        weights, load = label.split(", ")
        for clients, cell in zip((1, 16, 64, 128, 256), cells, strict=True):
            each = found.get((names[weights], f"{loads[load]}_{clients}"))
            if each is None:
                assert cell == "–"
                continue
            plain, drafted = each["plain"], each["adaptive"]
            high = "p99" if "p99" in plain["tpot_ms"] else "p95"
            slower = [drafted[kind][high] / plain[kind][high] for kind in ("tpot_ms", "end_to_end_ms")]
            tokens = f"{drafted['tokens_per_second']:,.0f} ({drafted['ratio']:.2f})"
            if load == "plain":
                assert cell == f"{plain['tokens_per_second']:,.0f}"
            else:
                assert cell == (tokens if number < 9 else "{:.2f}, {:.2f}".format(*slower))


def test_lossless() -> None:
    page = " ".join(PERFORMANCE.split())
    for name, words in (
        (
            "gpu_float32",
            "in float32, where sums have [no fixed order](architecture.md#one-order-of-sums), {:,} of {:,}",
        ),
        ("gpu_bfloat16", "In bfloat16 with drafts in int8, {:,} of {:,} texts are equal"),
        ("float64", "In float64, {:,} of {:,} are equal"),
    ):
        found: Any = figures(f"lossless_{name}")
        assert words.format(found["identical"], found["texts"]) in page


def test_the_methods_compared() -> None:
    """As ``python -m benchmarks.acceptance methods`` prints them."""
    found = figures("methods")
    assert "\n".join(acceptance.table(found)) in PERFORMANCE


def test_the_gain_in_the_readme() -> None:
    found = {
        (row["method"], tuple(row["shape"] or ())): row
        for row in figures("methods")
        if row["temperature"] == 0
    }
    drafted, plain = found["EAGLE3", (5, 1, 6)], found["NONE", ()]
    tokens = [f"{drafted[each]['tokens_per_step']:.2f}" for each in ("dialogue", "code")]
    speed = "tokens_per_processor_second"
    times = [f"{drafted[each][speed] / plain[each][speed]:.1f}" for each in ("dialogue", "code")]
    words = (
        f"gives {tokens[0]} tokens a step in dialogue and {tokens[1]} in code, and {times[0]} and {times[1]} "
        "times plain decoding's tokens a second"
    )
    assert words in " ".join(README.split())


def test_commands_of_results() -> None:
    """Each names a benchmark that there is, or one of which the log says what it is called now."""
    log = (ROOT / "benchmarks/results/LOG.md").read_text()
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        for name in re.findall(r"-m benchmarks\.(\w+)", json.loads(path.read_text())["command"]):
            assert (ROOT / f"benchmarks/{name}.py").exists() or f"`{name}`" in log, path.name

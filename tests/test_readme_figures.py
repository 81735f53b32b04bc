"""The figures in README.md, and those of docs/speculation.md that compare methods, match the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import methods

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SPECULATION = (ROOT / "docs/speculation.md").read_text()


def figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())[
        "figures"
    ]
    return found


def row(start: str) -> list[str]:
    """The cells of the only row of a table that begins so."""
    (found,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", README, re.M)
    return [cell.strip() for cell in found.split("|")]


def test_milliseconds_a_step() -> None:
    names = {
        "plain decoding": None,
        "EAGLE-3 chain (3, 1, 4)": [3, 1, 4],
        "EAGLE-3 chain (7, 1, 8)": [7, 1, 8],
        "EAGLE-3 tree (5, 8, 32)": [5, 8, 32],
    }
    measured = {(str(each["shape"]), each["batch"]): each for each in figures("single_stream")}
    rows = re.findall(
        r"^\| (plain decoding|EAGLE-3 [^|]*?) \| (\d+) \|([^|]*)\|([^|]*)\|([^|]*)\|$", README, re.M
    )
    assert len(rows) == 7
    for name, batch, ours, *peers in rows:
        found = measured[str(names[name]), int(batch)]
        assert ours.strip() == f"{found['ms_per_step']:.2f}"
        known = [str(found["peers_ms"].get(peer, "no trees")) for peer in ("SGLang", "vLLM")]
        assert [peer.strip() for peer in peers] == known


def test_prefill() -> None:
    measured = {(each["batch"], each["prompt_tokens"]): each["ms"] for each in figures("prefill")}
    assert row("first token of a prompt of 512 | 1")[0] == f"{measured[1, 512]:.1f}"
    assert row("first tokens of prompts of 512 | 16")[0] == f"{measured[16, 512]:.0f}"


def test_the_controller() -> None:
    def ratios(name: str) -> dict[int, tuple[float, float]]:
        found = {}
        for each in figures(name):
            speed = {policy: run["tokens_per_second"] for policy, run in each["policies"].items()}
            best = max(value for policy, value in speed.items() if policy != "adaptive")
            found[each["batch"]] = speed["adaptive"] / speed["off"], speed["adaptive"] / best
        return found

    found = ratios("adaptive_h200")
    low, high = (function(best for _, best in found.values()) for function in (min, max))
    words = (
        f"{found[1][0]:.2f} times plain decoding at batch 1, {found[32][0]:.2f} at 32, {found[256][0]:.2f} at 256, "
        f"{low:.2f} to {high:.2f} of the best fixed shape"
    )
    assert words in README


def test_lossless() -> None:
    for dtype, words in (("float32", "in float32 {} of {} texts"), ("bfloat16", "in bfloat16 {} of {}")):
        found = figures(f"lossless_gpu_{dtype}")
        assert words.format(found["identical"], found["texts"]) in README  # type: ignore[call-overload]
    found = figures("lossless_float64")
    assert f"on a CPU, {found['identical']} of {found['texts']} texts" in README  # type: ignore[call-overload]


def test_the_methods_compared() -> None:
    """As ``python -m benchmarks.methods`` prints them."""
    found = figures("methods")
    assert "\n".join(methods.table(found)) in SPECULATION
    assert methods.comparison(found) in " ".join(SPECULATION.split())

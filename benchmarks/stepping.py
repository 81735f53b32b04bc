"""Milliseconds per step: the wall clock of ``LLM.generate`` without prefill, divided by the steps taken.

Shared by ``single_stream.py``, ``throughput.py`` and ``drafters.py``. The time of a run to one token is subtracted from
that of a full run, and the rest is divided by the steps of the request that took most. Prompts of one batch that are
prefilled in several chunks begin to decode one after the other, so ``engine_steps`` can be larger. ``full_ms_per_step``
instead subtracts the time of a run to an eighth of the tokens, which begins and ends with the same steps of fewer
requests, so that only steps of all requests are left, at slightly later positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common import generate_timed, make_prompts, open_llm, write_results
from benchmarks.floors import PEERS_MS, Shape, applies, step_ms
from specserve import LLM

HEADER = (
    f"{'shape':11} {'batch':>5} {'ms/step':>8} {'full':>6} {'bar':>6} {'floor':>6} {'ratio':>6} {'tok/s':>8} "
    f"{'accepted':>8}  peers"
)


def measure(llm: LLM, prompts: list[list[int]], new_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` runs, after a short one that is not counted."""
    generate_timed(llm, prompts, min(new_tokens, 16))
    rows = [_once(llm, prompts, new_tokens) for _ in range(repeats)]
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _once(llm: LLM, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    prefill, _ = generate_timed(llm, prompts, 1)
    begun, first = generate_timed(llm, prompts, max(1, new_tokens // 8))
    before = _engine_steps(llm)
    whole, outputs = generate_timed(llm, prompts, new_tokens)
    each = [output.speculation for output in outputs]
    steps, emitted = sum(s.steps for s in each), sum(s.steps + s.accepted for s in each)
    most, seconds = max(s.steps for s in each), whole - prefill
    between = most - max(output.speculation.steps for output in first)
    return {
        "ms_per_step": seconds / most * 1e3,
        "full_ms_per_step": (whole - begun) / max(between, 1) * 1e3,
        "tokens_per_second": emitted / seconds,
        "accepted_length": emitted / steps,
        "steps": most,
        "engine_steps": _engine_steps(llm) - before,
        "prefill_seconds": prefill,
    }


def _engine_steps(llm: LLM) -> int:
    assert llm.engine is not None
    return llm.engine.stats().steps


def run_shape(
    args: argparse.Namespace, shape: Shape | None, batches: Mapping[int, float | None]
) -> Iterator[dict[str, Any]]:
    """One engine, one row a batch size; ``batches`` says which milliseconds a step are wanted of each."""
    sizes = [size for size in batches if size <= args.max_batch]
    if not sizes:
        return
    prompts = make_prompts(args, max(sizes))
    with open_llm(args, shape, max(sizes)) as llm:
        for size in sizes:
            found = measure(llm, prompts[:size], args.new_tokens, args.repeats)
            yield row(args, shape, size, batches[size], found)


def row(
    args: argparse.Namespace, shape: Shape | None, batch: int, bar: float | None, found: dict[str, Any]
) -> dict[str, Any]:
    """What was measured, next to what it is held against where that is of the same model and card."""
    context, same = args.prompt_tokens + args.new_tokens // 2, applies(args.model)
    floor = step_ms(shape, batch, context, args.quantization) if same else None
    return {
        "quantization": args.quantization,
        "shape": shape,
        "batch": batch,
        **found,
        "bar_ms": bar if same else None,
        "floor_ms": floor,
        "ratio_to_floor": None if floor is None else found["ms_per_step"] / floor,
        "peers_ms": PEERS_MS.get((shape, batch), {}) if same and args.quantization == "none" else {},
    }


def line(found: dict[str, Any]) -> str:
    name = "off" if found["shape"] is None else str(found["shape"])
    peers = ", ".join(f"{peer} {ms}" for peer, ms in found["peers_ms"].items())
    return (
        f"{name:11} {found['batch']:5} {found['ms_per_step']:8.2f} "
        f"{found['full_ms_per_step']:6.2f} {_or_dash(found['bar_ms'])} "
        f"{_or_dash(found['floor_ms'])} {_or_dash(found['ratio_to_floor'])} "
        f"{found['tokens_per_second']:8.0f} {found['accepted_length']:8.2f}  {peers}"
    )


def run_shapes(
    args: argparse.Namespace, cases: Sequence[tuple[Shape | None, Mapping[int, float | None]]], name: str
) -> list[dict[str, Any]]:
    """All rows, each printed and written to the results ``name`` as it comes."""
    print(HEADER)
    rows = []
    for shape, batches in cases:
        for found in run_shape(args, shape, batches):
            rows.append(found)
            path = write_results(name, rows, args.output)
            print(line(found), flush=True)
    if rows:
        print(path)
    return rows


def _or_dash(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>6}"

"""Times the sampling kernels in a CUDA graph, by features and rows.

    PYTHONPATH=kernels python kernels/bench/sampling.py [--configs BLOCK:SCAN_WARPS:SCAN_REGISTERS:FINISH_WARPS ...]

Logits are Gaussian: standard deviation 3, where top-p 0.9 keeps 4% of the vocabulary, or 1 ("flat"), where it keeps
60%. Up to 64 rows the logits stay in the L2 cache between replays, as they do after an lm_head. ``read`` is the time
to read the logits once at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from specserve_kernels.ops.sampling import sampling as ops

VOCAB, DRAFT_VOCAB, PATH = 128256, 32000, 8
ROWS = (1, 16, 64, 512)
FEATURES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1},
    "top_p": {"temperature": 1, "top_p": 0.9},
    "top_p flat": {"temperature": 1, "top_p": 0.9},
    "top_k+top_p": {"temperature": 1, "top_k": 50, "top_p": 0.9},
    "penalties": {"repetition": 1.1, "frequency": 0.5},
}


def make_table(rows: int, settings: dict[str, float]) -> Any:
    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(rows, *shape, dtype=torch.int64, device="cuda")

    def floats(value: float, *shape: int) -> torch.Tensor:
        return torch.full((rows, *shape), float(value), device="cuda")

    return SimpleNamespace(
        temperature=floats(settings.get("temperature", 0)),
        top_k=integers() + int(settings.get("top_k", 0)),
        top_p=floats(settings.get("top_p", 1)),
        min_p=floats(0),
        repetition=floats(settings.get("repetition", 1)),
        frequency=floats(settings.get("frequency", 0)),
        presence=floats(0),
        seed=integers() + 7,
        choice=integers(),
        bias_ids=integers(512) + VOCAB,
        bias_values=floats(0, 512),
        bias_until=integers(512),
        bias_count=integers(),
        counts=torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda"),
        in_prompt=torch.zeros(rows, VOCAB, dtype=torch.bool, device="cuda"),
    )


def microseconds(call: Callable[[], object], calls: int = 10) -> float:
    """Median over replays of a graph of ``calls`` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def batch_of(rows: int, vocab: int, name: str) -> tuple[Any, ...]:
    spread = 1 if name.endswith("flat") else 3
    logits = (torch.randn(rows, vocab, device="cuda") * spread).bfloat16()
    index = torch.arange(rows, device="cuda")
    path = torch.full((rows, PATH), VOCAB, device="cuda")
    return logits, index, index + 100, path, make_table(rows, FEATURES[name])


def report(rows_of: tuple[int, ...]) -> None:
    print(f"{'choose':24s}" + "".join(f"{rows:>9d}" for rows in rows_of))
    print(f"{'read':24s}" + "".join(f"{rows * VOCAB * 2 / 4.2e6:9.1f}" for rows in rows_of))
    for name in FEATURES:
        times = []
        for rows in rows_of:
            given = batch_of(rows, VOCAB, name)
            times.append(microseconds(lambda given=given: ops.choose_tokens(*given)))  # type: ignore[misc]
        print(f"{name:24s}" + "".join(f"{time:9.1f}" for time in times), flush=True)


def report_draft(rows_of: tuple[int, ...]) -> None:
    ids = torch.randperm(VOCAB, device="cuda")[:DRAFT_VOCAB].sort().values
    inverse = torch.full((VOCAB + 1,), DRAFT_VOCAB, device="cuda")
    inverse[ids] = torch.arange(DRAFT_VOCAB, device="cuda")
    for name in ("greedy", "temperature", "top_p"):
        for branching in (1, 4, 8):
            times = []
            for rows in rows_of:
                given = (*batch_of(rows, DRAFT_VOCAB, name), branching, ids, inverse)
                times.append(microseconds(lambda given=given: ops.draft_candidates(*given)))  # type: ignore[misc]
            label = f"draft {name} C={branching}"
            print(f"{label:24s}" + "".join(f"{time:9.1f}" for time in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", nargs="*", default=[])
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--no-draft", action="store_true")
    args = parser.parse_args()
    for config in args.configs or [""]:
        if config:
            numbers = [int(number) for number in config.split(":")]
            ops.BLOCK, ops.SCAN_WARPS, ops.SCAN_REGISTERS, ops.FINISH_WARPS = numbers
            ops.SCAN_REGISTERS = numbers[2] or None
        print(
            f"block {ops.BLOCK}, warps {ops.SCAN_WARPS} and {ops.FINISH_WARPS}, registers {ops.SCAN_REGISTERS}"
        )
        report(tuple(args.rows))
        if not args.no_draft:
            report_draft(tuple(args.rows))


if __name__ == "__main__":
    main()

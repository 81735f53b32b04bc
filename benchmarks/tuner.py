"""The tuner against exhaustive search, on code and on dialogues: how close its pick comes to the best shape.

    python -m benchmarks.tuner --model DIR/target --eagle3 DIR/eagle3 [--minutes 2] [--exhaustive-minutes 6]
        [--batches 1 16] [--workloads code]

Both run as separate commands, one after the other, over the same shapes. A pick is judged by the exhaustive search's
measurement of it: its tokens per second relative to plain decoding in the same lap, against the best of all shapes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import yaml

from benchmarks.common import load_prompts
from benchmarks.results import options, write_results
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.config.speculation import SHAPE

WORKLOADS = {"code": "prompt", "dialogue": "messages"}
"""By the field that their prompts have."""
GRID = {"steps": (1, 3, 5, 7), "topk": (1, 4, 8), "draft_tokens": (8, 16, 32)}
GOAL = 0.98
Picked = tuple[int, ...] | None


def tune(flags: Sequence[str], directory: Path, name: str) -> tuple[list[dict[str, Any]], Picked, float]:
    """What it measured at each batch size, its pick for all of them, and seconds from the command to its end."""
    report, output = directory / f"{name}.json", directory / f"{name}.yaml"
    begin = time.perf_counter()
    command = [sys.executable, "-m", "specserve.tune", *flags, "--output", str(output), "--json", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = yaml.safe_load(output.read_text())
    picked = tuple(settings[key] for key in SHAPE) if SHAPE[0] in settings else None
    return json.loads(report.read_text())["batches"], picked, time.perf_counter() - begin


def ratios_by_shape(batch: dict[str, Any]) -> dict[Picked, float]:
    """Time plain decoding, by shape."""
    return {shape_of(row["shape"]): row["ratio_to_plain"] for row in batch["shapes"]}


def shape_of(shape: Sequence[int] | None) -> Picked:
    return None if shape is None else tuple(shape)


def compare(
    flags: Sequence[str], minutes: float, exhaustive_minutes: float, directory: Path
) -> dict[str, Any]:
    """One workload: picks, best shapes, and what share of these the picks reach."""
    tuned, overall, seconds = tune([*flags, "--minutes", str(minutes)], directory, "tuned")
    thorough = [*flags, "--minutes", str(exhaustive_minutes), "--exhaustive"]
    all_, best_overall, _ = tune(thorough, directory, "exhaustive")
    rows, shares = [], []
    for ours, theirs in zip(tuned, all_, strict=True):
        ratios, pick = ratios_by_shape(theirs), shape_of(ours["best"])
        best = max(ratios, key=lambda shape: ratios[shape])
        shares.append(ratios[overall] / ratios[best_overall])
        rows.append(
            {
                "batch": ours["batch"],
                "pick": pick,
                "best": best,
                "share": ratios[pick] / ratios[best],
                "ratios": {
                    "off" if shape is None else ",".join(map(str, shape)): r for shape, r in ratios.items()
                },
            }
        )
    share = geometric_mean(shares)
    return {"seconds": seconds, "pick": overall, "best": best_overall, "share": share, "batches": rows}


def tuner_lines(name: str, figures: dict[str, Any]) -> list[str]:
    rows = [("all", figures), *((f"batch {row['batch']}", row) for row in figures["batches"])]
    return [f"{name}, tuner's whole command {figures['seconds']:.0f} s"] + [
        f"  {what:10} pick {row['pick']!s:12} best {row['best']!s:12} share {row['share']:.3f}, goal {GOAL}"
        for what, row in rows
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--eagle3", default=str(BUNDLED_DRAFTS["EAGLE3"]))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--exhaustive-minutes", type=float, help="not set: as --minutes")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    for name, values in GRID.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", type=int, default=list(values))
    args = parser.parse_args()
    figures = {}
    for name in args.workloads:
        field = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as place:
            prompts = Path(place) / "prompts.jsonl"
            prompts.write_text("".join(json.dumps(row) + "\n" for row in load_prompts() if field in row))
            flags = ["--model-path", args.model, "--speculative-algorithm", "EAGLE3"]
            flags += ["--speculative-draft-model-path", args.eagle3, "--prompts", str(prompts)]
            flags += ["--max-running-requests", str(max(args.batches))]
            for option, values in {
                "batch_sizes": args.batches,
                **{name: getattr(args, name) for name in GRID},
            }.items():
                flags += [f"--{option.replace('_', '-')}", *map(str, values)]
            figures[name] = compare(flags, args.minutes, args.exhaustive_minutes or args.minutes, Path(place))
        print("\n".join(tuner_lines(name, figures[name])), flush=True)
        written = write_results("tuner", figures, args.output)
    print(written)


if __name__ == "__main__":
    main()

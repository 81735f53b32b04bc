"""All GPU benchmarks in one process, which loads the target once.

    python -m benchmarks.suite --pair DIR [--only steps tokens throughput prefill traces] [--results benchmarks/results]
    python -m benchmarks.suite --pair DIR --only steps --quantization int4 fp8 [--shapes off 7,1,8] [--repeats 2]

DIR is the output of ``python -m benchmarks.cost_faithful --random``. ``steps``, ``prefill`` and ``traces`` run on the
random weights, as the peers were measured: no draft is accepted, and batches stay full to the end. ``tokens`` are the
cases of ``steps`` with the trained pair, as are ``throughput`` and ``useless`` (steps again). ``adaptive``, with the
trained draft and with the useless one, ``changing_load``, ``long_context`` and ``mixed_batch`` measure the controller.
``dynamic_map`` has an eighth of the ids that the pair uses. ``kernels`` records the output of each script of
``kernels/bench``. With ``--quantization`` weights of the target are rounded at load, and ``steps`` are measured of each
kind. Other arguments go to every benchmark that runs. One that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import benchmarks.adaptive
import benchmarks.changing_load
import benchmarks.dynamic_map
import benchmarks.long_context
import benchmarks.mixed_batch
import benchmarks.prefill
import benchmarks.single_stream
import benchmarks.step_trace
import benchmarks.throughput
import benchmarks.tuner
import benchmarks.waterfall
from benchmarks.common import result_name, weights_kept, write_results
from benchmarks.cost_faithful import RANDOM, USELESS
from specserve.config.settings import ROUNDED

IMAGES = Path("docs/images")


def commands(
    pair: Path, results: Path, quantizations: Sequence[str] = ("none",)
) -> dict[str, list[tuple[Callable[[], None], list[str]]]]:
    """What each name runs: a benchmark's ``main`` and its arguments."""
    target = ["--model", str(pair / "target")]
    trained = [*target, "--eagle3", str(pair / "eagle3")]
    useless = [*target, "--eagle3", str(pair / USELESS)]
    random_target = ["--model", str(pair / RANDOM / "target"), "--prompts", "random"]
    random = [*random_target, "--eagle3", str(pair / RANDOM / "eagle3")]

    def into(name: str) -> list[str]:
        return ["--output", str(results / f"{name}.json")]

    steps, throughput = benchmarks.single_stream.main, benchmarks.throughput.main
    prefill, trace = benchmarks.prefill.main, benchmarks.step_trace.main
    adaptive, load = benchmarks.adaptive.main, benchmarks.changing_load.main
    traces = [("off", 1), ("off", 32), ("3,1,4", 1), ("3,1,4", 32), ("5,8,32", 1)]
    return {
        "steps": [
            (steps, [*random, "--quantization", kind, *into(result_name("single_stream", kind))])
            for kind in quantizations
        ],
        "useless": [(steps, [*useless, *into("single_stream_useless")])],
        "tokens": [(steps, [*trained, "--repeats", "1", *into("single_stream_trained")])],
        "throughput": [
            (
                throughput,
                [*trained, "--repeats", "1", "--plot", str(IMAGES / "throughput.png"), *into("throughput")],
            )
        ],
        "prefill": [
            *(
                (prefill, [*random_target, "--quantization", kind, *into(result_name("prefill", kind))])
                for kind in quantizations
            ),
            (prefill, [*random, "--shape", "3,1,4", *into("prefill_eagle3")]),
        ],
        "adaptive": [
            (adaptive, [*trained, *into("adaptive_h200")]),
            (adaptive, [*useless, *into("adaptive_useless_h200")]),
        ],
        "changing_load": [
            (load, [*trained, "--plot", str(IMAGES / "changing_load.png"), *into("changing_load")])
        ],
        "long_context": [(benchmarks.long_context.main, [*trained, *into("long_context")])],
        "dynamic_map": [
            (
                benchmarks.dynamic_map.main,
                [*target, "--draft", str(pair / "eagle"), "--size", "512", *into("dynamic_map_h200")],
            )
        ],
        "tuner": [(benchmarks.tuner.main, [*trained, *into("tuner")])],
        "waterfall": [
            (
                benchmarks.waterfall.main,
                [*random, "--picture", str(IMAGES / "waterfall.png"), *into("waterfall")],
            )
        ],
        "mixed_batch": [(benchmarks.mixed_batch.main, [*trained, *into("mixed_batch")])],
        "traces": [
            (
                trace,
                [
                    *random,
                    "--shape",
                    shape,
                    "--batch",
                    str(batch),
                    "--picture",
                    str(IMAGES / f"{name}.png"),
                    *into(name),
                ],
            )
            for shape, batch in traces
            for name in [f"step_trace_{shape.replace(',', '_')}_b{batch}"]
        ],
    }


def kernel_tables(results: Path) -> None:
    """The tables that the kernels' own benchmarks print, as lines."""
    tables = {}
    for script in sorted(Path("kernels/bench").glob("*.py")):
        run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        print(f"\n{script}\n{run.stdout}{run.stderr[-500:] if run.returncode else ''}", flush=True)
        tables[script.name] = run.stdout.splitlines()
    print(write_results("kernels", tables, results / "kernels.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*commands(Path(), Path()), "kernels"]
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quantization", nargs="+", choices=("none", *ROUNDED), default=["none"])
    args, rest = parser.parse_known_args()
    if set(args.quantization) != {"none"} and args.only != ["steps"]:
        parser.error("--quantization needs --only steps")
    if "--output" in rest:
        parser.error("--output: results have files of their own, in --results")
    failed = []
    with weights_kept():
        for name in args.only:
            if name == "kernels":
                kernel_tables(args.results)
                continue
            for run, arguments in commands(args.pair, args.results, args.quantization)[name]:
                line = [run.__module__, *arguments, *rest]
                print("\n" + " ".join(line), flush=True)
                try:
                    with patch.object(sys, "argv", line):
                        run()
                except (Exception, SystemExit):
                    traceback.print_exc()
                    failed.append(" ".join(line))
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()

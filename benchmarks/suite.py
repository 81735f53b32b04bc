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

import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from benchmarks.common import weights_kept
from benchmarks.cost_faithful import RANDOM, USELESS
from benchmarks.results import options, result_name, write_results
from specserve.config.settings import ROUNDED

IMAGES = Path("docs/images")
TRACES = (("off", 1), ("off", 32), ("3,1,4", 1), ("3,1,4", 32))


def commands(
    pair: Path, results: Path, quantizations: Sequence[str] = ("none",)
) -> dict[str, list[tuple[str, list[str]]]]:
    """What each name runs: a benchmark and its arguments."""
    target = ["--model", str(pair / "target")]
    trained, useless = ([*target, "--eagle3", str(pair / draft)] for draft in ("eagle3", USELESS))
    random_target = ["--model", str(pair / RANDOM / "target"), "--prompts", "random"]
    random = [*random_target, "--eagle3", str(pair / RANDOM / "eagle3")]

    def run(benchmark: str, given: list[str], name: str, picture: str = "") -> tuple[str, list[str]]:
        drawn = [picture, str(IMAGES / f"{name}.png")] if picture else []
        return benchmark, [*given, *drawn, "--output", str(results / f"{name}.json")]

    single, prefill, load = "steps single_stream", "steps prefill", "changing_load"
    return {
        "steps": [
            run(single, [*random, "--quantization", each], result_name("single_stream", each))
            for each in quantizations
        ],
        "useless": [run(single, useless, "single_stream_useless")],
        "tokens": [run(single, [*trained, "--repeats", "1"], "single_stream_trained")],
        "throughput": [run("steps throughput", [*trained, "--repeats", "1"], "throughput", "--plot")],
        "prefill": [
            *(
                run(prefill, [*random_target, "--quantization", each], result_name("prefill", each))
                for each in quantizations
            ),
            run(prefill, [*random, "--shape", "3,1,4"], "prefill_eagle3"),
        ],
        "adaptive": [
            run("adaptive", trained, "adaptive_h200"),
            run("adaptive", useless, "adaptive_useless_h200"),
        ],
        "changing_load": [run(load, trained, "changing_load", "--plot")],
        "long_context": [run(f"{load} long_context", trained, "long_context")],
        "mixed_batch": [run(f"{load} mixed_batch", trained, "mixed_batch")],
        "dynamic_map": [
            run(
                "dynamic_map",
                [*target, "--draft", str(pair / "eagle"), "--size", "512"],
                "dynamic_map_h200",
            )
        ],
        "tuner": [run("adaptive tuner", trained, "tuner")],
        "waterfall": [run("trace waterfall", random, "waterfall", "--picture")],
        "traces": [
            run(
                "trace",
                [*random, "--shape", shape, "--batch", str(batch)],
                f"step_trace_{shape.replace(',', '_')}_b{batch}",
                "--picture",
            )
            for shape, batch in TRACES
        ],
    }


def run_benchmark(name: str, arguments: Sequence[str]) -> None:
    """As its command does, in this process."""
    module, _, command = name.partition(" ")
    with patch.object(sys, "argv", [f"benchmarks.{name}", *arguments]):
        getattr(import_module(f"benchmarks.{module}"), command or "main")()


def kernel_tables(results: Path) -> None:
    """The tables that the kernels' own benchmarks print, as lines."""
    tables = {}
    for script in sorted(Path("kernels/bench").glob("*.py")):
        run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        print(f"\n{script}\n{run.stdout}{run.stderr[-500:] if run.returncode else ''}", flush=True)
        tables[script.name] = run.stdout.splitlines()
    print(write_results("kernels", tables, results / "kernels.json"))


def main() -> None:
    parser = options(__doc__, output=False)
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
            for benchmark, arguments in commands(args.pair, args.results, args.quantization)[name]:
                line = " ".join([f"benchmarks.{benchmark}", *arguments, *rest])
                print(f"\n{line}", flush=True)
                try:
                    run_benchmark(benchmark, [*arguments, *rest])
                except (Exception, SystemExit):
                    traceback.print_exc()
                    failed.append(line)
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()

"""All GPU benchmarks in one process, which loads the target once.

    python -m benchmarks.suite --pair DIR [--only steps prefill traces] [--results benchmarks/results]
    python -m benchmarks.suite --pair DIR --only steps --quantization int4 fp8 [--shapes off 7,1,8] [--repeats 2]

DIR is the output of ``python -m benchmarks.cost_faithful --random``. ``steps``, ``prefill``, ``traces`` and
``waterfall`` run on the random weights, as the peers were measured: no draft is accepted, and batches stay full to the
end. ``adaptive``, ``changing_load``, ``long_context`` and ``mixed_batch`` measure the controller. ``dynamic_map`` has
an eighth of the ids that the pair uses. With ``--quantization`` weights of the target are rounded at load, and
``steps`` are measured of each kind. Other arguments go to every benchmark that runs. One that fails does not stop the
others.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from benchmarks.common import weights_kept
from benchmarks.cost_faithful import RANDOM
from benchmarks.results import options, result_name
from specserve.config.settings import ROUNDED

IMAGES = Path("docs/images")
TRACES = (("off", 1), ("off", 32), ("3,1,4", 1), ("3,1,4", 32))
Command = tuple[str, list[str]]
"""A benchmark and its arguments."""


def commands(pair: Path, results: Path, quantizations: Sequence[str] = ("none",)) -> dict[str, list[Command]]:
    """What each name runs."""
    target = ["--model", str(pair / "target")]
    trained = [*target, "--eagle3", str(pair / "eagle3")]
    random_target = ["--model", str(pair / RANDOM / "target"), "--prompts", "random"]
    random = [*random_target, "--eagle3", str(pair / RANDOM / "eagle3")]
    map_of = [*target, "--draft", str(pair / "eagle"), "--size", "512"]

    def run(benchmark: str, arguments: list[str], name: str, picture: str = "") -> Command:
        drawn = [picture, str(IMAGES / f"{name}.png")] if picture else []
        return benchmark, [*arguments, *drawn, "--output", str(results / f"{name}.json")]

    def rounded(benchmark: str, arguments: list[str]) -> list[Command]:
        name = benchmark.split()[-1]
        return [
            run(benchmark, [*arguments, "--quantization", q], result_name(name, q)) for q in quantizations
        ]

    def trace(shape: str, batch: int) -> Command:
        name = f"step_trace_{shape.replace(',', '_')}_b{batch}"
        return run("trace", [*random, "--shape", shape, "--batch", str(batch)], name, "--picture")

    return {
        "steps": rounded("steps single_stream", random),
        "prefill": rounded("steps prefill", random_target),
        "adaptive": [run("adaptive", trained, "adaptive_h200")],
        "changing_load": [run("changing_load", trained, "changing_load")],
        "long_context": [run("adaptive long_context", trained, "long_context")],
        "mixed_batch": [run("changing_load mixed_batch", trained, "mixed_batch")],
        "dynamic_map": [run("dynamic_map", map_of, "dynamic_map_h200")],
        "tuner": [run("tuner", trained, "tuner_h200")],
        "waterfall": [run("trace waterfall", random, "waterfall", "--picture")],
        "traces": [trace(*each) for each in TRACES],
    }


def run_benchmark(name: str, arguments: Sequence[str]) -> None:
    """As its command does, in this process."""
    module, _, command = name.partition(" ")
    with patch.object(sys, "argv", [f"benchmarks.{name}", *arguments]):
        getattr(import_module(f"benchmarks.{module}"), command or "main")()


def main() -> None:
    parser = options(__doc__, output=False)
    names = list(commands(Path(), Path()))
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

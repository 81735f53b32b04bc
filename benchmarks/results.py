"""What benchmarks share: the command line, statistics, and results as JSON with hardware, commit and command.

Imports only the standard library, and torch when a result is written.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
Figures = dict[str, Any]


def options(description: str | None, output: bool = True) -> argparse.ArgumentParser:
    """A parser that shows ``description`` as it is written; with ``--output`` unless the benchmark only prints."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(description or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output:
        parser.add_argument("--output", type=Path, help="not set: benchmarks/results/NAME.json")
    return parser


def run_command(default: Callable[[], object] | None, *others: Callable[[], object]) -> None:
    """Run the benchmark that the first argument names, or else the ``default`` of the module, and exit with what it
    returns."""
    named = {each.__name__: each for each in others}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in named:
        sys.argv = [f"{_main_module()} {name}", *sys.argv[2:]]
        raise SystemExit(named[name]())
    if default is None:
        parser = argparse.ArgumentParser(prog=f"python -m {_main_module()}")
        parser.add_argument("benchmark", choices=named)
        parser.parse_args()
    else:
        raise SystemExit(default())


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


ENOUGH = 300


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum; 0 without values. Few values have no 99th percentile, and get their 95th."""
    values = values or [0.0]
    last = 99 if len(values) >= ENOUGH else 95
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, last)}
    return {"mean": fmean(values), **percentiles, "max": max(values)}


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95% confidence interval of the mean, as a share of it; None of fewer than two values."""
    if len(values) < 2:
        return None
    t = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
    return t * stdev(values) / math.sqrt(len(values)) / fmean(values)


def ratios(first: Sequence[float], other: Sequence[float]) -> list[float]:
    """Of values that were measured in pairs; the last may be missing."""
    return [b / a for a, b in zip(first, other, strict=False)]


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over rows that all have it."""
    return {name: median(row[name] for row in rows) for name in rows[0]}


def line(row: Mapping[str, Any]) -> str:
    """The figures of a row by name; tables in it are left out."""
    plain = {name: value for name, value in row.items() if not isinstance(value, Mapping | list)}
    return "  ".join(f"{name} {_short(value)}" for name, value in plain.items() if value is not None)


def show(figures: Mapping[str, Any], indent: str = "") -> None:
    """Print figures by name; tables of them below each other, the tables in these indented."""
    for name, value in figures.items():
        print(f"{indent}{name:24} {line(value) if isinstance(value, Mapping) else _short(value)}", flush=True)
        if isinstance(value, Mapping):
            show({key: each for key, each in value.items() if isinstance(each, Mapping)}, indent + "  ")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def keep_rows(
    name: str,
    rows: Iterable[Figures],
    output: Path | None,
    text: Callable[[Figures], str] = line,
) -> list[Figures]:
    """Print each row, and write all so far, as it comes: a run that is cut keeps its rows."""
    kept: list[Figures] = []
    path = None
    for row in rows:
        kept.append(row)
        print(text(row), flush=True)
        path = write_results(name, kept, output)
    print(path)
    return kept


def hardware() -> str:
    """The processor or GPU that the figures were measured on."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def result_name(benchmark: str, quantization: str) -> str:
    """Return the name of its result file with these weights."""
    return benchmark if quantization == "none" else f"{benchmark}_{quantization}"


def write_results(name: str, figures: Any, output: Path | None = None) -> Path:
    """Write ``benchmarks/results/NAME.json``; the commit is marked when the tree had changes."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "command": "python -m " + " ".join([_main_module(), *sys.argv[1:]]),
        "commit": commit,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "figures": figures,
    }
    path = output or ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _main_module() -> str:
    if sys.argv[0].startswith("benchmarks."):
        return sys.argv[0]  # run by another
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem

"""The tuner's own options, checked, and what they ask of the server's settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from specserve.config import Settings, resolve
from specserve.config.speculation import SHAPE, check_pool
from specserve.methods import names_where
from specserve.models.config import ModelConfig
from specserve.tools.tune.grid import DRAFT_TOKENS, STEPS, TOPK, Candidate, Grid

PROGRAM = "python -m specserve.tune"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    prompts: Path | None
    batch_sizes: tuple[int, ...]
    max_tokens: int
    temperature: float
    minutes: float
    exhaustive: bool
    grid: Grid
    output: Path
    plot: Path | None
    json: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parser() -> argparse.ArgumentParser:
    """Knows the tuner's options alone; what is left are the server's."""
    found = _Parser(
        prog=PROGRAM,
        add_help=False,
        allow_abbrev=False,
        description="Finds the speculation shape that gives most tokens a second, and writes it as a configuration.",
    )
    add = found.add_argument
    add("--prompts", type=Path, metavar="FILE", help="JSON lines of messages or prompt, like your traffic.")
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="Default: 1 4 16.")
    add("--max-tokens", type=int, default=128, metavar="N", help="Longest answer (default: 128).")
    add("--temperature", type=float, default=0.0, metavar="T", help="Of all requests (default: 0).")
    add("--minutes", type=float, default=5.0, metavar="M", help="To measure for, after loading (default: 5).")
    add("--exhaustive", action="store_true", help="Run every shape; takes longer than --minutes if it must.")
    add(
        "--steps",
        type=int,
        nargs="+",
        default=STEPS,
        metavar="S",
        help="Draft levels to try (default: 1 to 8).",
    )
    add(
        "--topk", type=int, nargs="+", default=TOPK, metavar="K", help="Candidates a node (default: 1 2 4 8)."
    )
    add(
        "--draft-tokens",
        type=int,
        nargs="+",
        default=DRAFT_TOKENS,
        metavar="T",
        help="Nodes of a tree, its root included (default: 4 8 16 32 64). A chain has steps + 1.",
    )
    add("--output", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="Default: tuned.yaml.")
    add("--json", type=Path, metavar="FILE", help="Write all measurements there.")
    add("--plot", type=Path, metavar="FILE.png", help="Draw them; needs matplotlib.")
    return found


def read_options(found: argparse.Namespace) -> Options:
    """Raises ValueError naming the flag and the accepted values."""
    for flag, low, high in (
        ("batch_sizes", 1, 4096),
        ("steps", 1, 63),
        ("topk", 1, 64),
        ("draft_tokens", 2, 64),
    ):
        for value in getattr(found, flag):
            _check_range(flag, value, low, high)
    _check_range("max_tokens", found.max_tokens, 2, 1 << 20)
    _check_range("temperature", found.temperature, 0, 100)
    if not 0 < found.minutes <= 10_000:
        raise ValueError(f"--minutes: must be above 0 and at most 10000, found {found.minutes:g}")
    for flag in ("output", "json", "plot"):
        path = getattr(found, flag)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{flag}: {path.parent} is not a directory")
    return Options(
        prompts=found.prompts,
        batch_sizes=tuple(sorted(set(found.batch_sizes))),
        max_tokens=found.max_tokens,
        temperature=found.temperature,
        minutes=found.minutes,
        exhaustive=found.exhaustive,
        grid=Grid(found.steps, found.topk, found.draft_tokens),
        output=found.output,
        plot=found.plot,
        json=found.json,
    )


def check_settings(given: Settings) -> None:
    """Raises ValueError for what can't be tuned."""
    if given.method is None or given.method.fixed_shape is not None:
        why = "drafts nothing" if given.method is None else "has one shape"
        raise ValueError(
            f"--speculative-algorithm: {given.speculative_algorithm} {why}, there is nothing to tune; "
            f"accepted are {', '.join(names_where(lambda method: method.fixed_shape is None))}"
        )
    if given.speculative_adaptive:
        raise ValueError("--speculative-adaptive: the tuner compares fixed shapes, leave it out")
    if given.skip_tokenizer_init:
        raise ValueError("--skip-tokenizer-init: prompts are text, the tuner needs the tokenizer")


def with_room(given: Settings, model: ModelConfig, largest: int) -> Settings:
    """A copy that runs batches of ``largest``. Raises ValueError where the user said otherwise."""
    running = resolve(given, model)[0].max_running_requests
    assert running is not None
    if largest <= running:
        return given
    if given.max_running_requests is not None:
        raise ValueError(f"--batch-sizes: at most --max-running-requests {running}, found {largest}")
    return replace(given, max_running_requests=largest)


def candidates(given: Settings, model: ModelConfig, grid: Grid) -> list[Candidate]:
    """The grid's, and the shape that the settings have, if they have one. Raises ValueError for one that can't be
    served."""
    found = grid.candidates()
    resolved = resolve(given, model)[0]
    if getattr(given, SHAPE[0]) is not None:
        steps, topk, tokens = (getattr(resolved, name) for name in SHAPE)
        found.append((steps, topk, tokens))
    if len(found) == 1:
        raise ValueError(
            "--draft-tokens: no tree of these --steps and --topk has this many nodes; accepted are steps + 2 to the "
            "candidates that such a tree drafts and its root"
        )
    for candidate in found:
        if candidate is not None:
            check_pool("--steps", *candidate[:2])
    return list(dict.fromkeys(found))


def _check_range(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"--{flag.replace('_', '-')}: must be from {low} to {high}, found {value:g}")

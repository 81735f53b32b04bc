"""The tuner's own options, and their checks against the server's settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from specserve.config import Settings, resolve
from specserve.config.sources import FlagParser
from specserve.config.speculation import SHAPE, check_pool
from specserve.methods import names_like
from specserve.models.config import ModelConfig
from specserve.tools.files import check_output
from specserve.tools.tune.grid import DRAFT_TOKENS, STEPS, TOPK, Candidate, Grid

PROGRAM = "python -m specserve.tune"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tuner's options; other flags are the server's. Raises ValueError naming the option."""
    options = FlagParser(
        prog=PROGRAM,
        add_help=False,
        allow_abbrev=False,
        description="Finds the speculation shape with the most tokens per second and writes it as a configuration.",
    )

    def add(name: str, kind: Callable[[str], Any], default: Any, text: str, many: bool = False) -> None:
        metavar = "FILE" if kind is Path else "N"
        options.add_argument(
            name, type=kind, default=default, help=text, metavar=metavar, nargs="+" if many else None
        )

    add("--prompts", Path, None, "JSON lines of messages or prompt, similar to your traffic.")
    add(
        "--batch-sizes", _number(int, 1, 4096), [1, 4, 16], "Requests at a time (default: 1 4 16).", many=True
    )
    add(
        "--max-tokens", _number(int, 2, 1 << 20), 128, "Maximum number of tokens in an answer (default: 128)."
    )
    add("--temperature", _number(float, 0, 100), 0.0, "Temperature of all requests (default: 0).")
    add("--minutes", _number(float, 0.01, 10_000), 5.0, "Time to measure, after loading (default: 5).")
    add("--steps", _number(int, 1, 63), STEPS, "Draft levels to try (default: 1 to 8).", many=True)
    add("--topk", _number(int, 1, 64), TOPK, "Candidates per node (default: 1 2 4 8).", many=True)
    text = "Nodes of a tree, its root included (default: 4 8 16 32 64). A chain has steps + 1."
    add("--draft-tokens", _number(int, 2, 64), DRAFT_TOKENS, text, many=True)
    add("--output", Path, Path("tuned.yaml"), "Default: tuned.yaml.")
    add("--json", Path, None, "Write all measurements there.")
    add("--plot", Path, None, "Draw them; needs matplotlib.")
    text = "Run every shape in three laps, even if that takes longer than --minutes."
    options.add_argument("--exhaustive", action="store_true", help=text)
    return options


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def read(given: str) -> float:
        value = kind(given)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, found {value:g}")
        return value

    read.__name__ = kind.__name__
    return read


def check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError for files that can't be written, or that are read or written for another option too."""
    others = {} if options.prompts is None else {"--prompts": [options.prompts]}
    for name in ("output", "json", "plot"):
        if (path := getattr(options, name)) is not None:
            check_output(f"--{name}", path, others)
            others[f"--{name}"] = [path]


def check_settings(given: Settings) -> None:
    """Raise ValueError for what can't be tuned."""
    if given.method is None or given.method.has_one_shape:
        why = "drafts nothing" if given.method is None else "has one shape"
        others = names_like(given.speculative_algorithm, lambda method: not method.has_one_shape)
        raise ValueError(
            f"--speculative-algorithm: {given.speculative_algorithm} {why}, so there is nothing to tune; "
            f"use one of {', '.join(others)}"
        )
    if given.speculative_adaptive:
        raise ValueError("--speculative-adaptive: the tuner compares fixed shapes; leave it out")
    if given.skip_tokenizer_init:
        raise ValueError("--skip-tokenizer-init: prompts are text, so the tuner needs the tokenizer")


def with_room(given: Settings, model: ModelConfig, largest: int) -> Settings:
    """Return a copy of the settings that can run batches of ``largest``. Raises ValueError if a limit forbids it."""
    running = resolve(given, model)[0].max_running_requests
    assert running is not None
    if largest <= running:
        return given
    if given.max_running_requests is not None:
        raise ValueError(f"--batch-sizes: at most --max-running-requests {running}, found {largest}")
    return replace(given, max_running_requests=largest)


def candidates(given: Settings, model: ModelConfig, grid: Grid) -> list[Candidate]:
    """Return the grid's candidates and the settings' own shape, if there is one. Raises ValueError for one that can't
    be served."""
    found = grid.candidates()
    resolved = resolve(given, model)[0]
    if getattr(given, SHAPE[0]) is not None:
        steps, topk, tokens = (getattr(resolved, name) for name in SHAPE)
        found.append((steps, topk, tokens))
    if len(found) == 1:
        raise ValueError(
            "--draft-tokens: no tree of these --steps and --topk has this many nodes; accepted are steps + 2 to the "
            "number of candidates that the tree drafts, plus its root"
        )
    for candidate in found:
        if candidate is not None:
            check_pool("--steps", *candidate[:2])
    return list(dict.fromkeys(found))

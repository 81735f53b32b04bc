"""``python -m specserve.check``: load what the server's flags name, and report on it.

Exit codes: 0 no problems, 1 problems, 2 it can't be loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specserve.config import Settings, load_settings, resolve_paths, unused
from specserve.config.notes import log_notes
from specserve.config.sources import own_options, raise_interrupts
from specserve.config.speculation import SHAPE
from specserve.engine.memory import DeviceMemory
from specserve.engine.shapes import cut
from specserve.frontend.tokenizer import Tokenizer
from specserve.logs import configure_logging
from specserve.process.assemble import resolve_engine
from specserve.process.worker import load_engine
from specserve.tools.check.measure import measure, read_prompts
from specserve.tools.check.memory import memory_needed
from specserve.tools.check.mismatches import find_mismatches
from specserve.tools.check.perplexity import FLAG, compare, read_tokens, score
from specserve.tools.check.report import CheckReport

log = logging.getLogger(__name__)

PROGRAM = "python -m specserve.check"
SIZE = "--device-memory"
MEASURED_SHAPE = (5, 4, 8)  # used when no shape is given, because acceptance by position needs a fixed one


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    raise_interrupts()
    options, flags = own_options(_parser(), argv)
    report = CheckReport()
    try:
        if options.max_tokens < 2:
            raise ValueError(
                f"--max-tokens: must be at least 2, found {options.max_tokens}: prefill gives the first one"
            )
        settings = load_settings(flags)
        configure_logging("warning")
        log_notes(log, unused(flags))
        _check(settings, options, report)
    except ValueError as error:
        report.error = str(error)
    except (RuntimeError, OSError, MemoryError) as error:  # torch's errors, including out of memory
        report.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
    except KeyboardInterrupt:
        return 130
    print(report.json() if options.json else report.text())
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, add_help=False, allow_abbrev=False, description=__doc__, usage=f"{PROGRAM} [--json] ..."
    )
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parser.add_argument("--no-run", action="store_true", help="Only load; do not measure acceptance.")
    parser.add_argument(
        SIZE,
        metavar="SIZE",
        help="Of a GPU, such as 80GiB: plan for GPUs of this size, without any and without loading.",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="Prompts to measure with, one per line.")
    parser.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="A text to score; with --quantization or an FP8 KV cache, also without them, to show the loss.",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="Tokens of each answer, from 2 (default: 64)."
    )
    return parser


def _check(given: Settings, options: argparse.Namespace, report: CheckReport) -> None:
    """Fill the report as far as possible. Raises ValueError for what can't be loaded."""
    prompts, there = read_prompts(options.prompts), _planned(given, options)
    if there is not None:
        given = replace(given, device="cuda")
    with _collected_logs(report.choices):
        settings, _, config = resolve_engine(
            _with_shape(replace(given, speculative_synthetic_acceptance=None)),
            True,
            True if there else None,
            there,
        )
        tokenizer = None
        if not settings.skip_tokenizer_init:
            tokenizer = Tokenizer.load(
                str(config.tokenizer_path), settings.trust_remote_code, settings.chat_template
            )
        find_mismatches(config, tokenizer, report, there)
        if there is not None:
            return
        text = None if options.perplexity is None else read_tokens(options.perplexity, tokenizer)
        if text is not None and config.tensor_parallel_size > 1:
            raise ValueError(f"{FLAG}: --tensor-parallel-size must be 1")
        engine = load_engine(config)
    try:
        loading = 0 if report.memory is None else report.memory.loading
        report.memory = replace(memory_needed(engine), loading=loading)
        if not options.no_run:
            measure(engine, config, tokenizer, prompts, options.max_tokens, report)
        if text is not None:
            report.perplexity = score(engine, config, text)
    finally:
        engine.close()
    del engine
    if text is not None and report.perplexity is not None:
        report.perplexity = compare(report.perplexity, config, given, text)


def _planned(given: Settings, options: argparse.Namespace) -> DeviceMemory | None:
    """Return the memory of the GPU to plan for, None: load. Raises ValueError naming the flag that does not fit."""
    if options.device_memory is None:
        return None
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|GB)", options.device_memory)) is None:
        raise ValueError(f"{SIZE}: must be a size such as 80GiB or 80GB, found {options.device_memory!r}")
    if given.device == "cpu":
        raise ValueError(f"{SIZE} is of a GPU: --device must be auto or cuda, found cpu")
    for flag, value in (("--prompts", options.prompts), (FLAG, options.perplexity)):
        if value is not None:
            raise ValueError(f"{SIZE} loads nothing, so {flag} can't be used")
    size = int(float(found[1]) * {"GiB": 2**30, "GB": 10**9}[found[2]])
    return DeviceMemory(size, size)


def _with_shape(given: Settings) -> Settings:
    method = given.method
    if (
        method is None
        or method.fixed_shape is not None
        or any(getattr(given, name) is not None for name in SHAPE)
    ):
        return given
    if method.looks_ahead:
        return replace(given, speculative_adaptive=False)
    settings, notes = resolve_paths(given)
    log_notes(log, notes)
    shape = cut(MEASURED_SHAPE, method.drafts(Path(settings.speculative_draft_model_path or "")))
    log.info("speculation of %s (steps, topk, tokens): the shape that acceptance is measured with", shape)
    return replace(settings, speculative_adaptive=False, **dict(zip(SHAPE, shape, strict=True)))  # type: ignore[arg-type]


@contextlib.contextmanager
def _collected_logs(said: list[str]) -> Iterator[None]:
    """Add the package's log messages, each once, to ``said``."""
    logger, handler = logging.getLogger("specserve"), logging.Handler()
    handler.addFilter(lambda record: record.getMessage() not in said)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


if __name__ == "__main__":
    sys.exit(main())

"""Milliseconds a step of every drafter at batches of 1, 16 and 64, next to plain decoding.

    python -m benchmarks.drafters --pair DIR [--only off DSPARK NGRAM] [--controller] [--quick]

DIR is the output of ``python -m benchmarks.cost_faithful --random``; what is missing of DIR/random is made, with drafts
of published sizes (``random_drafts.py``). 512 random tokens in, 256 out, greedy, ignoring end tokens. Shapes are fixed
and no draft is accepted, so batches stay full; what drafts gain is not measured here. At batch 1 the median of
``--repeats`` runs, else one run. The target is loaded once, and kernels are compiled before, on all cores.

``/ off``: to plain decoding of this batch. ``/ free``: to ``FREE``, the same step with drafts that cost nothing: seven
constants drafted and eight tokens verified. ``/ floor``, of ``STANDALONE`` on an H200: to reading at 4.23 TB/s the
target's weights once and the draft's once a level (quantized draft layers in 8 bits). ``--controller`` leaves the shape
to the controller, which has to find that drafts never help: ``/ off`` is then what it loses. A row is written as soon
as it is measured, so that a run that is cut keeps its rows.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.common import (
    SPARE_POSITIONS,
    parse_load,
    random_prompts,
    shape_settings,
    weights_kept,
    write_results,
)
from benchmarks.cost_faithful import RANDOM
from benchmarks.floors import READ_BYTES_PER_S, Shape, applies
from benchmarks.free import free_offered, none_accepted
from benchmarks.random_drafts import LLAMA_1B, make, read_bytes
from benchmarks.stepping import measure
from benchmarks.widen import SHAPES
from specserve import LLM
from specserve.engine.memory import return_memory
from specserve.models.checkpoint import DTYPES
from specserve.models.read_config import load_model_config

BATCHES = (1, 16, 64)
HEADER = (
    f"{'drafter':16} {'batch':>5} {'ms/step':>8} {'full':>6} {'/ off':>6} {'/ free':>6} {'/ floor':>7} {'tok/s':>7} "
    f"{'accepted':>8}"
)


class Case(NamedTuple):
    """``shape`` None: the method's own. ``draft``: its folder."""

    method: str
    shape: Shape | None = (7, 1, 8)
    draft: str | None = None
    quantization: str = "auto"
    batches: Sequence[int] = BATCHES


CASES = {
    "off": Case("NONE", None, batches=(1, 8, 16, 64)),  # 8: as many tokens as a chain of 7 at batch 1
    "FREE": Case("FREE"),
    "DSPARK": Case("DSPARK", draft="dspark"),
    "NGRAM": Case("NGRAM"),
    "STANDALONE": Case("STANDALONE", (4, 1, 5), "standalone"),
    "EAGLE3": Case("EAGLE3", draft="eagle3"),
    "MEDUSA": Case("MEDUSA", (5, 1, 6), "medusa"),
    "STANDALONE bf16": Case("STANDALONE", (4, 1, 5), "standalone", "none", (1,)),
    "EAGLE3+NGRAM": Case("EAGLE3+NGRAM", draft="eagle3"),
    "LOOKAHEAD": Case("LOOKAHEAD", None),
}


def settings_of(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"speculative_algorithm": case.method}
    if case.method != "NONE":
        given["speculative_adaptive"] = args.controller
    if case.shape is not None and not args.controller:
        given |= shape_settings(case.shape)
    if case.draft is not None:
        given["speculative_draft_model_path"] = str(args.pair / RANDOM / case.draft)
        given["speculative_draft_quantization"] = case.quantization
    largest = max(sizes_of(case, args))
    return given | {
        "model_path": args.model,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_running_requests": largest,
        "max_total_tokens": largest * (args.prompt_tokens + args.new_tokens + SPARE_POSITIONS),
    }


def sizes_of(case: Case, args: argparse.Namespace) -> list[int]:
    return [size for size in case.batches if size <= args.max_batch]


@contextmanager
def for_timing(sizes: Sequence[int]) -> Iterator[None]:
    """Steps of other batches are padded to these, so that few are captured, and no draft is accepted."""
    buckets = patch("specserve.process.assemble.batch_buckets", lambda _: tuple(sizes))
    with buckets, none_accepted(), free_offered():
        yield


def run_case(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    sizes = sizes_of(case, args)
    prompts = random_prompts(load_model_config(Path(args.model)).vocab_size, max(sizes), args.prompt_tokens)
    with for_timing(sizes), LLM(**settings_of(case, args)) as llm:
        for size in sizes:
            found = measure(llm, prompts[:size], args.new_tokens, args.repeats if size == 1 else 1)
            shape = "controller" if args.controller and case.method != "NONE" else case.shape
            yield {"drafter": name, "shape": shape, "batch": size, **found}


def compared(row: dict[str, Any], rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The row with its ratios to what was measured before it, and to its floor."""
    ms = {(each["drafter"], each["batch"]): each["ms_per_step"] for each in (*rows, row)}
    off, free = ms.get(("off", row["batch"])), ms.get(("FREE", row["batch"]))
    case, floor = CASES[row["drafter"]], None
    if case.draft == "standalone" and case.shape and row["batch"] == 1 and applies(args.model):
        # Int8 has a scale of 4 bytes for 128 numbers.
        item = 2.0 if case.quantization == "none" else 1 + 4 / 128
        draft = case.shape[0] * read_bytes(args.pair / RANDOM / case.draft, item)
        floor = (read_bytes(Path(args.model), 2) + draft) / READ_BYTES_PER_S * 1e3
    over = {"off": off, "free": free if case.shape == CASES["FREE"].shape else None, "floor": floor}
    ratios = {f"ratio_to_{name}": each and row["ms_per_step"] / each for name, each in over.items()}
    return {**row, "floor_ms": floor, **ratios}


def line(row: dict[str, Any]) -> str:
    off, free, floor = (row[f"ratio_to_{name}"] for name in ("off", "free", "floor"))
    ratios = " ".join(
        f"{'-' if each is None else f'{each:.3f}':>{width}}"
        for each, width in ((off, 6), (free, 6), (floor, 7))
    )
    return (
        f"{row['drafter']:16} {row['batch']:5} {row['ms_per_step']:8.3f} {row['full_ms_per_step']:6.2f} {ratios} "
        f"{row['tokens_per_second']:7.0f} {row['accepted_length']:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of what is made")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--controller", action="store_true", help="instead of each case's shape")
    parser.add_argument("--max-batch", type=int, default=64, help="leave larger batches out")
    parser.add_argument("--quick", action="store_true", help="short prompts, small batches: does it run?")
    parser.add_argument("--output", type=Path, help="not set: benchmarks/results/drafters.json")
    args = parse_load(parser)
    begin = time.perf_counter()
    make(args.pair / RANDOM, SHAPES[args.shape], LLAMA_1B, DTYPES[args.dtype])
    return_memory()
    print(f"made the pair, {time.perf_counter() - begin:.0f} s", flush=True)
    args.model = str(args.pair / RANDOM / "target")
    print(HEADER)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with weights_kept():
        for name in args.only:
            try:
                for found in run_case(name, args):
                    rows.append(compared(found, rows, args) | {"at_seconds": time.perf_counter() - begin})
                    print(line(rows[-1]), flush=True)
                    write_results("drafters", rows, args.output)
            except Exception:  # the others are still worth their rows
                traceback.print_exc()
                failed.append(name)
            return_memory()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

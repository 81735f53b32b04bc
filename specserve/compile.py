"""Compile a server's kernels ahead of time: ``python -m specserve.compile``. Exit codes: 0 compiled, 2 a user's
mistake.

Fills Triton's cache (``TRITON_CACHE_DIR``), also for another machine's GPU. A server with the same flags, checkpoints
and version then starts without compiling.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from specserve.config import load_settings, unused
from specserve.config.notes import log_notes
from specserve.config.sources import FlagParser, exit_code, own_options
from specserve.logs import configure_logging

GPUS = {
    "a100": ((8, 0), 108, 166_912),
    "l4": ((8, 9), 58, 101_376),
    "l40s": ((8, 9), 142, 101_376),
    "rtx4090": ((8, 9), 128, 101_376),
    "h100-pcie": ((9, 0), 114, 232_448),
    "h100": ((9, 0), 132, 232_448),
    "h200": ((9, 0), 132, 232_448),
    "b200": ((10, 0), 148, 232_448),
}
"""Compute capability, multiprocessors, shared memory per program in bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = FlagParser(prog="python -m specserve.compile", allow_abbrev=False, add_help=False)
    parser.add_argument("--gpu", choices=GPUS, help="Which GPU to compile for. Default: this machine's.")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), metavar="N", help="Default: all cores."
    )
    return exit_code(lambda: _compile(*own_options(parser, argv)))


def _compile(own: argparse.Namespace, flags: Sequence[str]) -> None:
    if own.processes < 1:
        raise ValueError(f"--processes: must be at least 1, found {own.processes}")
    given = load_settings(flags)
    configure_logging("warning")
    log_notes(logging.getLogger(__name__), unused(flags))
    if given.device == "cpu":
        raise ValueError("--device cpu: nothing is compiled for a CPU")
    if find_spec("triton") is None:
        raise ValueError("Triton is not installed, which compiles the kernels: pip install triton (on Linux)")
    import torch
    from specserve_kernels.ops.device import Gpu, Limits, this_gpu

    from specserve.process.assemble import resolve_engine
    from specserve.process.compile import CompileJob, compile_all

    if not own.gpu and not torch.cuda.is_available():
        raise ValueError(f"--gpu: needed where torch finds none: one of {', '.join(GPUS)}")
    _, _, config = resolve_engine(replace(given, device="cuda"), has_gpu=True if own.gpu else None)
    if config.attention_backend != "triton":
        raise ValueError(
            f"--attention-backend {config.attention_backend}: only the triton backend's kernels can be compiled"
        )
    if own.gpu:
        capability, *limits = GPUS[own.gpu]
        gpu = Gpu(capability, Limits(*limits))
    else:
        gpu = this_gpu()
    begin = time.perf_counter()
    count = len(compile_all(CompileJob(config, gpu, own.processes)))
    print(f"{count} kernels for {own.gpu or 'this GPU'} in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    sys.exit(main())

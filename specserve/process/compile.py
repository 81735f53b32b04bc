"""Compile the kernels of a configuration before they are launched: on all cores, and without a GPU.

A dry run finds the variants. The engine is built of ``meta`` tensors, which have shapes but no data, and launches once
each step that will be captured, each prompt size, and eager prompts around the lengths where the choice of kernel
changes. Triton calls a hook before it compiles; the hook notes the variant and hands it to a process pool, which
compiles it into Triton's cache.

Triton's key covers a kernel's sources and the compiler's version, so a stale entry is never read. A list of the
variants is stored next to the cache, keyed by the configuration and all our sources; a start that finds it skips the
dry run.

Run as a module, it reads a pickled ``CompileJob`` from its parent process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import specserve_kernels
import torch
from torch import Tensor, nn

from specserve.config.engine import EngineConfig
from specserve.engine.kernels import WATCH, Variant, settle_keys
from specserve.engine.prompts import short_prefill, sizes_within
from specserve.layers.batch import LayerCall
from specserve.layers.decoder import DecoderLayer
from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES
from specserve.models.tensor_files import TensorFiles
from specserve.process.assemble import create_shapes, shape_plan
from specserve.speculation.context import Context, View
from specserve.speculation.prefill import PromptChunks, ScoredTokens, prefill
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs
from specserve.speculation.step import step

log = logging.getLogger(__name__)

PROMPT_TOKENS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 256, 257, 511, 512, 2048, 2049)
ROUTED_TOKENS = range(144, 1025, 16)  # also, where tokens choose experts
SCORED = (1, 16, 32, 64, 128)  # prompt tokens whose probabilities are asked for
_PACKAGES = (Path(__file__).parents[1], Path(specserve_kernels.__file__).parent)


class CompileJob(NamedTuple):
    """``gpu`` is a ``specserve_kernels.ops.device.Gpu``."""

    config: EngineConfig
    gpu: Any
    processes: int


class Driver:
    """Stands in for the driver of a GPU that may not exist, with all that Triton's compiler asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Launched:
    """Stands in for a compiled kernel and does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        """Return None: nothing is launched."""

    def run(self, *args: object) -> None:
        """Launch nothing."""


def _compile(variant: Variant) -> None:
    from triton.backends.nvidia import driver

    kernel = variant.load()
    if hasattr(driver, "make_launcher"):  # before Triton 3.7 each signature has a launcher in C
        # Without a GPU's driver, launchers are compiled at start.
        with contextlib.suppress(AssertionError, ImportError):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def compile_all(job: CompileJob) -> list[Variant]:
    """Compile all variants into Triton's cache and write their list next to it. Must run in a separate process."""
    from specserve_kernels.ops.device import assume
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(Driver(job.gpu.capability))
    assume(job.gpu)
    settle_keys()
    compiled: dict[Variant, Future[None]] = {}
    with ProcessPoolExecutor(job.processes, get_context("fork")) as pool:

        def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
            variant = Variant(fn.module, fn.name, key, compile["specialization_data"])
            compiled[variant] = pool.submit(_compile, variant)
            fn.jit_function.device_caches[0][0][key] = _Launched()  # so that it is noted only once
            return True

        pool.submit(int).result()  # fork the processes before there is state to share
        knobs.runtime.jit_cache_hook = note
        launch_all(job.config)
        knobs.runtime.jit_cache_hook = None
        for variant, future in compiled.items():
            if (error := future.exception()) is not None:
                raise RuntimeError(f"{variant.module}.{variant.kernel} does not compile") from error
    file = list_file(job)
    part = file.with_suffix(f".{os.getpid()}")  # other processes may read or write the same file
    part.write_text(json.dumps(list(compiled)))
    part.replace(file)
    return list(compiled)


@torch.inference_mode()
def launch_all(config: EngineConfig) -> None:
    """Launch each variant that a server with this configuration launches, on ``meta`` tensors."""
    context = create_shapes(config)
    leave_out_repeated(context.target)
    longest, routed = config.longest_launch, any(layer.experts for layer in config.model.layers)
    more = ROUTED_TOKENS if routed else ()
    for tokens in sorted({min(tokens, longest) for tokens in (*PROMPT_TOKENS, *more, longest)}):
        for start in (0, 1) if tokens in (*PROMPT_TOKENS, longest) else (0,):
            _prefill(context, start, tokens)
    for tokens in sorted({min(scored + 1, longest) for scored in SCORED}):
        scored = max(tokens - 1, 1)
        _prefill(context, 0, tokens, ScoredTokens(_integers(scored), _integers(scored), 1))
    prompts = min(config.max_running_requests, longest)
    for tokens in sorted({1, longest // prompts}):
        _prefill(context, 0, tokens, prompts=prompts)
    for launch, sizes in captured_launches(config, shape_plan(config).shapes(), context):
        for size in sizes:
            launch(size)


class _Repeated(DecoderLayer):
    """Stands in for ``layer``, whose launches are those of others."""

    def __init__(self, layer: DecoderLayer) -> None:
        nn.Module.__init__(self)
        self.rope = layer.rope

    def enter(self, *stream: Any) -> tuple[Any, Tensor]:
        return stream, stream[1]

    def forward(self, stream: Any, residual_TH: Tensor, call: LayerCall, *own: Tensor) -> Any:
        return stream


def leave_out_repeated(target: TargetModel) -> None:
    """Replace each layer that is as an earlier one, after one that is as the one before that: it launches nothing new.
    They take most of a dry run's time."""
    seen, before = set(), ""
    for number, layer in enumerate(target.layers[:-1]):
        assert isinstance(layer, DecoderLayer)
        tensors = [(name, each.shape, each.dtype) for name, each in layer.state_dict().items()]
        kind = repr((type(layer), replace(target.config.layers[number], index=None), tensors))
        if (before, kind) in seen:
            target.layers[number] = _Repeated(layer)
        seen.add((before, kind))
        before = kind


def captured_launches(
    config: EngineConfig, shapes: Sequence[StepShape], context: Context
) -> list[tuple[Callable[[Any], object], Sequence[Any]]]:
    """Return how to launch each kind that is captured on ``meta`` tensors, and its sizes, the largest last: steps of
    these shapes, ``catch_up``, and prompts."""
    shapes = sorted(shapes, key=lambda shape: (shape.nodes, shape.levels))
    capacity, drafter = context.state.slots.pages.shape[2] * config.page_size, context.drafter
    logits_XV = torch.empty(shapes[-1].nodes, context.vocab_size, dtype=DTYPES[config.dtype], device="meta")

    def view(slots: int, longest: int) -> View:
        return View.of(context, _integers(slots), longest, Needs(), logits_XV)

    slots = sorted({shape.slots for shape in shapes}) if drafter.needs.deferred else []
    prompts, dummy = sizes_within(config.context_length, config.chunked_prefill_size), context.state.dummy
    return [
        (lambda shape: step(context, view(shape.slots, capacity - shape.max_nodes), shape), shapes),
        (lambda slots: drafter.catch_up(context, view(slots, 0)), slots),
        (lambda size: short_prefill(context, size, _integers(len(size.pack([], dummy)))), prompts),
    ]


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Launch nothing in this context, which needs no GPU."""
    from specserve_kernels.ops.device import capability_of
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__
    if not torch.cuda.is_available():
        driver.set_active(Driver(capability_of(torch.device("meta"))))
    KernelInterface.__getitem__ = lambda *_: lambda *args, **options: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def _prefill(
    context: Context, start: int, tokens: int, scored: ScoredTokens | None = None, prompts: int = 1
) -> None:
    """Launch chunks of so many tokens each."""
    q_start, spans, total = _integers(prompts + 1), [(start, tokens)] * prompts, prompts * tokens
    chunks = PromptChunks(
        _integers(total), _integers(total), q_start, q_start[1:].bool(), tokens, spans, scored
    )
    prefill(context, View.of(context, _integers(prompts), start + tokens, Needs()), chunks)


def _integers(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="meta")


def list_file(job: CompileJob) -> Path:
    """Return the file that lists the variants of a configuration and of what its checkpoints' files decide."""
    from triton import __version__, knobs

    config, draft = job.config, job.config.draft
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted(package.rglob("*.py")):
            digest.update(file.read_bytes())
    drafts = [] if draft is None or draft.path == Path() else [draft.path]
    files = [path for draft_path in drafts for path in sorted(draft_path.iterdir()) if path.is_file()]
    parts = (
        __version__,
        job.gpu,
        config.model,
        (config.dtype, config.kv_cache_dtype, config.mamba_ssm_dtype, config.attention_backend),
        config.tensor_parallel_size,
        (config.context_length, config.page_size),
        (config.max_running_requests, config.longest_launch, config.largest_graph),
        (config.shape, config.adaptive),
        draft and replace(draft, path=Path()),
        [file.read_text() for file in files if file.name == "config.json"],
        [file.stat().st_size for file in files if file.name != "config.json"],
    )
    digest.update(repr(parts).encode())
    read = (config.model_path, *drafts) if config.model.random is None else ()
    for tensors in map(TensorFiles, read):
        digest.update(repr(sorted(tensors.dtypes().items())).encode())
        for name in sorted(name for name in tensors.names() if name.endswith("g_idx")):
            digest.update(tensors[name].numpy().tobytes())
    directory = Path(knobs.cache.dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"specserve-{digest.hexdigest()[:32]}.json"


def _start(job: CompileJob) -> subprocess.Popen[bytes]:
    """Start ``main`` for a job in a process that finds its modules where this one does. Raises OSError."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specserve.process.compile"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(job))
    process.stdin.close()
    return process


@dataclass(slots=True)
class CompileAhead:
    """Compiles in a separate process while this one loads weights. Nothing depends on its success: the remaining
    variants are compiled at their first launch."""

    file: Path
    process: subprocess.Popen[bytes] | None
    begun: float

    @classmethod
    def begin(cls, config: EngineConfig) -> CompileAhead:
        """Start for this process's GPU, and watch its Triton from now on."""
        from specserve_kernels.ops.device import this_gpu

        WATCH.install()
        WATCH.serving = False  # another engine of this process may have set it
        job = CompileJob(config, this_gpu(), max(1, config.cores - 1))
        file, process = list_file(job), None
        if not file.exists():
            try:
                process = _start(job)
            except OSError as error:  # the program may be no Python interpreter, but one that embeds it
                log.warning("kernels can't be compiled in advance: %s", error)
        return cls(file, process, time.perf_counter())

    def load(self) -> None:
        """Wait until everything is compiled, and load it, so that neither a capture nor a request waits for it."""
        if self.process is not None:
            assert self.process.stderr is not None
            with self.process.stderr as stderr:
                said = stderr.read().decode(errors="replace")
            if self.process.wait():
                log.warning("kernels could not be compiled in advance: %s", said.strip().rpartition("\n")[2])
            else:
                log.info(
                    "compiled kernels in advance, %.1f s after the start", time.perf_counter() - self.begun
                )
        WATCH.load(self._listed())

    def serve(self) -> None:
        """Count kernels that are loaded from now on. Log which were not compiled in advance."""
        if unforeseen := WATCH.have - {variant[:3] for variant in self._listed()}:
            log.info("not compiled in advance: %s", ", ".join(sorted(kernel for _, kernel, _ in unforeseen)))
        WATCH.serving = True

    def _listed(self) -> list[Variant]:
        if not self.file.exists():
            return []
        return [Variant(*each) for each in json.loads(self.file.read_text())]


def main() -> None:
    logging.disable()  # the parent process logs the same
    compile_all(pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    main()

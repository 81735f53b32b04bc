"""Compile all launches for an H200 on a machine without a GPU, without running them.

``python -m tests.compiled_launches TARGET EAGLE EAGLE3`` takes three checkpoints and writes one JSON object per line: a
``Compiled``. Triton must not be interpreted.

Triton sees a device of compute capability 9.0, and a launch compiles its kernel for the types and the alignment of its
real arguments, which are on the CPU: all variants go through Triton's front end, some through its passes for a GPU or
to LLVM's code, none through ptxas. Nothing is computed, so operations allocate zeros, which are valid indices, and
projections return them.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import specserve_kernels.dispatch
import torch
from specserve_kernels import HeadNorms, KVScales, Parts, Shared
from specserve_kernels.ops.attention.attention import Workspace, attend_frontier, attend_nodes
from specserve_kernels.ops.attention.latent import absorb_queries, multiply_heads, store_latents
from specserve_kernels.ops.attention.latent_nodes import attend_latents
from specserve_kernels.ops.attention.paths import list_paths
from specserve_kernels.ops.attention.prefill import attend_chunks
from specserve_kernels.ops.device import Gpu, Limits, assume
from specserve_kernels.ops.experts.experts import run_experts
from specserve_kernels.ops.experts.route import route
from specserve_kernels.ops.layer.activation import apply_gate, gate_rows
from specserve_kernels.ops.layer.embed_and_concat import pair_inputs_rounded
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded, gate_heads, rms_norm
from specserve_kernels.ops.layer.rotary import rotary_store_kv
from specserve_kernels.ops.linear.indexed import indexed_linear
from specserve_kernels.ops.linear.integer import integer_linear
from specserve_kernels.ops.linear.linear import linear_ahead, linear_few
from specserve_kernels.ops.linear.packed import gate_rounded, packed_linear
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.ops.linear.quantized import quantized_linear
from specserve_kernels.ops.linear.swap_ab import swap_ab_linear
from specserve_kernels.ops.ranks.exchange import join_parts, pick_rows, sum_parts
from specserve_kernels.ops.recurrent.delta_rule import TILE, delta_nodes, delta_prompts, fold_states
from specserve_kernels.ops.recurrent.inputs import cut_paths, delta_inputs, keep_last, trace_back
from specserve_kernels.reference.experts.experts import ExpertWeights
from specserve_kernels.reference.experts.route import Routing
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.packed import Numbers, Packed, pack
from specserve_kernels.reference.linear.quantize import FP8, PAIRED
from specserve_kernels.reference.recurrent.delta_rule import Lagged, Left, Runs
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options
from triton.language.semantic import TritonSemantic
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

import specserve.layers.linear
import specserve.speculation.sampler
from specserve.attention import ATTENTION
from specserve.core import SamplingParams
from specserve.engine.commands import Prefill, Row, Step
from specserve.engine.prompts import short_prefill, sizes_within
from specserve.engine.runner import Runner
from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, context_of, head_of, make_scheduler, multiply_integers

PLAIN = SamplingParams(temperature=0)
FORETOLD = SamplingParams(temperature=1, frequency_penalty=1, prediction=[1, 2, 3])


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel: the types of its tensors, its constants and options. ``shared``: bytes of shared memory
    per program, None if only its types were checked. ``waits``: its code waits for the previous launch before all its
    reads and writes; None if it does not wait or was not compiled. ``copied``: blocks that each of its loops of
    products prefetches. ``error``: why it did not compile. ``hasty``: what it reads before its wait although the
    previous launch wrote it. ``neighbours``: how many of the inputs that tensor cores add are adjacent in a thread,
    over all products; 2 if they are in order. ``running``: how many products of numbers in registers may still run when
    the next turn of their loop begins; None if not known."""

    kernel: str
    variant: str
    capability: int
    shared: int | None
    waits: bool | None
    copied: list[int]
    error: str | None
    hasty: str | None = None
    neighbours: tuple[int, ...] = ()
    running: int | None = None


class Device:
    """The part of Triton's driver that compiling needs."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Enough(Exception):
    """End a compilation. ``shared``: bytes, None if not known yet; ``code``: the result."""

    def __init__(self, shared: int | None, code: str) -> None:
        self.shared, self.code = shared, code


READ_EARLY = {
    "_add_rms_norm_kernel": {"weight_ptr", "residual_ptr"},
    "_attend_kernel": {"length_B", "q_start", "pages_BM", "mask_T"},
    "_gate_heads_kernel": {"gate_ptr", "weight_ptr"},
    "_latents_kernel": {"length", "q_start", "pages_BM"},
    "_down_kernel": {"order_ptr", "tile_ptr"},
    "streamed_down_kernel": {"tile_ptr"},
    "_route_kernel": {"weight_ptr", "gate_ptr"},
    "_linear_ahead_kernel": {"x_ptr", "weight_ptr"},
    "_multiply_kernel": {"weight_ptr"},
    "_rotary_store_kv_kernel": {"position_ptr", "pages_ptr", "place_ptr"},
    "_gate_rows_kernel": {"x_ptr", "weight_ptr"},
    "_grow_kernel": {"length_ptr"},
    "_delta_kernel": {"rows_ptr", "length_ptr", "q_start"},
    "_steps_kernel": {
        *("rows_ptr", "length_ptr", "q_start", "position_ptr", "back", "state_ptr", "kept_key", "kept_value")
    },
    "_inputs_kernel": {
        *(
            "weight_ptr",
            "rate_ptr",
            "bias_ptr",
            "rows_ptr",
            "position_ptr",
            "back_ptr",
            "kept_ptr",
            "kept_decay",
        )
    },
    "_scan": {"rows", "table"},
    "_finish": {"rows", "table"},
}
"""Arguments that kernels read before they wait: see ``specserve_kernels.ops.pdl``."""

AHEAD = {"_linear_ahead_kernel", "_rotary_store_kv_kernel"}
"""Kernels that let the next begin before they wait."""

SIZES = {"O", "I", "HEADS", "SLOTS"}
"""Constants that say how much there is: to Triton's front end the code is the same."""

SMALL = 1 << 20  # bytes, of which numbers that are read early take less

ADA_SHARED = 101_376  # bytes of shared memory of a program, of compute capability 8.6 and 8.9
WAIT = re.compile(r"griddepcontrol\.wait|tt\.grid_dependency_wait")
ACCESS = re.compile(
    r"\bld\.(?!global\.cg\.)[\w.:]*global|\b(st|atom|red|cp(?!\.async\.cg))\.[\w.:]*global"
    r"|\b(load|store|atomicrmw|cmpxchg) .*addrspace\(1\)"
    r"|\btt\.load (?!.*cache_modifier = cg)|\btt\.(store|atomic\w+|descriptor\w+) "
    r"|\b\w+\.async\w*_copy_global(?!.*[mM]odifier = cg)"
)

WEIGHTS_FIRST = {
    "linear.specialized._specialized_kernel": 3,
    "linear.streamed._streamed_kernel": 1,
    "attention.latent_nodes._latents_kernel": 6,
}
"""Kernels that have all but their first argument brought by the copy engine before they wait, and how many groups of
warps they have, each of which waits."""
COPIES = r"^.*\bcp\.async\.bulk\.tensor\.\w+\.shared.* ptr (nonnull )?%{}.*$"
WEIGHTS = re.compile(COPIES.format("(?!0,)"), re.MULTILINE)
INPUTS = re.compile(COPIES.format("0,"), re.MULTILINE)


def waits_first(code: str, groups: int = 0) -> bool | None:
    """Of LLVM's code, whose loads and stores of global memory are PTX inside it or its own, or Triton's for a GPU.
    ``groups``: as in ``WEIGHTS_FIRST``, of LLVM's code only."""
    waits = [found.start() for found in WAIT.finditer(code)]
    if not waits:
        return None
    if groups:
        inputs = INPUTS.search(code)
        before = inputs.start() if inputs else len(code)
        weights = max((found.start() for found in WEIGHTS.finditer(code, 0, before)), default=0)
        if len(waits) < groups or max((wait for wait in waits if wait < before), default=-1) < weights:
            return False
        return waits_first(WEIGHTS.sub("", code))
    first = ACCESS.search(code)
    return first is None or waits[0] < first.start()


LOOP = re.compile(r"^( *)(?:%\S+ = )?scf\.for .*?^\1}", re.MULTILINE | re.DOTALL)
PRODUCT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot) ")
NEIGHBOURS = re.compile(r"\bkWidth = (\d+)")
COPY = re.compile(r"\b(ttg\.async_copy_global_to_local|ttng\.async_tma_copy_global_to_local) ")


def copied_ahead(ttgir: str) -> list[int]:
    """Of Triton's code for a GPU: a pipelined loop copies blocks into shared memory while it multiplies others."""
    loops = (found[0] for found in LOOP.finditer(ttgir))
    return [len(COPY.findall(loop)) for loop in loops if PRODUCT.search(loop)]


FOR = re.compile(r"( *)(?:%\S+ = )?scf\.for ")
OF_REGISTERS = re.compile(r"\bttng\.warp_group_dot %[^:]* : tensor<")
ALL_DONE = re.compile(r"\bttng\.warp_group_dot_wait .*\{pendings = 0 ")


def running_products(ttgir: str) -> int:
    """Of Triton's code for a GPU: Hopper's products of numbers in registers that are not waited for where their loop
    turns. The next turn may overwrite the registers: https://github.com/triton-lang/triton/issues/9433."""
    count, loops, running = 0, [], [0]
    for line in ttgir.splitlines():
        if begin := FOR.match(line):
            loops.append(f"{begin[1]}}}")
            running.append(0)
        elif loops and line.startswith(loops[-1]):
            loops.pop()
            count += running.pop()
        elif OF_REGISTERS.search(line):
            running[-1] += 1
        elif ALL_DONE.search(line):
            running[-1] = 0
    return count


class Compiler:
    """Replace launches: compile each variant once.

    Triton's front end checks all of them, which finds errors that its interpreter tolerates: ``until`` is the stage
    that is not run, "ttir" then. "llir": Triton's passes for a GPU are run, too, and the one that places shared memory.
    "ptx", and the first variant of each kernel: so is LLVM.
    """

    def __init__(self, until: Literal["ttir", "llir", "ptx"] = "ttir") -> None:
        self.until = until
        self.found: dict[str, Compiled] = {}
        self._alike: dict[str, str] = {}  # keys of ``found`` by the same without sizes
        self._run = JITFunction.run
        self._add_stages = CUDABackend.add_stages
        self._begun: set[str] = set()
        self._last = self._ttgir = ""
        self._ahead = 0  # how many launches in a row, the last among them, let the next in before they waited
        self._launches = 0
        self._first: dict[range, int] = {}
        self._holders: dict[range, range] = {}
        self._kept: list[Tensor] = []

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In the place of ``JITFunction.run``."""
        name = f"{kernel.module}.{kernel.__name__}".removeprefix("specserve_kernels.ops.")
        dtypes = dict.fromkeys(
            str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, Tensor)
        )
        variant = f"{' '.join(dtypes)} {options}"
        types = [
            specialized(arg, not param.do_not_specialize)
            for arg, param in zip(args, kernel.params, strict=False)
        ]
        key = f"{name} {types} {variant} {Device.capability}"
        constants = {each: value for each, value in options.items() if each not in SIZES}
        alike = self._alike.setdefault(f"{name} {types} {constants} {Device.capability}", key)
        if self.until == "ttir":
            key = alike
        hasty = self._hasty(kernel, args)
        if key in self.found:
            if hasty:
                self.found[key] = replace(self.found[key], hasty=hasty)
            return
        self._last = self.until if name in self._begun else "ptx"
        self._begun.add(name)
        self._ttgir = ""
        shared = error = waits = None
        try:
            self._run(kernel, *args, grid=grid, warmup=True, **options)
        except Enough as enough:
            shared = enough.shared
            if shared is not None:
                waits = waits_first(enough.code, WEIGHTS_FIRST.get(name, 0))
        except Exception as raised:  # whatever Triton may say: it is reported
            error = f"{type(raised).__name__}: {raised}"
        neighbours = tuple({int(found) for found in NEIGHBOURS.findall(self._ttgir)})
        copied = copied_ahead(self._ttgir)
        running = running_products(self._ttgir) if self._ttgir else None
        self.found[key] = Compiled(
            name, variant, Device.capability, shared, waits, copied, error, hasty, neighbours, running
        )

    def _hasty(self, kernel: Any, args: tuple[Any, ...]) -> str | None:
        """What of all that this launch reads early was first given to the launch before, which therefore made it, or to
        those before that let the next in without waiting, and the one before them."""
        given = {param.name: places_of(arg) for param, arg in zip(kernel.params, args, strict=False)}
        self._launches += 1
        hasty, earliest = None, self._launches - 1 - self._ahead
        self._ahead = self._ahead + 1 if kernel.__name__ in AHEAD else 0
        for name in READ_EARLY.get(kernel.__name__, ()):
            for place in given.pop(name):
                first = self._first.setdefault(self._holder(place), 0)  # what nobody was given is the host's
                if first >= max(earliest, 1):
                    hasty = name
        for place in itertools.chain.from_iterable(given.values()):
            self._first.setdefault(place, self._launches)
        # Nothing else may come to lie there.
        self._kept += [arg for arg in args if isinstance(arg, Tensor) and arg.nbytes < SMALL]
        return hasty

    def _holder(self, place: range) -> range:
        """The first that was given of those that it touches."""
        if place not in self._holders:
            first, end = place.start, place.stop
            touched = (other for other in self._first if other.start < end and first < other.stop)
            self._holders[place] = next(touched, place)
        return self._holders[place]

    def add_stages(self, backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        """In the place of the backend's: the stage after the last that is wanted ends the compilation."""
        self._add_stages(backend, stages, options, language)

        to_ttgir, is_triton = stages["ttgir"], "ttir" in stages  # Gluon begins later

        def remember(module: Any, metadata: dict[str, Any]) -> Any:
            module = to_ttgir(module, metadata)
            self._ttgir = str(module)
            if self._last == "llir" and is_triton:
                raise Enough(shared_of(module, options), self._ttgir)
            return module

        def end(module: Any, metadata: dict[str, Any]) -> None:
            raise Enough(metadata.get("shared"), str(module))

        stages["ttgir"] = remember
        stages[self._last if self._last in stages else "llir"] = end


def shared_of(module: Any, options: Any) -> int:
    """Bytes, of Triton's code for a GPU: the first passes of those that give it to LLVM."""
    manager, version = (
        ir.pass_manager(module.context),
        get_ptx_version_from_options(options, Device.capability),
    )
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, Device.capability, version)
    manager.run(module, "shared_of")
    shared: int = module.get_int_attr("ttg.shared")
    return shared


def places_of(arg: object) -> list[range]:
    """Where in memory a launch's argument lies."""
    if isinstance(arg, tuple):
        return [place for member in arg for place in places_of(member)]
    if not isinstance(arg, Tensor) or not arg.numel():
        return []
    last = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
    return [range(arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.element_size())]


def specialized(arg: object, by_value: bool) -> object:
    """What of a launch's argument Triton's front end distinguishes: not whether it is aligned."""
    if isinstance(arg, tuple):
        return [specialized(member, by_value) for member in arg]
    if isinstance(arg, Tensor):
        return arg.dtype
    if hasattr(arg, "block_shape"):
        return type(arg), arg.base.dtype, tuple(arg.block_shape)
    return type(arg), isinstance(arg, int) and by_value and arg == 1


def only_single_constants(*, compile: dict[str, Any], **_: object) -> bool:
    """Triton's hook. ``specserve.engine.kernels`` keeps variants in its serialization, which reads tuples back as
    lists."""
    constants = json.loads(compile["specialization_data"])["constant_vals"]
    values = [each["constexpr"] if isinstance(each, dict) else each for each in constants]
    assert not any(isinstance(each, list) for each in values), values
    return False


@contextmanager
def compiled_only() -> Iterator[Compiler]:
    """Launches compile and no more. All tensors are taken to be on a GPU."""
    compiler = Compiler()
    empty, full = torch.empty, torch.full

    def zeros(*shape: Any, **options: Any) -> Tensor:
        """On the device for shapes alone, zeros would be made of what is empty."""
        return (empty if str(options.get("device")) == "meta" else torch.zeros)(*shape, **options)

    def zeros_like(tensor: Tensor, **options: Any) -> Tensor:
        return full(tensor.shape, 0, **{"dtype": tensor.dtype} | options)

    def new_zeros(tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
        return tensor.new_zeros(*shape, **options)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_zeros(*x.shape[:-1], len(weight))

    def launch(*args: Any, **options: Any) -> None:
        compiler.launch(*args, **options)

    def add_stages(*args: Any) -> None:
        compiler.add_stages(*args)

    driver.set_active(Device())
    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", only_single_constants))
        stack.enter_context(patch.object(JITFunction, "parse", cache(JITFunction.parse)))
        stack.enter_context(patch.object(FileCacheManager, "put", return_value=""))  # nothing reads the files
        stack.enter_context(patch.object(CUDABackend, "add_stages", add_stages))
        # Checks of which only a debug build keeps the result: a fifth of the front end's time.
        stack.enter_context(patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None))
        stack.enter_context(patch.object(torch, "empty", zeros))
        stack.enter_context(patch.object(torch, "empty_like", zeros_like))
        stack.enter_context(patch.object(Tensor, "new_empty", new_zeros))
        stack.enter_context(patch.object(torch.nn.functional, "linear", linear))
        stack.enter_context(patch.object(specserve.layers.linear, "packs", lambda _: False))
        stack.enter_context(patch.object(specserve_kernels.dispatch, "runs_triton", lambda _: True))
        stack.enter_context(patch.object(specserve.speculation.sampler, "runs_triton", lambda _: True))
        stack.enter_context(patch.object(specserve.layers.linear, "packs", lambda _: False))
        stack.enter_context(patch.dict(ATTENTION, torch=ATTENTION["triton"]))
        yield compiler


def launch_plain(checkpoints: Checkpoints) -> None:
    scheduler = make_scheduler(checkpoints.target, dtype="bfloat16", page_size=16)
    launch_steps(Runner(context_of(scheduler)), [(PLAIN, StepShape.plain(3))])


def launch_drafted(
    checkpoints: Checkpoints,
    algorithm: str,
    branchings: dict[int, list[SamplingParams]],
    integers: bool = False,
) -> None:
    """A step without drafts, and steps of two levels, for each branching with and without what some request asks for.
    ``integers``: by a draft in int8."""
    scheduler = checkpoints.scheduler(algorithm, (2, 1, 3), dtype="bfloat16", page_size=16)
    if integers:
        multiply_integers(head_of(scheduler))
    steps = [
        (each, StepShape(2, 2 * min(3 * branching, 24), 2, branching, copied=4 * ("+" in algorithm)))
        for branching, params in branchings.items()
        for each in params
    ]
    launch_steps(Runner(context_of(scheduler)), [(PLAIN, StepShape.plain(2)), *steps])


def launch_steps(runner: Runner, steps: list[tuple[SamplingParams, StepShape]]) -> None:
    """Prompts, in an eager chunk and in the sizes that are captured, then these steps. Pages and tokens are all 0."""
    runner.prefill(Prefill([Row(0, PLAIN, 20, [0] * 20)]))
    for size in sizes_within(512, 512):
        short_prefill(runner.context, size, torch.tensor(size.pack([], runner.context.state.dummy)))
    for params, shape in steps:
        runner.step(Step([Row(0, params, 20)], shape))


def launch_attention(
    size: int,
    slots: int,
    nodes: int,
    dtype: torch.dtype = torch.bfloat16,
    scales: KVScales | None = None,
    whole: bool = True,
    chains: bool = True,
    sinks: bool = False,
) -> None:
    """Chains, trees, frontiers and prompts of Llama-3.1-8B's heads: 32 of queries, 8 of keys. ``scales``: of keys and
    values in FP8. ``sinks``: heads have them, and a cap. Unless ``whole``, none from position 1; unless ``chains``,
    neither these nor frontiers, whose loop is one of a tree's."""
    heads, kv_heads, page = 32, 8, 16
    kept = dtype if scales is None else torch.float8_e4m3fn
    cache = torch.zeros(2, 2, page, kv_heads, size, dtype=kept)
    qkv_TND = torch.zeros(slots * nodes, heads + 2 * kv_heads, size, dtype=dtype)
    q_TND, kv_TND = qkv_TND[:, :heads], qkv_TND[:, heads:]
    pages_BM, length_B = torch.zeros(slots, 32, dtype=torch.int64), torch.zeros(slots, dtype=torch.int64)
    shared = q_TND, cache, pages_BM
    more: Any = {"sinks_H": torch.zeros(heads, dtype=dtype), "cap": 50.0} if sinks else {}
    q_start, per_node_T = (
        torch.zeros(slots + 1, dtype=torch.int64),
        torch.zeros(slots * nodes, dtype=torch.int64),
    )
    if scales is not None:
        where = per_node_T, kv_heads, cache, pages_BM, per_node_T
        rotary_store_kv(qkv_TND, torch.zeros(9, 2, size, dtype=dtype), *where, scales=scales)
    made = list_paths(per_node_T.clone(), q_start.clone(), length_B.clone(), 4, nodes)
    for paths in (None, made._replace(mask_T=per_node_T)):
        if chains or paths:
            attend_nodes(*shared, length_B, q_start, paths, nodes, Workspace(), scales, **more)
    attend_chunks(*shared, q_start, per_node_T, nodes, scales=scales, **more)
    if scales is None and whole:
        attend_nodes(*shared, length_B, q_start, None, nodes, Workspace(), kv_start=1)
        attend_chunks(*shared, q_start, per_node_T, nodes, kv_TND, True, kv_start=1)
    for prefix, tokens in ((False, nodes), (True, nodes), (True, 65)):  # and where tiles are larger
        attend_chunks(*shared, q_start, per_node_T, tokens, kv_TND, prefix, scales, **more)
    if nodes > 1 and chains:
        scratch_BKA = torch.zeros(slots, nodes, 3, dtype=torch.int64)
        attend_frontier(*shared, length_B, 1, scratch_BKA, Workspace(), scales, **more)


def launch_latents(heads: int, nodes: int, scales: KVScales | None = None) -> None:
    """DeepSeek's: a tree, a frontier and a prompt of 20 slots, and what is done before and after."""
    tokens, bf16 = 20 * nodes, torch.bfloat16
    cache = torch.zeros(2, 1, 64, 576, dtype=bf16 if scales is None else torch.float8_e4m3fn)
    pages_BM, length_B = torch.zeros(20, 8, dtype=torch.int64), torch.zeros(20, dtype=torch.int64)
    q_start, per_node_T = torch.zeros(21, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    made, table = torch.zeros(heads, 256, 512, dtype=bf16), torch.zeros(9, 2, 64, dtype=bf16)
    query_TNQ, row_TX = torch.zeros(tokens, heads, 192, dtype=bf16), torch.zeros(tokens, 576, dtype=bf16)
    query_TNX = absorb_queries(query_TNQ, made[:, :128], table, per_node_T)
    where = table, per_node_T, cache, pages_BM, per_node_T, scales
    store_latents(row_TX, torch.zeros(512, dtype=bf16), 1e-6, *where)
    shared, how = (query_TNX, cache, pages_BM), {"scales": scales, "scale": 0.1, "latent": 512}
    paths = list_paths(per_node_T.clone(), q_start.clone(), length_B.clone(), 4, nodes)
    paths = paths._replace(mask_T=per_node_T)
    attend_nodes(*shared, length_B, q_start, paths, nodes, Workspace(), **how)
    if scales is None:
        attend_latents(query_TNX, *shared[1:], length_B, q_start, nodes)
        attend_latents(query_TNX, *shared[1:], length_B, q_start, nodes, paths=paths)
        attend_latents(query_TNX, *shared[1:], per_node_T, q_start, nodes, prompt=True)
        scratch_BKA = torch.zeros(20, nodes, 3, dtype=torch.int64)
        attend_frontier(*shared, length_B, 1, scratch_BKA, Workspace(), **how)
    found_TNC = attend_chunks(*shared, q_start, per_node_T, nodes, **how)
    multiply_heads(found_TNC, made[:, 128:])


@cache
def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One for all launches."""
    return torch.zeros(outputs, inputs, dtype=dtype)


def launch_linears(tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Projections of 4096 inputs that are read in other forms than a whole weight of 16 bits."""
    x_TI, ids_R = torch.zeros(tokens, 4096, dtype=dtype), torch.zeros(4096, dtype=torch.int64)
    indexed_linear(x_TI, weight(8192, 4096, dtype), ids_R)
    if dtype.itemsize == 2:
        for rows in (tokens, 64):
            linear_ahead(x_TI.new_zeros(rows, 4096), weight(96, 4096, dtype))
        for gated in GATES:
            if tokens <= 16:
                linear_few(x_TI, weight(4096, 4096, dtype), gated)
            if tokens <= 64:
                swap_ab_linear(x_TI, weight(4096, 4096, dtype), gated)
    for rounded in (torch.int8, torch.float8_e4m3fn):
        scale_OG = torch.zeros(32, 4096).T
        bias_O = torch.zeros(4096, dtype=dtype) if tokens <= 32 else None
        multiply = integer_linear if rounded == torch.int8 and dtype.itemsize == 2 else quantized_linear
        for gated in GATES:
            multiply(x_TI, weight(4096, 4096, rounded), scale_OG, bias_O, gated)


def launch_packed(tokens: int, gated: Gate, dtype: torch.dtype = torch.bfloat16) -> None:
    """Projections of 4096 inputs by all kinds of stored weights."""
    x_TI = torch.zeros(tokens, 4096, dtype=dtype)
    for packed in (*packed_weights(), *packed_floats()):
        if packed.rounding == FP8 or dtype.itemsize == 2:
            packed_linear(x_TI, packed, None, gated)
            if 8 <= tokens <= 16:
                gate_rounded(x_TI, packed, None, PAIRED)


@cache
def packed_weights(stacked: bool = False) -> list[Packed]:
    """Of 4096 inputs and outputs, all kinds."""
    values, few_bits = (weight(4096, 4096, kept) for kept in (torch.int8, torch.uint8))
    one, blocks, groups = (torch.zeros(shape) for shape in ((4096, 1), (32, 32), (4096, 32)))
    numbers = [
        Numbers(values, one),
        Numbers(values.to(FP8), one),
        Numbers(values.to(FP8), blocks, None, 128, 128),
        Numbers(few_bits, groups.half(), None, 128),
        Numbers(few_bits, groups.half(), torch.zeros(4096, 32, dtype=torch.uint8), 128),
    ]
    return [pack(each, stacked) for each in numbers]


@cache
def packed_floats() -> list[Packed]:
    """Of 4 bits, MXFP4 and NVFP4."""
    values = weight(4096, 4096, torch.uint8)
    return [pack(Numbers(values, torch.ones(4096, 4096 // n), None, n, floats=True)) for n in (32, 16)]


@cache
def wide_weights() -> list[Packed]:
    """Gates as wide as Llama-3.1-8B's, each row of which has one scale."""
    scale_OG = torch.zeros(28672, 1)
    return [pack(Numbers(weight(28672, 4096, kept), scale_OG)) for kept in (torch.uint8, torch.int8, FP8)]


def launch_wide_packed(tokens: int) -> None:
    x_TI = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    for packed in wide_weights():
        packed_linear(x_TI, packed, None, "silu")
        if tokens == 64:
            gate_rounded(x_TI, packed, None, packed.rounding)


def launch_norms() -> None:
    """Of heads, before a sum, and those of an int8 draft and quantized targets as wide as Llama-3.1-8B's."""
    x_TH, weight_H = (torch.zeros(*shape, 4096, dtype=torch.bfloat16) for shape in ((2,), ()))
    rms_norm(x_TH.view(64, 128), weight_H[:128], 1e-5)
    gate_TH, norm = x_TH.clone(), (weight_H[:128].clone(), 1e-5)
    for dtype in (None, FP8, PAIRED):
        gate_heads(x_TH, gate_TH.view(2, 32, 128), norm, dtype)
        gate_heads(x_TH, gate_TH.view(2, 16, 256), None, dtype)
    norms, at_T = HeadNorms(weight_H[:128], weight_H[:128], 1e-6), torch.zeros(2, dtype=torch.int64)
    cache, table = torch.zeros(2, 2, 16, 8, 128, dtype=x_TH.dtype), x_TH.view(32, 2, 128)
    for rope in (table, table[..., :64].contiguous()):
        rotary_store_kv(x_TH.view(2, 32, 128), rope, at_T, 8, cache, at_T[None], at_T, norms=norms)
    add_rms_norm(x_TH, x_TH, weight_H, 1e-6, weight_H, weight_H[:1])
    for dtype in (torch.int8, FP8, PAIRED):
        add_rms_norm_rounded(x_TH, x_TH, weight_H, 1e-5, dtype, give=dtype == FP8)
    tokens_T = torch.zeros(2, dtype=torch.int64)
    pair_inputs_rounded(tokens_T, x_TH, x_TH, tokens_T, (weight_H, weight_H, 1e-5))


def launch_wide(tokens: int) -> None:
    """Gates as wide as Llama-3.1-8B's: a draft's in int8, and the target's, also after cuBLAS."""
    scale_OG = torch.zeros(32, 28672).T
    x_TI, given_TI = (torch.zeros(tokens, 4096, dtype=torch.bfloat16) for _ in range(2))
    integer_linear(round_inputs(x_TI, torch.int8), weight(28672, 4096, torch.int8), scale_OG, None, "silu")
    swap_ab_linear(x_TI, weight(28672, 4096), "silu")
    apply_gate(torch.zeros(tokens, 28672, dtype=torch.bfloat16), "silu")
    gate_rows(x_TI, given_TI, weight(1, 4096))


def launch_experts(tokens: int, correction: bool = False, biased: bool = False, first: int = 0) -> None:
    """Of Qwen3-30B-A3B's size, but fewer, or with groups and biases. This rank has those from ``first`` on."""
    count, size, inner, bf16 = 16, 2048, 768, torch.bfloat16
    x_TH, bias_E = torch.zeros(tokens, size, dtype=bf16), torch.zeros(count) if correction else None
    more: dict[str, Any] = {"groups": 4, "chosen_groups": 2, "group_best": 2} if correction else {}
    behind = 0 if first else 1
    routing = Routing(count, 8, "sigmoid" if correction else "softmax", shared=behind, **more)
    gate_1H = weight(1, size) if behind else None
    routes = route(x_TH, weight(count, size), routing, bias_E, bias_E, gate_1H)
    count += behind
    own = count - first
    biases = [torch.zeros(own, length, dtype=bf16) for length in (2 * inner, size)] if biased else []
    stacked = weight(own * 2 * inner, size).unflatten(0, (own, -1)), weight(own * size, inner)
    experts = ExpertWeights(stacked[0], stacked[1].unflatten(0, (own, -1)), *biases)
    run_experts(x_TH, routes, experts, "silu", x_TH if correction else None, first, count)


def launch_packed_experts(tokens: int, kinds: slice = slice(None), count: int = 2) -> None:
    """Whose weights are of all kinds that are stored."""
    x_TH = torch.zeros(tokens, 4096 // count, dtype=torch.bfloat16)
    routes = route(x_TH, weight(count, 4096 // count), Routing(count, 2))
    for packed in [*packed_weights(stacked=True), *packed_floats()][kinds]:
        run_experts(x_TH, routes, ExpertWeights(packed, packed), "silu")


def launch_recurrent(state: torch.dtype) -> None:
    """Prompts, trees and commits of a layer of Qwen3.5-9B's heads."""
    keys, values, size, entries, bf16 = 16, 32, 128, 64, torch.bfloat16
    kept = Lagged(
        torch.zeros(3, values, size, size, dtype=state),
        torch.zeros(3, entries, keys, size, dtype=bf16),
        torch.zeros(3, entries, values, size, dtype=bf16),
        torch.zeros(3, entries, values),
    )
    inputs_RWC = torch.zeros(3, 6, (2 * keys + values) * size, dtype=bf16)
    rings, index_T = (*kept[1:], inputs_RWC), torch.zeros(8, dtype=torch.int64)
    left = Left(*(each.new_zeros(8, *each.shape[2:]) for each in rings))
    back_TE, _ = (trace_back(parent_T, index_T, 7, entries) for parent_T in (None, index_T))
    runs = Runs(index_T[:2], index_T[:2], index_T[:3], index_T, index_T, back_TE, 8, 16)
    few_TX, rate_V = torch.zeros(8, 2 * values, dtype=bf16), torch.zeros(values)
    weights = inputs_RWC[0, 0, :, None].repeat(1, 4), *few_TX.chunk(2, 1), rate_V, rate_V
    inputs = delta_inputs(left.input_TC, *weights, inputs_RWC, kept.decay_REV, runs, left)
    for rule, longest in (*((delta_nodes, most) for most in (1, 4, 8, TILE)), (delta_prompts, 8)):
        rule(inputs, kept, runs._replace(longest=longest), left.value_TVU)
    many_TVU = left.value_TVU.new_empty(4096, values, size)
    delta_prompts(inputs, kept, runs._replace(rows_B=index_T), many_TVU)
    fold_states(Lagged(*(table[None] for table in kept)), index_T[:2], index_T[:2], index_T[:2])
    one = tuple(each[None] for each in rings), Left(*(each[None] for each in left))
    path_BS, ends_RX = index_T.view(2, 4), torch.zeros(3, 17, dtype=torch.int64)
    _, *where = cut_paths(index_T, path_BS, index_T[:2], index_T[:2], index_T[:2], ends_RX)
    keep_last(*one, 16, index_T, *where)


def launch_exchanges() -> None:
    """Of two ranks and of four, few numbers and many."""
    for ranks, tokens in ((2, 1), (4, 512)):
        part_TH = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
        shared = Shared(1, *(torch.zeros(count, dtype=torch.int64) for count in (ranks + 1, 128)))
        sum_parts(part_TH, shared)
        join_parts(part_TH, 4096 * ranks, 64, shared)
        pick_rows(torch.zeros(128, dtype=torch.int64), part_TH, 0, shared)
        if tokens == 1:
            add_rms_norm(Parts(part_TH, shared), part_TH, part_TH[0], 1e-5)


def main() -> None:
    checkpoints = Checkpoints(*map(Path, sys.argv[1:]))
    torch.set_num_threads(1)
    gc.disable()  # Triton's front end makes so many objects that looking through them takes a tenth of the time
    with torch.inference_mode(), compiled_only() as compiler:
        compiler.until = "ptx"
        launch_packed(8, None)
        compiler.until = "llir"
        launch_attention(128, 20, 16, whole=False, chains=False)
        launch_attention(512, 20, 16, whole=False, chains=False)
        launch_norms()
        launch_exchanges()
        launch_linears(8)
        launch_wide(8)
        launch_wide(128)
        launch_attention(128, 20, 16, scales=KVScales(), chains=False)
        launch_latents(16, 1)
        launch_latents(128, 8)
        launch_packed(64, None)
        for tokens in (1, 40, 64, 400):
            launch_experts(tokens)
        launch_packed_experts(4)
        for tokens in (8, 256):
            launch_packed_experts(tokens, slice(4, 6), 16)  # with zero points, and MXFP4 in enough tiles
        launch_recurrent(torch.float32)
        launch_recurrent(torch.bfloat16)
        for tokens in (64, 256, 512):
            launch_wide_packed(tokens)
        for tokens in (100, 4352):  # whose programs share tiles, and these their last ones
            gate_rounded(torch.zeros(tokens, 4096, dtype=torch.bfloat16), packed_weights()[2], None, FP8)
        compiler.until = "ttir"
        launch_plain(checkpoints)
        launch_drafted(checkpoints, "EAGLE", {1: [PLAIN], 4: [PLAIN]})
        launch_drafted(checkpoints, "NGRAM", {1: [PLAIN], 4: [PLAIN]})
        launch_drafted(checkpoints, "SUFFIX", {1: [PLAIN], 4: [PLAIN]})
        launch_drafted(checkpoints, "EAGLE3+NGRAM", {1: [PLAIN], 4: [PLAIN]})
        launch_drafted(checkpoints, "EAGLE3", {1: [PLAIN], 4: [FORETOLD], 20: [PLAIN]})
        for algorithm in ("EAGLE", "EAGLE3"):
            launch_drafted(checkpoints, algorithm, {1: [PLAIN], 4: [PLAIN]}, integers=True)
        launch_experts(4, correction=True, biased=True, first=8)
        for tokens in (20, 64, 400):
            launch_packed_experts(tokens)
        launch_attention(128, 1, 8)
        launch_attention(128, 400, 1)
        for size in (256, 512):
            launch_attention(size, 20, 16, whole=False)
        launch_attention(64, 20, 16, sinks=True)
        launch_attention(128, 20, 16, torch.float32, whole=False)
        launch_attention(128, 20, 16, scales=KVScales())
        launch_latents(16, 8, KVScales())
        for tokens in (32, 64, 200):
            launch_linears(tokens)
        for tokens in (32, 64):
            launch_wide(tokens)
        launch_linears(8, torch.float32)
        launch_packed(8, None, torch.float32)
        for tokens in (1, 16):
            launch_packed(tokens, None)
        for tokens in (64, 200):
            launch_packed(tokens, "gelu_tanh" if tokens == 64 else "silu")
        Device.capability, compiler.until = 89, "llir"
        assume(Gpu((8, 9), Limits(128, ADA_SHARED)))
        launch_packed(64, None)
        launch_packed_experts(400, slice(4, 5))  # with zero points
        for dtype in (torch.bfloat16, torch.float32):
            made = torch.zeros(128, 128, 512, dtype=dtype)
            multiply_heads(made[:64], made)
    for compiled in compiler.found.values():
        print(json.dumps(asdict(compiled)))


if __name__ == "__main__":
    main()

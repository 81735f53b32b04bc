"""From settings to a running engine: weights, draft, pool, state, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from specserve.attention import ATTENTION, AttentionBackend
from specserve.config import Settings, resolve, resolve_paths
from specserve.config.engine import DraftSettings, DynamicMap, EngineConfig
from specserve.core import Capacity, prediction_limit
from specserve.engine.grammars import Grammars
from specserve.engine.graphs import Graphs
from specserve.engine.kernels import settle_keys
from specserve.engine.memory import pool_pages
from specserve.engine.profile import complete, measure_eager, measure_graphs
from specserve.engine.prompts import sizes_within
from specserve.engine.runner import Runner
from specserve.engine.shapes import (
    AdaptiveShapes,
    Padding,
    ShapePlan,
    ShapePolicy,
    StaticShapes,
    batch_buckets,
)
from specserve.engine.threads import choose_threads, usable_cores
from specserve.grammar import MISSING
from specserve.kv.pool import KVPool, PoolConfig
from specserve.kv.spec import HeadKV, KVSpec
from specserve.layers.linear import QUANTIZED, add_in_order, pack_linears
from specserve.models import read_config
from specserve.models.checkpoint import DTYPES, load_target
from specserve.models.config import ModelConfig
from specserve.models.draft.token_map import read_named_map
from specserve.models.llama import LlamaModel
from specserve.models.special_tokens import special_tokens
from specserve.process import phase
from specserve.scheduler.admission import Admission
from specserve.scheduler.memory import Memory
from specserve.scheduler.observers import DynamicMapObserver
from specserve.scheduler.scheduler import Limits, Scheduler
from specserve.speculation.context import Context, Drafter
from specserve.speculation.control.adaptive import Controller
from specserve.speculation.drafters import load_drafter
from specserve.speculation.drafters.none import NoDrafter
from specserve.speculation.drafters.options import DraftOptions
from specserve.speculation.dynamic_map import MapPlan
from specserve.speculation.shape import StepShape
from specserve.speculation.state import DecodeState

log = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)  # of the first GPUs that turn FP8 into other numbers by themselves


def resolve_engine(
    given: Settings, with_front: bool = False, has_gpu: bool | None = None
) -> tuple[Settings, list[str], EngineConfig]:
    """Make every choice, log the reason for each. Return the settings, the reasons, and what they come to.

    ``with_front``: another process needs a core. ``has_gpu`` None: as this machine has. Raises
    ValueError naming the setting that can't be honoured.
    """
    given, notes = resolve_paths(given)
    assert given.model_path is not None
    try:
        model = read_config.load_model_config(Path(given.model_path))
    except ValueError as error:
        raise ValueError(f"--model-path: {error}") from None
    settings, more = resolve(given, model, has_gpu)
    notes += more
    for note in notes:
        log.info("%s", note)
    # OpenMP's threads spin at barriers, and one that is pushed off its core holds up all
    # (docs/decisions/0006-engine-threads.md).
    cores = max(1, usable_cores() - with_front)
    return settings, notes, EngineConfig.of(settings, model, cores)


def create_scheduler(config: EngineConfig, before_launch: Callable[[], None] = lambda: None) -> Scheduler:
    """Load everything that the configuration names. Raises ValueError for what cannot be served.

    ``before_launch`` is called when weights are loaded and nothing is launched yet.
    """
    if config.device == "cuda":
        settle_keys()
        add_in_order()
    plan = shape_plan(config)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    context = create_context(config, plan)
    if config.device == "cpu" and config.cpu_threads is None:
        phase.enter("choosing threads")
        choose_threads(context, min(config.cores, torch.get_num_threads()))
    before_launch()
    if captured := plan.captured():
        phase.enter("capturing CUDA graphs")
    graphs = (
        Graphs.capture(context, captured, sizes_within(config.context_length)) if captured else Graphs({})
    )
    policy = shape_policy(plan, context, graphs)
    runner = Runner(context, graphs.steps, graphs.prompts, graphs.capture_next)
    if config.device == "cuda":
        phase.enter("warming up")
        runner.warm_up(config.longest_launch)
    return assemble(config, plan, runner, policy, graphs)


def assemble(
    config: EngineConfig, plan: ShapePlan, runner: Runner, policy: ShapePolicy, graphs: Graphs
) -> Scheduler:
    """A scheduler with pages and requests of its own over a loaded engine."""
    context = runner.context
    pool = context.pool
    memory = Memory(pool.num_pages, pool.page_size, prefix_cache=config.prefix_cache)
    capacity = Capacity(
        context_length=config.context_length,
        pool_tokens=memory.allocator.capacity * pool.page_size,
        vocab_size=config.model.vocab_size,
        all_greedy=config.all_greedy,
    )
    limits = Limits(
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
        headroom=plan.headroom,
        overlap=_overlap(config, context.drafter),
    )
    no_grammars = _prepare_grammars(config, runner)
    info: dict[str, object] = {
        "no_grammars": no_grammars,
        "context_length": capacity.context_length,
        "max_total_tokens": capacity.pool_tokens,
        "num_pages": memory.allocator.capacity,
        "page_size": pool.page_size,
        "vocab_size": capacity.vocab_size,
        "eos_token_ids": list(config.model.eos_token_ids),
        "speculation": _speculation_info(plan),
        "cuda_graphs": {
            "count": len(graphs.steps) + len(graphs.prompts),
            "seconds": round(graphs.seconds, 2),
            "memory_bytes": graphs.memory_bytes,
        },
    }
    admission = Admission(capacity, config.model.eos_token_ids, config.random_seed, no_grammars)
    live_map = context.drafter.live_map
    observers = [DynamicMapObserver(live_map, runner)] if live_map is not None else []
    return Scheduler(runner, memory, admission, limits, policy, info, observers)


def _prepare_grammars(config: EngineConfig, runner: Runner) -> str | None:
    """Let requests have grammars. Return why they can't."""
    vocabulary = config.tokenizer_path / "tokenizer.json"
    try:
        runner.grammars = Grammars(vocabulary, config.model.vocab_size, config.model.eos_token_ids)
    except ImportError:
        return MISSING
    except ValueError as error:
        return str(error)
    return None


def _overlap(config: EngineConfig, drafter: Drafter) -> bool:
    """Return whether results of a step are handled while the next one runs."""
    if config.overlap and drafter.needs.tokens_on_host:
        log.info("overlap is off: %s wants each step's tokens before the next", drafter.name)
        return False
    return config.overlap


def shape_plan(config: EngineConfig) -> ShapePlan:
    """The shapes that steps may have; those within the buckets are captured."""
    padding = Padding(batch_buckets(config.largest_graph) if config.largest_graph is not None else ())
    return ShapePlan(config.shape, config.adaptive, config.max_running_requests, padding, config.draft_copies)


def shape_policy(plan: ShapePlan, context: Context, graphs: Graphs) -> ShapePolicy:
    """What chooses among them; measured costs first, where it needs them."""
    if not plan.adaptive:
        return StaticShapes(plan.speculation, plan.padding, plan.copies)
    phase.enter("measuring steps")
    begin = time.perf_counter()
    if graphs.steps:
        cost = measure_graphs(context, graphs.steps)
    else:
        cost = measure_eager(context, plan.most_slots, plan.candidates)
    log.info("measured %d steps in %.1f s", len(cost.table), time.perf_counter() - begin)
    complete(cost, plan.most_slots, plan.candidates)
    cost.prompts = min(seconds for shape, seconds in cost.table.items() if not shape.levels)

    def captured(slots: int) -> list[StepShape]:
        """Plain decoding, and what has a graph by now, if any has one."""
        plain, *drafted = plan.candidates(slots)
        return [plain, *(shape for shape in drafted if shape in graphs.steps or not graphs.steps)]

    return AdaptiveShapes(Controller(captured, cost), plan.padding)


def _speculation_info(plan: ShapePlan) -> object:
    if plan.adaptive:
        return "adaptive"
    return plan.speculation and dict(zip(("steps", "topk", "tokens"), plan.speculation, strict=True))


def create_context(config: EngineConfig, plan: ShapePlan) -> Context:
    """Target, draft, pool and state on the device."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    positions = slot_positions(config, plan)
    phase.enter("reading the model's weights")
    target = load_target(config.model_path, dtype, device, max_positions=positions)
    phase.enter("reading the draft")
    drafter = create_drafter(config, target, positions, dtype)
    pack_linears(target)  # last: a draft may pick rows of the plain head
    pool_config = PoolConfig(
        target=target_kv(config.model, dtype),
        draft=drafter.kv,
        feature_size=drafter.needs.feature_size,
        page_size=config.page_size,
        dtype=dtype,
    )
    pages = pool_pages(pool_config, config.max_total_tokens, config.mem_fraction_static, device)
    phase.enter("making the KV pool")
    attention = _attention(config, pool_config)
    state = DecodeState(
        slots=config.max_running_requests,
        positions=positions,
        page_size=config.page_size,
        feature_size=pool_config.feature_size,
        vocab_size=config.model.vocab_size,
        dtype=dtype,
        sampler_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        device=device,
        prediction_size=prediction_limit(config.context_length) if drafter.vocab_size else 0,
        sources=len(drafter.needs.sources),
    )
    pool = _pool(pool_config, pages, device)
    return Context(target, drafter, pool, attention, state, config.model.vocab_size)


def create_shapes(config: EngineConfig, plan: ShapePlan) -> Context:
    """The same without numbers, and with a pool of one page: on ``meta``, which is served as a GPU is."""
    return create_context(replace(config, device="meta", max_total_tokens=config.page_size), plan)


def target_kv(config: ModelConfig, dtype: torch.dtype) -> list[KVSpec]:
    """What each of the target's layers keeps of a token."""
    return [HeadKV(layer.num_kv_heads, layer.head_dim, dtype) for layer in config.layers]


def slot_positions(config: EngineConfig, plan: ShapePlan) -> int:
    """Positions of one slot: a context, what steps may write past it, and the rest of the last page."""
    return -(-(config.context_length + plan.margin) // config.page_size) * config.page_size


def _pool(config: PoolConfig, pages: int, device: torch.device) -> KVPool:
    """Raises ValueError where the device has not so much memory."""
    begin = time.perf_counter()
    tokens, size = pages * config.page_size, pages * config.page_bytes / 2**30
    try:
        pool = KVPool(config, pages, device)
    except RuntimeError as error:
        if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"--max-total-tokens: a KV pool of {tokens} tokens takes {size:.1f} GiB, which the {device.type} does not "
            "have; expected fewer tokens"
        ) from None
    if device.type != "meta":
        seconds = time.perf_counter() - begin
        log.info("the KV pool holds %d tokens in %.2f GiB, made in %.1f s", tokens, size, seconds)
    return pool


def _attention(config: EngineConfig, pool: PoolConfig) -> AttentionBackend:
    """Raises ValueError naming one that serves all layers, where the one of the settings does not."""
    attention = ATTENTION[config.attention_backend](pool.page_size, pool.dtype)
    for whose, specs in {"target": pool.target, "draft": pool.draft}.items():
        for spec in dict.fromkeys(specs):
            if reasons := attention.unsupported(spec, pool.page_size):
                raise ValueError(
                    f"--attention-backend {attention.name} cannot serve the {whose}'s {spec}: "
                    f"{'; '.join(reasons)}; use torch, which serves all, without CUDA graphs"
                )
    return attention


def create_drafter(config: EngineConfig, target: LlamaModel, positions: int, dtype: torch.dtype) -> Drafter:
    """Load the drafter that the settings name."""
    draft = config.draft
    if draft is None:
        return NoDrafter()
    _check_quantization(draft, target)
    options = DraftOptions(_map_plan(config, draft), draft.config_override, draft.quantization)
    drafter = load_drafter(draft.name, draft.path, target, config.model.num_layers, positions, dtype, options)
    if draft.topk > (size := drafter.vocab_size):
        raise ValueError(
            f"--speculative-eagle-topk: the draft {draft.path} has {size} tokens, found {draft.topk}"
        )
    return drafter


def _check_quantization(draft: DraftSettings, target: LlamaModel) -> None:
    """Raises ValueError where the GPU has no such numbers."""
    if QUANTIZED.get(draft.quantization) is not torch.float8_e4m3fn or target.device.type != "cuda":
        return
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ValueError(
            "--speculative-draft-quantization fp8 needs a GPU of compute capability 8.9 or more, this one has "
            f"{found}: accepted are auto, none and int8"
        )


def _map_plan(config: EngineConfig, draft: DraftSettings) -> Path | MapPlan | None:
    """The file that lists what may be drafted, or how that follows the text."""
    given = draft.token_map
    if not isinstance(given, DynamicMap):
        return given
    first: list[int] = []
    if given.start is not None:
        flag = "--speculative-token-map-start"
        first = read_named_map(flag, given.start, config.model.vocab_size).tolist()
    kept = special_tokens(config.tokenizer_path, config.model)
    return MapPlan(size=given.size, interval=given.interval, start=first, kept=kept)

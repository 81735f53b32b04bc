"""From settings to a running engine: weights, draft, pool, state, scheduler."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from specserve.attention import ATTENTION, AttentionBackend
from specserve.config import Settings
from specserve.config.token_map import DYNAMIC
from specserve.core import prediction_limit
from specserve.engine.graphs import Graphs
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
from specserve.kv.pool import KVPool, PoolConfig
from specserve.kv.spec import HeadKV, KVSpec
from specserve.layers.linear import pack_linears
from specserve.models.checkpoint import DTYPES, load_target
from specserve.models.config import ModelConfig
from specserve.models.draft.token_map import read_named_map
from specserve.models.llama import LlamaModel
from specserve.models.special_tokens import special_tokens
from specserve.scheduler.admission import Admission, Capacity
from specserve.scheduler.memory import Memory
from specserve.scheduler.observers import DynamicMapObserver
from specserve.scheduler.scheduler import Limits, Scheduler
from specserve.speculation.context import Context, Drafter
from specserve.speculation.control.adaptive import Controller
from specserve.speculation.drafters import load_drafter
from specserve.speculation.drafters.none import NoDrafter
from specserve.speculation.drafters.options import DraftOptions
from specserve.speculation.dynamic_map import MapPlan
from specserve.speculation.state import DecodeState

log = logging.getLogger(__name__)

ROUNDINGS = {"none": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
FP8_CAPABILITY = (8, 9)  # of the first GPUs that turn FP8 into other numbers by themselves


def create_scheduler(settings: Settings, model_config: ModelConfig) -> Scheduler:
    """Loads everything that resolved settings name. Raises ValueError for what cannot be served."""
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    assert settings.context_length
    plan = shape_plan(settings)
    context = create_context(settings, model_config, plan)
    captured = plan.captured()
    graphs = (
        Graphs.capture(context, captured, sizes_within(settings.context_length)) if captured else Graphs({})
    )
    policy = shape_policy(plan, context, graphs)
    runner = Runner(context, graphs.steps, graphs.prompts)
    if settings.device == "cuda":
        runner.warm_up(longest_launch(settings))
    return assemble(settings, model_config, plan, runner, policy, graphs)


def longest_launch(settings: Settings) -> int:
    """Most tokens of one prompt that a launch has, where a token is to follow them."""
    assert settings.chunked_prefill_size and settings.context_length
    return min(settings.chunked_prefill_size, settings.context_length - 1)


def assemble(
    settings: Settings,
    model_config: ModelConfig,
    plan: ShapePlan,
    runner: Runner,
    policy: ShapePolicy,
    graphs: Graphs,
) -> Scheduler:
    """A scheduler with pages and requests of its own over a loaded engine."""
    assert settings.max_running_requests and settings.context_length and settings.chunked_prefill_size
    context = runner.context
    pool = context.pool
    memory = Memory(pool.num_pages, pool.page_size, prefix_cache=not settings.disable_radix_cache)
    capacity = Capacity(
        context_length=settings.context_length,
        pool_tokens=memory.allocator.capacity * pool.page_size,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        all_greedy=settings.requests_all_greedy,
    )
    limits = Limits(
        max_running_requests=settings.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size,
        headroom=plan.headroom,
        overlap=_overlap(settings, context.drafter),
    )
    info: dict[str, object] = {
        "context_length": capacity.context_length,
        "max_total_tokens": capacity.pool_tokens,
        "num_pages": memory.allocator.capacity,
        "page_size": pool.page_size,
        "vocab_size": capacity.vocab_size,
        "eos_token_ids": list(capacity.eos_token_ids),
        "speculation": _speculation_info(plan),
        "cuda_graphs": {
            "count": len(graphs.steps) + len(graphs.prompts),
            "seconds": round(graphs.seconds, 2),
            "memory_bytes": graphs.memory_bytes,
        },
    }
    admission = Admission(capacity, settings.random_seed)
    live_map = context.drafter.live_map
    observers = [DynamicMapObserver(live_map, runner)] if live_map is not None else []
    return Scheduler(runner, memory, admission, limits, policy, info, observers)


def _overlap(settings: Settings, drafter: Drafter) -> bool:
    """Whether results of a step are handled while the next one runs."""
    wanted = settings.overlap_schedule == "on"
    if wanted and drafter.needs.tokens_on_host:
        log.info("overlap is off: %s wants each step's tokens before the next", drafter.name)
        return False
    return wanted


def static_shape(settings: Settings) -> tuple[int, int, int] | None:
    """Steps, topk and tokens of every step; None for plain decoding."""
    steps, topk = settings.speculative_num_steps, settings.speculative_eagle_topk
    tokens = settings.speculative_num_draft_tokens
    return None if steps is None or topk is None or tokens is None else (steps, topk, tokens)


def shape_plan(settings: Settings) -> ShapePlan:
    """The shapes that steps may have; those within the buckets are captured."""
    largest, running = settings.cuda_graph_max_bs, settings.max_running_requests
    assert running is not None
    padding = Padding(batch_buckets(largest) if largest is not None else ())
    return ShapePlan(static_shape(settings), bool(settings.speculative_adaptive), running, padding)


def shape_policy(plan: ShapePlan, context: Context, graphs: Graphs) -> ShapePolicy:
    """What chooses among them; measured costs first, where it needs them."""
    if not plan.adaptive:
        return StaticShapes(plan.speculation, plan.padding)
    if graphs.steps:
        cost = measure_graphs(context, graphs.steps)
    else:
        cost = measure_eager(context, plan.most_slots, plan.candidates)
    complete(cost, plan.most_slots, plan.candidates)
    cost.prompts = min(seconds for shape, seconds in cost.table.items() if not shape.levels)
    return AdaptiveShapes(Controller(plan.candidates, cost), plan.padding)


def _speculation_info(plan: ShapePlan) -> object:
    if plan.adaptive:
        return "adaptive"
    return plan.speculation and dict(zip(("steps", "topk", "tokens"), plan.speculation, strict=True))


def create_context(settings: Settings, model_config: ModelConfig, plan: ShapePlan) -> Context:
    """Target, draft, pool and state on the device."""
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    assert settings.max_running_requests and settings.context_length and settings.model_path
    positions = slot_positions(settings, plan)
    target = load_target(Path(settings.model_path), dtype, device, max_positions=positions)
    drafter = create_drafter(settings, target, positions, dtype)
    pack_linears(target)  # last: a draft may pick rows of the plain head
    pool_config = PoolConfig(
        target=target_kv(model_config, dtype),
        draft=drafter.kv,
        feature_size=drafter.needs.feature_size,
        page_size=settings.page_size,
        dtype=dtype,
    )
    pages = pool_pages(pool_config, settings.max_total_tokens, settings.mem_fraction_static, device)
    attention = _attention(settings, pool_config)
    state = DecodeState(
        slots=settings.max_running_requests,
        positions=positions,
        page_size=settings.page_size,
        feature_size=pool_config.feature_size,
        vocab_size=model_config.vocab_size,
        dtype=dtype,
        sampler_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        device=device,
        prediction_size=prediction_limit(settings.context_length) if drafter.vocab_size else 0,
    )
    pool = _pool(pool_config, pages, device)
    return Context(target, drafter, pool, attention, state, model_config.vocab_size)


def target_kv(config: ModelConfig, dtype: torch.dtype) -> list[KVSpec]:
    """What each of the target's layers keeps of a token."""
    return [HeadKV(layer.num_kv_heads, layer.head_dim, dtype) for layer in config.layers]


def slot_positions(settings: Settings, plan: ShapePlan) -> int:
    """Positions of one slot: a context, what steps may write past it, and the rest of the last page."""
    assert settings.context_length
    return -(-(settings.context_length + plan.margin) // settings.page_size) * settings.page_size


def _pool(config: PoolConfig, pages: int, device: torch.device) -> KVPool:
    """Raises ValueError where the device has not so much memory."""
    try:
        return KVPool(config, pages, device)
    except RuntimeError as error:
        if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            raise
        tokens, size = pages * config.page_size, pages * config.page_bytes / 2**30
        raise ValueError(
            f"--max-total-tokens: a KV pool of {tokens} tokens takes {size:.1f} GiB, which the {device.type} does not "
            "have; expected fewer tokens"
        ) from None


def _attention(settings: Settings, pool: PoolConfig) -> AttentionBackend:
    """Raises ValueError naming one that serves all layers, where the one of the settings does not."""
    attention = ATTENTION[settings.attention_backend](pool.page_size, pool.dtype)
    for whose, specs in {"target": pool.target, "draft": pool.draft}.items():
        for spec in dict.fromkeys(specs):
            if reasons := attention.unsupported(spec, pool.page_size):
                raise ValueError(
                    f"--attention-backend {attention.name} cannot serve the {whose}'s {spec}: "
                    f"{'; '.join(reasons)}; use torch, which serves all, without CUDA graphs"
                )
    return attention


def create_drafter(settings: Settings, target: LlamaModel, positions: int, dtype: torch.dtype) -> Drafter:
    """Load the drafter that the settings name."""
    if settings.method is None:
        return NoDrafter()
    path = Path(settings.speculative_draft_model_path or "")  # a method without a checkpoint reads none
    drafter = load_drafter(
        settings.speculative_algorithm,
        path,
        target,
        target.config.num_layers,
        positions,
        dtype,
        DraftOptions(
            _token_map(settings, target.config),
            settings.speculative_draft_config_override,
            _rounding(settings, target),
        ),
    )
    topk, size = settings.speculative_eagle_topk or 1, drafter.vocab_size
    if topk > size:
        raise ValueError(f"--speculative-eagle-topk: the draft {path} has {size} tokens, found {topk}")
    return drafter


def _rounding(settings: Settings, target: LlamaModel) -> torch.dtype | None:
    """What the draft's weights are rounded to. Raises ValueError where the GPU has no such numbers."""
    wanted = ROUNDINGS[settings.speculative_draft_quantization]
    on_gpu = target.device.type == "cuda"
    if wanted is torch.float8_e4m3fn and on_gpu and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ValueError(
            "--speculative-draft-quantization fp8 needs a GPU of compute capability 8.9 or more, this one has "
            f"{found}: accepted are auto, none and int8"
        )
    return wanted


def _token_map(settings: Settings, config: ModelConfig) -> Path | MapPlan | None:
    """The file that lists what may be drafted, or how that follows the text."""
    given, start = settings.speculative_token_map, settings.speculative_token_map_start
    if given != DYNAMIC:
        return None if given is None else Path(given)
    assert settings.speculative_token_map_interval and settings.model_path
    first: list[int] = []
    if start is not None:
        first = read_named_map("--speculative-token-map-start", Path(start), config.vocab_size).tolist()
    return MapPlan(
        size=settings.speculative_token_map_size,
        interval=settings.speculative_token_map_interval,
        start=first,
        kept=special_tokens(Path(settings.tokenizer_path or settings.model_path), config),
    )

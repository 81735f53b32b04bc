"""Build a running engine from settings: weights, draft, pool, state, scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from specserve_kernels import KVScales

from specserve.attention import attention_for
from specserve.attention.torch import LANES
from specserve.config import Settings, resolve, resolve_paths
from specserve.config.choices import DUMMY
from specserve.config.engine import EngineConfig
from specserve.config.notes import CHOSEN, Notes, log_notes
from specserve.config.sampling import resolve_sampling
from specserve.config.settings import FP8_KV
from specserve.constraints.grammar import MISSING
from specserve.constraints.masks import Masks
from specserve.constraints.matcher import Grammars
from specserve.core import MAX_COUNT, Capacity, prediction_limit
from specserve.engine.commands import Measure
from specserve.engine.graphs import Graphs
from specserve.engine.kernels import settle_keys
from specserve.engine.memory import (
    DeviceMemory,
    count_bytes,
    device_memory,
    parts_of,
    pool_pages,
    return_memory,
)
from specserve.engine.profile import complete, measure_eager, measure_graphs
from specserve.engine.prompts import sizes_within
from specserve.engine.runner import Runner
from specserve.engine.shapes import (
    Padding,
    ShapePlan,
    ShapePolicy,
    StaticShapes,
    batch_buckets,
)
from specserve.engine.threads import choose_threads, usable_cores
from specserve.kv.layout import Layout, lay_out
from specserve.kv.pool import KVPool, PoolConfig
from specserve.kv.spec import KVSpec
from specserve.kv.states import States
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.formats.stored import FP8_CAPABILITY
from specserve.layers.linear import QUANTIZED, add_in_order, pack_linears
from specserve.layers.ranks import ONE, Ranks
from specserve.messages import EngineInfo
from specserve.models import read_config
from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES, load_target
from specserve.models.config import ModelConfig
from specserve.models.kv_scales import has_kv_scales, read_kv_scales
from specserve.process import gpu_peers, phase
from specserve.process.fingerprint import fingerprint
from specserve.process.followers import Followers
from specserve.process.spares import Spares
from specserve.scheduler.admission import Admission
from specserve.scheduler.limits import Limits
from specserve.scheduler.memory import Memory
from specserve.scheduler.observers import (
    AnswersObserver,
    ContinuationObserver,
    DraftTemperatureObserver,
    DynamicMapObserver,
    Observer,
)
from specserve.scheduler.points import Snapshots
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context, Drafter
from specserve.speculation.control.acceptance import Acceptance
from specserve.speculation.control.adaptive import Controller
from specserve.speculation.datastore import Datastore
from specserve.speculation.drafters import load_drafter
from specserve.speculation.earlier_answers import BYTES, AnswerIndex
from specserve.speculation.shape import StepShape
from specserve.speculation.state import DecodeState
from specserve.speculation.synthetic import SyntheticAcceptance

log = logging.getLogger(__name__)


def resolve_engine(
    given: Settings,
    with_front: bool = False,
    has_gpu: bool | None = None,
    there: DeviceMemory | None = None,
) -> tuple[Settings, Notes, EngineConfig]:
    """Make every automatic choice and log the reasons. Return the settings, the reasons, and the engine's
    configuration.

    ``with_front``: another process needs a core. ``has_gpu`` and ``there``, a GPU's memory, None: ask this machine.
    Raises ValueError naming the setting that can't be honoured.
    """
    given, notes = resolve_paths(given)
    assert given.model_path is not None
    assert given.tokenizer_path is not None
    try:
        random = "" if given.load_format == DUMMY else None
        model = read_config.load_model_config(Path(given.model_path), Path(given.tokenizer_path), random)
    except ValueError as error:
        raise ValueError(f"--model-path: {error}") from None
    settings, more = resolve(given, model, has_gpu)
    if (fit := _fitting_requests(given, settings, model, there)) < (settings.max_running_requests or 0):
        settings, more = resolve(replace(given, max_running_requests=fit), model, has_gpu)
        more[f"max_running_requests = {fit}: half of the memory next to the weights is for states"] = CHOSEN
    notes |= more | dict.fromkeys(model.notes, CHOSEN)
    defaults = resolve_sampling(settings, notes)
    config = _config(settings, model, with_front)
    model = config.model
    if words := model.weights.words:
        plain = settings.device == "cpu" or settings.dtype == "float64"
        if plain:
            how = "dequantized while loading; inputs of FP8 projections are rounded to FP8"
        else:
            others = "of integers to 15 bits (from compute capability 8.0 on)"
            if settings.dtype == "float32":
                others = "weights of others dequantized while loading"
            how = f"inputs of FP8 projections are rounded to FP8, {others}"
        notes[f"weights: {words}; {how}"] = CHOSEN
    log_notes(log, notes)
    return settings, notes, replace(config, request_defaults=defaults)


def _config(settings: Settings, model: ModelConfig, with_front: bool = False) -> EngineConfig:
    if settings.quantization != "none":
        model = model.with_weights(RoundedWeights(settings.quantization))
    # OpenMP threads spin at barriers: one without a core delays all (docs/decisions/0006-engine-threads.md).
    cores = max(1, (usable_cores() - with_front) // settings.tensor_parallel_size)
    return EngineConfig.of(settings, model, cores)


def _fitting_requests(
    given: Settings, settings: Settings, model: ModelConfig, there: DeviceMemory | None
) -> int:
    """Return how many requests run by default: on a GPU no more than have states in half of the memory that weights
    leave, if the settings say nothing of their number."""
    named = given.max_running_requests is not None or settings.max_mamba_cache_size is not None
    if named or not model.states or settings.device != "cuda" or not (there or torch.cuda.is_available()):
        return MAX_COUNT
    config = replace(_config(settings, model), max_running_requests=1, max_mamba_cache_size=None)
    package = logging.getLogger("specserve")
    level = package.level
    package.setLevel(logging.ERROR)  # what loads it says the same
    try:
        context = create_shapes(config, launches=False)
    except ValueError:
        return MAX_COUNT
    finally:
        package.setLevel(level)
    assert context.states is not None
    weights = count_bytes([context.target, *parts_of(context.drafter)], set())
    free = (there or device_memory(config.device)).within(config.mem_fraction_static) - weights
    fit = max(1, int(free / 2 * context.states.rows / context.states.nbytes) - 1)  # one is padding's
    return fit if fit < 8 else fit // 8 * 8


def create_scheduler(
    config: EngineConfig, before_launch: Callable[[], None] = lambda: None, spares: Spares | None = None
) -> Scheduler:
    """Load everything that the configuration names, also in the processes of other ranks, which are taken from
    ``spares`` or started. Raises ValueError for what can't be served. ``before_launch`` is called after the weights are
    loaded and before the first launch."""
    if config.tensor_parallel_size == 1:
        return _create(config, before_launch, None)
    with spares or Spares(config.tensor_parallel_size) as others:
        followers = Followers(config, others)
    try:
        return _create(config, before_launch, followers)
    except BaseException:
        followers.close()
        raise


def _create(
    config: EngineConfig, before_launch: Callable[[], None], followers: Followers | None
) -> Scheduler:
    if config.device == "cuda":
        set_up_gpu()
    plan, ranks = shape_plan(config), ONE if followers is None else followers.ranks
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    context = create_context(config, plan, ranks)
    if followers is not None:
        torch.set_num_threads(config.threads)
    elif config.device == "cpu" and config.cpu_threads is None:
        phase.enter("choosing threads")
        choose_threads(context, min(config.cores, torch.get_num_threads()))
    before_launch()
    graphs = capture_graphs(config, plan, context, ranks)
    runner = Runner(context, graphs, followers)
    if config.device == "cuda":
        phase.enter("warming up")
        runner.warm_up(config.longest_launch)
    if followers is not None:
        phase.enter("waiting for the other ranks")
        followers.wait()
        log.info("%d ranks, %d threads each", config.tensor_parallel_size, config.threads)
    return assemble(config, plan, runner, shape_policy(plan, runner))


def set_up_gpu() -> None:
    """Make the process compute as all others do."""
    settle_keys()
    add_in_order()


def capture_graphs(config: EngineConfig, plan: ShapePlan, context: Context, ranks: Ranks) -> Graphs:
    """Capture what is captured at start, on all ranks at a time."""
    if not (captured := plan.captured()):
        return Graphs({})
    ranks.least(0)  # rank 0 has had its kernels compiled, and others find them in the cache
    phase.enter("capturing CUDA graphs")
    sizes = sizes_within(config.context_length, config.chunked_prefill_size)
    return Graphs.capture(context, captured, sizes, ranks)


def assemble(config: EngineConfig, plan: ShapePlan, runner: Runner, policy: ShapePolicy) -> Scheduler:
    """Make a scheduler with its own pages and requests for a loaded engine."""
    context, graphs = runner.context, runner.graphs
    pool = context.pool
    kept, windows = context.snapshots, pool.config.layout.windows
    snapshots = None if kept is None else Snapshots(kept.rows, config.model.eos_token_ids, kept.entries // 2)
    memory = Memory(pool.num_pages, pool.page_size, config.prefix_cache, windows, snapshots)
    use = pool.config.use(memory.allocator.capacity, config.context_length)
    capacity = Capacity(
        context_length=config.context_length,
        pool_tokens=use.longest_request,
        vocab_size=config.model.vocab_size,
        all_greedy=config.all_greedy,
    )
    limits = Limits(
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
        headroom=plan.headroom,
        drafts=bool(context.drafter.vocab_size),
        overlap=config.overlap,
        windows=_windows(pool.config.target),
    )
    no_grammars = _prepare_grammars(config, runner)
    place = {"device": str(context.state.device), "pid": os.getpid()}
    info = EngineInfo(
        no_grammars=no_grammars,
        context_length=capacity.context_length,
        max_total_tokens=capacity.pool_tokens,
        num_pages=memory.allocator.capacity,
        page_size=pool.page_size,
        kv_pool=asdict(use),
        states={} if context.states is None else _states_info(context.states, kept),
        vocab_size=capacity.vocab_size,
        eos_token_ids=list(config.model.eos_token_ids),
        request_defaults=dict(config.request_defaults),
        system_fingerprint=context.fingerprint,
        speculation=_speculation_info(plan),
        cuda_graphs={
            "count": len(graphs.steps) + len(graphs.prompts) + len(graphs.catch_ups),
            "seconds": round(graphs.seconds, 2),
            "memory_bytes": graphs.memory_bytes,
        },
        ranks=[place] if runner.followers is None else runner.followers.places,
    )
    admission = Admission(capacity, config.model.eos_token_ids, config.random_seed, no_grammars)
    return Scheduler(runner, memory, admission, limits, policy, info, _observers(config, runner))


def _states_info(states: States, kept: States | None) -> dict[str, int]:
    prefixes, size = (0, 0) if kept is None else (kept.rows, kept.nbytes)
    return {"requests": states.rows - 1, "prefixes": prefixes, "memory_bytes": states.nbytes + size}


def _windows(specs: Sequence[KVSpec]) -> list[tuple[int, float]]:
    """Return the windows of layers, and the share of their bytes in those of all."""
    sizes = Counter[int]()
    for spec in specs:
        sizes[spec.window or MAX_COUNT] += spec.token_bytes
    return [(window, size / sizes.total()) for window, size in sizes.items()]


def _observers(config: EngineConfig, runner: Runner) -> list[Observer]:
    """Return the observers through which the drafter follows the texts."""
    drafter, observers = runner.context.drafter, list[Observer]()
    if drafter.dynamic_map is not None:
        observers.append(DynamicMapObserver(drafter.dynamic_map, runner))
    guesses = config.draft is not None and config.draft.method.needs_draft and not config.draft.synthetic
    if guesses and not config.all_greedy:
        observers.append(DraftTemperatureObserver(runner))
    longest = drafter.continuation
    if longest and config.draft is not None and config.draft.datastore is not None:
        store = Datastore(config.draft.datastore, config.model.vocab_size)
        words = "datastore: %d tokens of %d bits in %d chunks, mapped"
        log.info(words, store.size, 8 * store.token_bytes, len(store.chunks))
        observers.append(ContinuationObserver(store, runner, longest))
    elif longest and config.draft is not None and config.draft.recalled:
        answers = AnswerIndex(config.draft.recalled)
        words = "earlier answers: up to %d tokens in %.0f MiB"
        log.info(words, answers.capacity, answers.capacity * BYTES / 2**20)
        observers.append(AnswersObserver(answers, runner, longest))
    return observers


def _prepare_grammars(config: EngineConfig, runner: Runner) -> str | None:
    """Enable grammars. Return why requests can't use them, or None."""
    if config.draft is not None and config.draft.synthetic:
        return "this server draws acceptance (--speculative-synthetic-acceptance), so no grammar could hold"
    vocabulary = config.tokenizer_path / "tokenizer.json"
    try:
        ends = config.model.eos_token_ids
        threads = config.cpu_threads or config.cores
        grammars = Grammars(vocabulary, config.model.vocab_size, ends, threads)
    except ImportError:
        return MISSING
    except ValueError as error:
        return str(error)
    runner.masks = Masks(grammars)
    return None


def shape_plan(config: EngineConfig) -> ShapePlan:
    """Return the shapes that steps may have. Those of batches up to ``largest_graph`` are captured."""
    slots, largest = config.max_running_requests, config.largest_graph or 0
    eager = tuple(size for size in batch_buckets(slots) if size > largest) if config.device == "cuda" else ()
    padding = Padding(batch_buckets(largest) if largest else (), eager)
    return ShapePlan(config.shape, config.adaptive, slots, padding, config.drafts, config.most_slowdown)


def shape_policy(plan: ShapePlan, runner: Runner) -> ShapePolicy:
    """Return the policy that chooses shapes, after measuring costs if it needs them."""
    if not plan.adaptive:
        return StaticShapes(plan.speculation, plan.padding, plan.drafts)
    phase.enter("measuring steps")
    begin, graphs = time.perf_counter(), runner.graphs

    def run(shape: StepShape, length: int = 1) -> float:
        return runner.measure(Measure(shape, length))

    if graphs.steps:
        cost = measure_graphs(runner.context, graphs.steps, run)
    else:
        cost = measure_eager(runner.context, plan.most_slots, plan.candidates, run)
    log.info("measured %d steps in %.1f s", len(cost.table), time.perf_counter() - begin)
    complete(cost, plan.most_slots, plan.candidates)
    cost.prompts = min(seconds for shape, seconds in cost.table.items() if not shape.levels)

    def captured(slots: int) -> list[StepShape]:
        """Return plain decoding and the shapes that have graphs by now; all shapes on an engine without graphs."""
        plain, *drafted = plan.candidates(slots)
        return [plain, *(shape for shape in drafted if shape in graphs.steps or not graphs.steps)]

    acceptance = Acceptance(searches=plan.drafts.copies == "all")
    return Controller(captured, cost, acceptance, plan.most_slowdown)


def _speculation_info(plan: ShapePlan) -> object:
    if plan.adaptive:
        return "adaptive"
    return plan.speculation and dict(zip(("steps", "topk", "tokens"), plan.speculation, strict=True))


def create_context(config: EngineConfig, plan: ShapePlan, ranks: Ranks = ONE) -> Context:
    """Create target, or a rank's part of it, draft, pool and state on the device."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    check_fp8(config)
    # Of a slot: a context, what steps may write past it, and the rest of the last pages.
    whole = max(config.page_size, LANES)
    positions = -(-(config.context_length + plan.margin) // whole) * whole
    phase.enter("reading the model's weights")
    kept = _kept(config, config.model.on(ranks).kv(dtype), config.model_path, "target")
    scales = [spec.scales for spec in kept]
    target = load_target(config.model_path, dtype, device, positions, config.model, ranks)
    if isinstance(ranks.peers, gpu_peers.GpuPeers):
        ranks.peers.connect()
    identity = None if config.device == "meta" else fingerprint(target, config, scales, ranks)
    phase.enter("reading the draft")
    drafter = create_drafter(config, target)
    pack_linears(target)  # last: a draft may take rows of the head before it is packed
    pool_config = PoolConfig(
        target=kept,
        draft=(draft := _kept(config, drafter.kv, config.draft.path if config.draft else Path(), "draft")),
        layout=_layout(config, plan, kept, draft, drafter.needs.before_windows),
        feature_size=drafter.needs.feature_size,
        dtype=dtype,
        token_feature_size=drafter.needs.token_feature_size,
    )
    drafter.allocate(config.max_running_requests + 1, device)
    _check_states(config, ranks)
    states = _states(config, config.max_running_requests + 1, device, ranks, "running requests and padding")
    snapshots = _states(config, config.snapshots or 0, device, ranks)
    longest, fraction = config.context_length, config.mem_fraction_static
    share = fraction / ranks.count if device.type == "cpu" else fraction
    beside = ranks.count * sum(each.nbytes for each in (states, snapshots) if each is not None)
    given = config.max_total_tokens
    sharing = gpu_peers.sharing(ranks.count) if device.type == "cuda" and given is None else 1
    if sharing > 1:
        ranks.least(0)  # all have read their weights
    extra = snapshot_bytes(config, pool_config, states)
    pages = pool_pages(pool_config, given, share, device, longest, beside, extra) // sharing
    pages = ranks.least(pages)
    if states is not None and config.snapshots is None:
        snapshots = _states(config, fitting(config, pool_config, pages, states), device, ranks)
    if config.max_total_tokens is None:
        check_context(config, pool_config.layout.longest(pages - 1, longest), beside)
    phase.enter("making the KV pool")
    attention = attention_for(config.attention_backend, pool_config)
    state = DecodeState(
        slots=config.max_running_requests,
        positions=positions,
        page_size=config.page_size,
        feature_size=pool_config.feature_size,
        vocab_size=config.model.vocab_size,
        dtype=dtype,
        device=device,
        prediction_size=prediction_limit(config.context_length) if drafter.vocab_size else 0,
        tables=len(pool_config.layout.windows),
    )
    pool = _pool(pool_config, pages, device, config.context_length)
    rates = config.draft.synthetic if config.draft is not None else ()
    synthetic = SyntheticAcceptance.of(rates, device) if rates else None
    vocabulary = config.model.vocab_size
    return Context(
        target, drafter, pool, attention, state, vocabulary, synthetic, states, snapshots, identity
    )


def snapshot_bytes(config: EngineConfig, pool: PoolConfig, states: States | None) -> float:
    """Return the bytes that snapshots take beside each page, if their number is not given: at most one's, as there is
    at most one at each page's end."""
    if config.snapshots is not None or states is None:
        return 0
    return min(config.mamba_full_memory_ratio * pool.page_bytes, states.nbytes / states.rows)


def fitting(config: EngineConfig, pool: PoolConfig, pages: int, states: States) -> int:
    """Return how many snapshots are kept beside a pool of so many pages."""
    return max(int(snapshot_bytes(config, pool, states) * pages * states.rows / states.nbytes), 1)


def create_shapes(config: EngineConfig, launches: bool = True) -> Context:
    """Create the same context without data, on ``meta``, which counts as a GPU, with a pool of one page. ``launches``:
    what ranks exchange by can be launched, for which Triton is needed."""
    shapes = replace(config, device="meta", max_total_tokens=config.page_size)
    several = launches and config.tensor_parallel_size > 1
    peers = gpu_peers.ShapePeers(config.tensor_parallel_size) if several else None
    return create_context(shapes, shape_plan(config), config.place(0, peers))


def _kept(config: EngineConfig, specs: Sequence[KVSpec], path: Path, whose: str) -> Sequence[KVSpec]:
    """Return the layers' specs in the KV cache's dtype; for FP8, with the scales of the checkpoint at ``path``. A draft
    head inside the target's checkpoint does not use the target's scales; random weights have none."""
    if config.kv_cache_dtype != FP8_KV or not specs:
        if whose == "target" and config.model.random is None and has_kv_scales(path):
            log.info("the checkpoint's KV scales are unused: --kv-cache-dtype %s uses them", FP8_KV)
        return specs
    unscaled = config.model.random is not None or (whose == "draft" and path == config.model_path)
    numbers = config.model.kv_numbers if whose == "target" else range(len(specs))
    found = [] if unscaled else read_kv_scales(path, max(numbers) + 1)
    scales = [None if unscaled else found[number] for number in numbers]
    scaled = sum(each is not None for each in scales)
    log.info("%s: FP8 KV cache, %d of %d layers with scales in the checkpoint", whose, scaled, len(scales))
    return [spec.in_fp8(each or KVScales()) for spec, each in zip(specs, scales, strict=True)]


def what_states_take(size: int) -> str:
    """Return the end of a line about too little memory, next to states of so many bytes."""
    return f"; states take {size / 2**30:.1f} GiB, less with a smaller --max-running-requests" if size else ""


def check_context(config: EngineConfig, held: int, states: int) -> None:
    """Warn that a pool of ``held`` tokens, sized by the memory there is next to ``states`` bytes of them, holds no
    whole context. Raises ValueError if the context was chosen, that is, is shorter than the model's."""
    wanted, (longest, _) = config.context_length, config.model.longest_context
    if wanted <= held:
        return
    words = f"--context-length: the memory that is free next to the weights holds {held} tokens of KV cache"
    more = what_states_take(states)
    if wanted < longest:
        raise ValueError(f"{words}, expected at most that, found {wanted}{more}")
    log.warning("%s, fewer than the model's %d: longer requests are refused%s", words, wanted, more)


def _layout(
    config: EngineConfig, plan: ShapePlan, target: Sequence[KVSpec], draft: Sequence[KVSpec], before: int
) -> Layout:
    """Return where the layers' caches lie. The drafter reads ``before`` tokens before the target's windows. Its own
    layers keep all tokens: it may be steps behind, and store what it missed."""
    whole = config.disable_hybrid_kv_cache_manager
    windows = [None if whole or spec.window is None else spec.window + before for spec in target]
    layers = [(spec.token_bytes, window) for spec, window in zip(target, windows, strict=True)]
    layers += [(spec.token_bytes, None) for spec in draft]
    ahead = config.chunked_prefill_size, plan.margin
    return lay_out(layers, config.context_length, config.page_size, *ahead)


def _pool(config: PoolConfig, pages: int, device: torch.device, context_length: int) -> KVPool:
    """Create the pool. Raises ValueError if the device has too little memory."""
    begin = time.perf_counter()
    use, size = config.use(pages - 1, context_length), pages * config.page_bytes / 2**30
    tokens = use.tokens_without_groups
    try:
        pool = KVPool(config, pages, device)
    except (RuntimeError, OSError) as error:
        if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"--max-total-tokens: a KV pool of {tokens} tokens takes {size:.1f} GiB, more than the {device.type} "
            "has; expected fewer tokens"
        ) from None
    if device.type != "meta":
        seconds = time.perf_counter() - begin
        log.info("the KV pool holds %d tokens in %.2f GiB, made in %.1f s", tokens, size, seconds)
        if any(config.layout.windows):
            words = (
                "sliding windows free pages: it holds %d requests of %d tokens at a time, the longest has %d"
            )
            log.info(words, use.full_contexts, context_length, use.longest_request)
    return pool


def _check_states(config: EngineConfig, ranks: Ranks) -> None:
    """Raise ValueError if the memory that is free next to the weights does not hold the states that settings name."""
    layers, kept = config.model.on(ranks).states, config.snapshots or 0
    if not layers or config.device == "meta":
        return
    dtypes = DTYPES[config.dtype], torch.device("cpu"), DTYPES.get(config.mamba_ssm_dtype)
    size, wanted = States(layers, 1, *dtypes).nbytes, config.max_running_requests + kept
    return_memory()
    memory = device_memory(config.device)
    free = memory.free // (ranks.count if config.device == "cpu" else 1)
    if config.device == "cuda" and config.max_total_tokens is None:
        free = max(0, memory.within(config.mem_fraction_static))
    fit = max(0, free // size - 1)  # one is padding's
    if wanted > fit:
        flag = "--max-mamba-cache-size" if kept else "--max-running-requests"
        raise ValueError(
            f"{flag}: {wanted} states take {wanted * size / 2**30:.1f} GiB, {free / 2**30:.1f} are free next to the "
            f"weights; expected at most {fit}"
        )


def _states(
    config: EngineConfig, rows: int, device: torch.device, ranks: Ranks, whose: str = "cached prefixes"
) -> States | None:
    """Make so many states of the layers that keep one; None if there are none."""
    layers = config.model.on(ranks).states
    if not layers or not rows:
        return None
    dtypes = DTYPES[config.dtype], device, DTYPES.get(config.mamba_ssm_dtype)
    states = States(layers, rows, *dtypes, config.page_size)
    if device.type != "meta":
        log.info("%d states of %s take %.2f GiB", rows, whose, states.nbytes / 2**30)
    return states


def create_drafter(config: EngineConfig, target: TargetModel) -> Drafter:
    """Load the drafter that the settings name."""
    draft = config.draft
    if draft is None:
        return Drafter()
    drafter = load_drafter(draft, target)
    if draft.topk > (size := drafter.vocab_size):
        raise ValueError(
            f"--speculative-eagle-topk: the draft {draft.path} has {size} tokens, found {draft.topk}"
        )
    return drafter


def check_fp8(config: EngineConfig) -> None:
    """Raise ValueError if the GPU does not support FP8 and the settings need it."""
    if config.device != "cuda" or torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        return
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    needs = f"needs a GPU of compute capability 8.9 or more, this one has {capability}: accepted are"
    if config.kv_cache_dtype == FP8_KV:
        raise ValueError(f"--kv-cache-dtype {FP8_KV} {needs} auto and {config.dtype}")
    if config.draft is not None and QUANTIZED.get(config.draft.quantization) is torch.float8_e4m3fn:
        raise ValueError(f"--speculative-draft-quantization fp8 {needs} auto, none and int8")

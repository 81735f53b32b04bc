"""Device memory: expected from the files before anything is loaded, and measured on a loaded engine."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specserve.attention import attention_for
from specserve.config.engine import EngineConfig
from specserve.engine.memory import (
    DeviceMemory,
    count_bytes,
    device_memory,
    host_tokens,
    parts_of,
    tensors_of,
)
from specserve.kv.pool import PoolConfig
from specserve.kv.states import States
from specserve.layers.experts import Experts
from specserve.layers.formats.stored import StoredProjection
from specserve.layers.linear import PLAIN
from specserve.layers.ranks import Share
from specserve.layers.weights import Projection
from specserve.models.checkpoint import DTYPES, READERS, load_target
from specserve.process.assemble import create_shapes, fitting, shape_plan, snapshot_bytes
from specserve.process.compile import captured_launches, without_kernels
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context
from specserve.tools.check.report import MemoryUse

_KV_HEADS, _LATENT = "KV heads", "latent in the KV cache"  # which several ranks may have


def memory_needed(engine: Scheduler) -> MemoryUse:
    context = engine.runner.context
    ranks = 1 if engine.runner.followers is None else engine.runner.followers.ranks.count
    found = _memory_of(context, context.pool.num_pages, engine.info.context_length, ranks)
    return replace(
        found,
        graphs=engine.info.cuda_graphs["memory_bytes"],
        longest_request=engine.info.kv_pool["longest_request"],
        full_contexts=engine.info.kv_pool["full_contexts"],
    )


def _memory_of(context: Context, pages: int, context_length: int, ranks: int) -> MemoryUse:
    """Return the memory of an engine whose pool has so many pages."""
    config, seen = context.pool.config, set[int]()
    use = config.use(pages, context_length)
    shared = set(map(id, _shared(context.target)))
    experts = Counter(each.words for each in context.target.modules() if isinstance(each, Experts))
    return MemoryUse(
        device=str(context.state.device),
        loaded=True,
        weights=count_bytes([context.target], seen),
        whole=count_bytes([context.target], shared) if ranks > 1 else 0,
        draft=count_bytes(parts_of(context.drafter), seen),
        kv_per_token=config.whole_page_bytes // config.page_size,
        pool_tokens=use.tokens_without_groups,
        pool=pages * config.page_bytes,
        states=_states(context),
        prefixes=0 if context.snapshots is None else context.snapshots.rows,
        experts=tuple(f"experts of {layers} layers: {words}" for words, layers in experts.items()),
        graphs=0,
        loading=0,
        longest_request=use.longest_request,
        full_contexts=use.full_contexts,
        ranks=ranks,
    )


def expected_memory(config: EngineConfig, there: DeviceMemory | None = None) -> MemoryUse:
    """Return the memory of an engine assembled on the meta device. ``there``: that of a device to plan for.
    Without it a refused draft counts as nothing; with it, raises ValueError."""
    try:
        context = _assemble_shapes(config)
    except ValueError:  # reported by _draft or by loading
        if there is not None:
            raise
        config = replace(config, draft=None, shape=None, adaptive=False)
        context = _assemble_shapes(config)
    sizes = config.context_length, config.tensor_parallel_size
    found = _memory_of(context, context.pool.num_pages, *sizes)
    pool, states = context.pool.config, context.states
    if config.snapshots is None:
        context = replace(context, snapshots=None)
    pages = _pool_pages(config, pool, found.weights + found.draft + _states(context), there, states)
    expected = _memory_of(context, pages, *sizes)
    if config.snapshots is None and states is not None:
        kept = fitting(config, pool, pages, states)
        size = expected.states + kept * states.nbytes // states.rows
        expected = replace(expected, states=size, prefixes=kept)
    return replace(
        expected,
        device=config.device,
        loaded=False,
        experts=expected.experts if config.device != "cpu" else (),  # assembled with plain weights
        graphs=_graphs(config, context),
        loading=found.weights + _temporary(config, context.target.layers),
    )


def _states(context: Context) -> int:
    return sum(each.nbytes for each in (context.states, context.snapshots) if each is not None)


def _temporary(config: EngineConfig, layers: Iterable[nn.Module]) -> int:
    """Return how much more than the target's weights loading takes at most: each reader prepares one projection.
    ``layers``: the target's, of which those like an earlier one take no more."""
    kinds = [[(each.shape, each.dtype) for each in tensors_of(layer)] for layer in layers]
    first = max(map(kinds.index, kinds)) + 1 if config.device != "cpu" else len(kinds)
    model = replace(config.model, layers=config.model.layers[:first])
    with (made := Allocations()):
        meta, place = torch.device("meta"), config.place(0)
        target = load_target(config.model_path, DTYPES[config.dtype], meta, 1, model, place)
    most = made.peak - made.held
    if config.device != "cpu":
        return READERS * most
    for child in target.modules():  # ``meta`` counts as a GPU: a CPU dequantizes as well
        if isinstance(child, StoredProjection) and child.place is None:
            with (made := Allocations()):
                plain_OI, _ = child.rows(None)
            most = max(most, made.peak - plain_OI.nbytes + count_bytes([child], set()))
    packing = max(each.nbytes for each in target.parameters())  # at the end, one by one
    return max(READERS * most, packing)


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors made in this context by this thread: those that exist, and the most that did."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _has_data(each)}
        for each in tree_leaves(found):
            if _has_data(each) and (storage := each.untyped_storage())._cdata not in given:
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return found

    def _add(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


def _has_data(each: object) -> bool:
    return isinstance(each, Tensor) and each.layout == torch.strided


def _pool_pages(
    config: EngineConfig, pool: PoolConfig, weights: int, there: DeviceMemory | None, states: States | None
) -> int:
    """Return how many pages the pool will have. Nothing else is on a GPU yet."""
    tables, size, fraction = len(pool.layout.windows), pool.page_size, config.mem_fraction_static
    fraction /= config.tensor_parallel_size if config.device == "cpu" else 1
    tokens, page_bytes = config.max_total_tokens, pool.page_bytes + snapshot_bytes(config, pool, states)
    if tokens is None:
        memory = there or device_memory(config.device)
        if config.device != "cpu":
            return max(0, int((fraction * memory.total - weights) / page_bytes))
        token, free = tables * page_bytes / size, max(0, memory.free - weights)
        tokens = host_tokens(free, fraction, token, config.context_length)[0]
    return tables * -(-tokens // size)


def _assemble_shapes(config: EngineConfig) -> Context:
    """Assemble an engine without data. The pool's size is not the real one; on a CPU, weights are not quantized."""
    model, draft = config.model, config.draft
    if config.device == "cpu":
        model = model.with_weights(PLAIN)
        draft = draft and replace(draft, quantization="none")
    config = replace(config, model=model, draft=draft)
    return create_shapes(config, launches=_counted(config))


def _graphs(config: EngineConfig, context: Context) -> int:
    """Return the bytes of graphs: logits, and what the largest launch of each kind holds at most, because one's blocks
    seldom fit another's. 0 where Triton, by which they are counted, is not installed."""
    if not _counted(config):
        return 0
    context = replace(context, attention=attention_for("triton", context.pool.config))  # others take as much
    with without_kernels(), torch.inference_mode(), Allocations() as made:
        launches = captured_launches(config, shape_plan(config).captured(), context)
        total: int = made.held
        for launch, sizes in launches:
            made.peak = made.held
            for size in sizes[-1:]:
                launch(size)
            total += made.peak - made.held
    return total


def _counted(config: EngineConfig) -> bool:
    return config.largest_graph is not None and find_spec("triton") is not None


def _shared(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that are a rank's part of a weight."""
    for child in module.modules():
        for name, size in getattr(child, "shares", {}).items():
            if isinstance(size, Share) and isinstance(own := getattr(child, name), Tensor):
                yield own
        sizes = (getattr(child, "inputs", 0), *child.parts.values()) if isinstance(child, Projection) else ()
        some = isinstance(child, Experts) and len(child.numbers) < child.total
        if some or any(isinstance(size, Share) for size in sizes):
            yield from tensors_of(child)


def shares(config: EngineConfig) -> Iterator[str]:
    """Say of which sizes the first of several ranks has how much."""
    ranks, found = config.place(0), dict[tuple[str, int], int]()
    for layer in config.model.on(ranks).layers:
        experts, state = layer.experts, layer.state
        sizes = {
            "attention heads": layer.num_heads,
            _KV_HEADS: None if layer.latent else layer.num_kv_heads,
            "key heads of a state": state and state.key_heads,
            "value heads of a state": state and state.value_heads,
            "experts": experts and experts.own,
            "channels of an expert": experts and experts.inner_size,
            "channels of the shared expert": experts and experts.shared_size,
            "channels of an MLP": None if experts else layer.intermediate_size,
        }
        found |= {(words, size.whole): size for words, size in sizes.items() if isinstance(size, Share)}
        if layer.latent:
            found[_LATENT, 1] = 1
    found["tokens of embedding and head", config.model.vocab_size] = ranks.vocabulary(config.model.vocab_size)
    for (words, whole), size in found.items():
        copies = size * ranks.count // whole if words in (_KV_HEADS, _LATENT) else 1
        yield f"{whole} {words}: {size} each{f', {copies} have the same' if copies > 1 else ''}"

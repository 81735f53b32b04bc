"""Device memory: what the files promise before anything is loaded, and what a loaded engine has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from specserve.config.engine import EngineConfig
from specserve.engine.shapes import MAX_STEP_NODES
from specserve.kv.pool import PoolConfig
from specserve.kv.spec import HeadKV
from specserve.models.checkpoint import DTYPES, build_target
from specserve.models.draft.load import Head, Place, build_draft
from specserve.models.draft.override import parse_overrides
from specserve.models.draft.source import open_source
from specserve.models.llama import LlamaModel
from specserve.process.assemble import shape_plan, slot_positions, target_kv
from specserve.process.worker import Built
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context
from specserve.tools.check.report import Memory

_SAMPLER = 8  # bytes of a logit in the sampler: scores and noise in float32


def memory_needed(built: Built) -> Memory:
    context = cast(Scheduler, built.engine).runner.context
    pool, seen = context.pool, set[int]()
    page = pool.config.page_bytes
    graphs = cast(dict[str, Any], built.engine.info.get("cuda_graphs") or {})
    return Memory(
        device=str(context.state.device),
        loaded=True,
        weights=_count(_tensors([cast(nn.Module, context.target)]), seen),
        draft=_count(_tensors(_draft_modules(context)), seen),
        kv_per_token=page // pool.page_size,
        pool_tokens=pool.num_pages * pool.page_size,
        pool=pool.num_pages * page,
        graphs=int(graphs.get("memory_bytes", 0)),
    )


def expected_memory(config: EngineConfig) -> Memory:
    """Of the modules that would be loaded, made without numbers. A draft that is refused counts
    nothing; what follows a token map is left out."""
    dtype = DTYPES[config.dtype]
    positions = slot_positions(config, shape_plan(config))
    target, _ = build_target(config.model_path, dtype, torch.device("meta"), positions)
    seen = set[int]()
    weights = _count(_tensors([target]), seen)
    pool = PoolConfig(target_kv(config.model, dtype), [], 0, config.page_size, dtype)
    drafts = 0
    if (head := _draft(config, target, dtype, positions)) is not None:
        drafts, own = _count(_tensors([head]), seen), head.config.layer
        kv = [HeadKV(own.num_kv_heads, own.head_dim, dtype)]
        pool = replace(pool, draft=kv, feature_size=own.hidden_size)
    per_token = pool.page_bytes // pool.page_size
    tokens = config.max_total_tokens
    if tokens is None:
        room = config.mem_fraction_static * device_memory(config.device) - weights - drafts
        tokens = max(0, int(room / per_token))
    return Memory(
        device=config.device,
        loaded=False,
        weights=weights,
        draft=drafts,
        kv_per_token=per_token,
        pool_tokens=tokens,
        pool=tokens * per_token,
        graphs=_logits(config, config.model.vocab_size * (dtype.itemsize + _SAMPLER)),
    )


def device_memory(device: str) -> int:
    """All of it, in use or not."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _draft(config: EngineConfig, target: LlamaModel, dtype: torch.dtype, positions: int) -> Head | None:
    """The draft as it would be loaded next to ``target``, rounded as it would be."""
    draft = config.draft
    if draft is None or not draft.method.needs_draft:
        return None
    place = Place(target, target.config.num_layers, positions)
    try:
        source = open_source(draft.path, parse_overrides(draft.config_override))
        head, _ = build_draft(source, draft.name, place, dtype)
    except ValueError:  # told where drafts are looked at
        return None
    if config.device == "cuda":
        head.quantize(draft.quantization)
    return head


def _logits(config: EngineConfig, node: int) -> int:
    """Of the largest step that is captured: nearly all that graphs take, where steps are large."""
    if config.largest_graph is None:
        return 0
    return min(config.largest_graph * (config.shape[2] if config.shape else 1), MAX_STEP_NODES) * node


def _draft_modules(context: Context) -> list[nn.Module]:
    return [value for value in _fields(context.drafter) if isinstance(value, nn.Module)]


def _fields(value: object) -> Iterable[object]:
    return vars(value).values() if value is not None else ()


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights, packed ones and tables included."""
    for module in modules:
        for child in module.modules():
            yield from child.parameters(recurse=False)
            yield from child.buffers(recurse=False)
            yield from (value for value in vars(child).values() if isinstance(value, Tensor))


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of those not seen yet, each once: the draft shares the target's embedding or head."""
    total = 0
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            total += tensor.numel() * tensor.element_size()
    return total

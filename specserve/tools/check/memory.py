"""Device memory: what the files promise before anything is loaded, and what a loaded engine has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from specserve.config.engine import EngineConfig
from specserve.engine.shapes import MAX_STEP_NODES
from specserve.layers.linear import PLAIN
from specserve.models.checkpoint import DTYPES
from specserve.process.assemble import create_shapes, shape_plan
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context, Drafter
from specserve.tools.check.report import Memory

_SAMPLER = 8  # bytes of a logit in the sampler: scores and noise in float32


def memory_needed(engine: Scheduler) -> Memory:
    graphs = engine.info["cuda_graphs"]
    assert isinstance(graphs, dict)
    return replace(_memory_of(engine.runner.context), graphs=graphs["memory_bytes"])


def _memory_of(context: Context) -> Memory:
    pool, seen = context.pool, set[int]()
    page = pool.config.page_bytes
    return Memory(
        device=str(context.state.device),
        loaded=True,
        weights=count_bytes([context.target], seen),
        draft=count_bytes(_parts(context.drafter), seen),
        kv_per_token=page // pool.page_size,
        pool_tokens=pool.num_pages * pool.page_size,
        pool=pool.num_pages * page,
        graphs=0,
    )


def expected_memory(config: EngineConfig) -> Memory:
    """Of an engine assembled without numbers. A draft that is refused counts nothing."""
    try:
        context = _without_numbers(config)
    except ValueError:  # told where drafts are looked at, or by loading
        context = _without_numbers(replace(config, draft=None, shape=None, adaptive=False))
    found, tokens = _memory_of(context), config.max_total_tokens
    if tokens is None:
        room = config.mem_fraction_static * device_memory(config.device) - found.weights - found.draft
        tokens = max(0, int(room / found.kv_per_token))
    return replace(
        found,
        device=config.device,
        loaded=False,
        pool_tokens=tokens,
        pool=tokens * found.kv_per_token,
        graphs=_logits(config, config.model.vocab_size * (DTYPES[config.dtype].itemsize + _SAMPLER)),
    )


def device_memory(device: str) -> int:
    """All of it, in use or not."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _without_numbers(config: EngineConfig) -> Context:
    """Everything but the pool's size and, on a CPU, weights of few bits, which take what plain ones do."""
    model, draft = config.model, config.draft
    if config.device == "cpu":
        model = model.with_weights(PLAIN)
        draft = draft and replace(draft, quantization="none")
    return create_shapes(replace(config, model=model, draft=draft), shape_plan(config))


def _logits(config: EngineConfig, node: int) -> int:
    """Of the largest step that is captured: nearly all that graphs take, where steps are large."""
    if config.largest_graph is None:
        return 0
    return min(config.largest_graph * (config.shape[2] if config.shape else 1), MAX_STEP_NODES) * node


def _parts(drafter: Drafter) -> Iterator[object]:
    """What it holds, and what the drafters among that hold."""
    for part in vars(drafter).values():
        yield part
        if hasattr(part, "propose"):
            yield from _parts(part)


def count_bytes(parts: Iterable[object], seen: set[int]) -> int:
    """Bytes of the modules' tensors that were not seen yet: the draft shares the target's embedding or head."""
    tensors = {
        id(tensor): tensor for part in parts if isinstance(part, nn.Module) for tensor in _tensors(part)
    }
    total = sum(t.numel() * t.element_size() for key, t in tensors.items() if key not in seen)
    seen |= tensors.keys()
    return total


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Weights, packed ones and tables included."""
    for child in module.modules():
        yield from child.parameters(recurse=False)
        yield from child.buffers(recurse=False)
        yield from (value for value in vars(child).values() if isinstance(value, Tensor))

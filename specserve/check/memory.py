"""Device memory: what the files promise before anything is loaded, and what a loaded engine has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specserve.check.report import Memory
from specserve.config import Settings
from specserve.engine.shapes import MAX_STEP_NODES
from specserve.models.config import ModelConfig, read_json
from specserve.scheduler.process import Built
from specserve.scheduler.scheduler import Scheduler
from specserve.spec.context import Context

_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_SAMPLER = 8  # bytes of a logit in the sampler: scores and noise in float32


def memory_needed(built: Built) -> Memory:
    context = cast(Scheduler, built.engine)._runner.context
    pool, seen = context.pool, set[int]()
    page = pool.config.page_bytes()
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


def expected_memory(settings: Settings, model: ModelConfig) -> Memory:
    """For resolved settings. The draft's KV is counted as one more layer of the target's."""
    assert settings.model_path is not None
    size, draft = _ITEM[settings.dtype], settings.speculative_draft_model_path
    assert settings.context_length is not None
    tables = 2 * model.layer.head_dim * size * settings.context_length
    weights = _files(Path(settings.model_path), size) + tables  # of rotary angles
    inside = draft is None or Path(draft) == Path(settings.model_path)
    drafts = 0 if draft is None or inside else _files(Path(draft), size)
    if settings.device == "cuda" and settings.speculative_draft_quantization in ("int8", "fp8"):
        drafts += drafts // size  # beside the weights as they are
    layers = model.num_layers + (draft is not None)
    per_token = 2 * model.layer.num_kv_heads * model.layer.head_dim * layers * size
    tokens = settings.max_total_tokens
    if tokens is None:
        room = settings.mem_fraction_static * device_memory(settings.device) - weights - drafts
        tokens = max(0, int(room / per_token))
    return Memory(
        device=settings.device,
        loaded=False,
        weights=weights,
        draft=drafts,
        kv_per_token=per_token,
        pool_tokens=tokens,
        pool=tokens * per_token,
        graphs=_logits(settings, model.vocab_size * (size + _SAMPLER)),
    )


def device_memory(device: str) -> int:
    """All of it, in use or not."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _files(path: Path, size: int) -> int:
    """Bytes of the weights, as if the files held numbers of ``size`` bytes."""
    files = list(path.glob("*.safetensors")) or list(path.glob("pytorch_model*.bin"))
    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    stored = _ITEM.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return sum(file.stat().st_size for file in files) * size // stored


def _logits(settings: Settings, node: int) -> int:
    """Of the largest step that is captured: nearly all that graphs take, where steps are large."""
    largest = settings.cuda_graph_max_bs
    if largest is None or settings.disable_cuda_graph:
        return 0
    return min(largest * (settings.speculative_num_draft_tokens or 1), MAX_STEP_NODES) * node


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

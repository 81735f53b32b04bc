"""The Triton backend: verify, decode and draft by split-KV attention, prefill by tiles. See ``specserve_kernels.ops``.

Shapes as in ``base``. A plan holds what a pass's layers share and never reads a device tensor on the host, so a CUDA
graph that captures it and its runs serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from specserve_kernels.ops.attention.attention import (
    HEAD_DIMS,
    LEAST_WINDOW,
    ROTATED,
    Workspace,
    attend_frontier,
    attend_nodes,
)
from specserve_kernels.ops.attention.latent_nodes import attend_latents, takes
from specserve_kernels.ops.attention.paths import Paths, list_paths
from specserve_kernels.ops.attention.prefill import attend_chunks
from torch import Tensor

from specserve.attention.base import Chunks, Entries, Frontier, Nodes, Plan
from specserve.kv.spec import HeadKV, KVSpec, LatentKV
from specserve.layers.batch import Softmax

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_PAGE = 256


@dataclass(frozen=True, slots=True)
class _Prefill:
    chunks: Chunks
    prefix: bool  # some request begins after position 0
    reads_own: ClassVar = True

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        cache, pages_BM, kv_TND, scales, latent = entries
        c = self.chunks
        if takes(q_TND, cache, latent, len(pages_BM), c.max_tokens, wide=True):
            tokens = c.positions_T, c.q_start, c.max_tokens, c.kv_start
            return attend_latents(q_TND, cache, pages_BM, *tokens, softmax.scale, prompt=True)
        where = pages_BM, c.q_start, c.positions_T, c.max_tokens
        how = softmax.scale, softmax.window, softmax.sinks_H, softmax.cap
        return attend_chunks(q_TND, cache, *where, kv_TND, self.prefix, scales, c.kv_start, *how, latent)


@dataclass(frozen=True, slots=True)
class _Verify:
    nodes: Nodes
    paths: Paths | None  # None: chains
    reads_own: ClassVar = False
    workspace: Workspace = field(default_factory=Workspace)

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        cache, pages_BM, _, scales, latent = entries
        n = self.nodes
        nodes = 1 if len(q_TND) == len(pages_BM) else n.max_nodes
        if takes(q_TND, cache, latent, len(pages_BM), nodes, self.paths is not None):
            tokens = n.length_B, n.q_start, n.max_nodes, n.kv_start
            return attend_latents(q_TND, cache, pages_BM, *tokens, softmax.scale, paths=self.paths)
        where = pages_BM, n.length_B, n.q_start, self.paths, n.max_nodes
        how = softmax.scale, softmax.window, softmax.sinks_H, softmax.cap
        return attend_nodes(q_TND, cache, *where, self.workspace, scales, n.kv_start, *how, latent)


@dataclass(frozen=True, slots=True)
class _Draft:
    frontier: Frontier
    reads_own: ClassVar = False
    workspace: Workspace = field(default_factory=Workspace)

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        cache, pages_BM, _, scales, latent = entries
        f = self.frontier
        nodes, own = f.scratch_BKA.shape[1:]
        if nodes == 1 and takes(q_TND, cache, latent, len(pages_BM), nodes):
            single = f.prefix_B, f.prefix_B, nodes, f.kv_start
            return attend_latents(q_TND, cache, pages_BM, *single, softmax.scale, entries=own)
        where = pages_BM, f.prefix_B, f.kv_start, f.scratch_BKA
        how = softmax.scale, softmax.window, softmax.sinks_H, softmax.cap
        return attend_frontier(q_TND, cache, *where, self.workspace, scales, *how, latent)


class TritonAttention:
    """Attends with Triton kernels. Passes run one after another, on one stream."""

    name = "triton"

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.dtype = dtype

    def unsupported(self, spec: KVSpec) -> list[str]:
        reasons = []
        if self.dtype not in _DTYPES:
            reasons.append(f"it computes in float16, bfloat16 or float32, not {self.dtype}")
        if isinstance(spec, HeadKV) and spec.head_dim not in HEAD_DIMS:
            reasons.append(f"the head size must be one of {HEAD_DIMS}, not {spec.head_dim}")
        if isinstance(spec, LatentKV) and (spec.rank not in HEAD_DIMS or spec.rope_size not in ROTATED):
            reasons.append(f"latents must have one of {HEAD_DIMS} channels, and {ROTATED} rotated ones")
        if spec.window is not None and spec.window < LEAST_WINDOW:
            reasons.append(f"windows must have at least {LEAST_WINDOW} tokens, not {spec.window}")
        if self.page_size.bit_count() != 1 or self.page_size > _MAX_PAGE:
            reasons.append(f"the page size must be a power of two up to {_MAX_PAGE}, not {self.page_size}")
        return reasons

    def plan_prefill(self, chunks: Chunks) -> Plan:
        return _Prefill(chunks, prefix=chunks.spans is None or any(first > 0 for first, _ in chunks.spans))

    def plan_verify(self, nodes: Nodes) -> _Verify:
        n = nodes
        if n.levels is None:
            return _Verify(nodes, None)
        return _Verify(nodes, list_paths(n.mask_T, n.q_start, n.length_B, n.levels, n.max_nodes))

    def plan_draft(self, frontier: Frontier) -> _Draft:
        return _Draft(frontier)

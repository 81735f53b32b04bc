"""FlashInfer's paged prefill; verify and draft use Triton.

FlashInfer plans on the host from each request's lengths. Prefill knows these exactly unless it is captured, where
Triton is used too. A step's lengths are on the device, and FlashInfer has no counterpart of its tree masks and
``kv_start``, so it takes no part in steps, nor in prompts with a ``kv_start``
(docs/decisions/0008-attention-backends.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specserve.attention.base import Chunks, Entries, Plan
from specserve.attention.triton import TritonAttention
from specserve.kv.spec import HeadKV, KVSpec, LatentKV
from specserve.layers.batch import Softmax

_WORKSPACE_BYTES = 256 * 2**20
_KEPT_PLANS = 16
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Prefill:
    """One pass. FlashInfer plans for one geometry at a time; the layers of a pass rarely have more than two. Without
    windows, which it does not serve, they share a page table."""

    reads_own: ClassVar = False
    spans: Sequence[tuple[int, int]]
    page_size: int
    workspace: Tensor
    alive: deque[Any]
    wrappers: dict[tuple[int, int, int, float | None], Any] = field(default_factory=dict)

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        cache = entries.cache
        assert not entries.latent
        assert softmax.sinks_H is None
        assert softmax.cap is None
        geometry = q_TND.shape[1], cache.shape[3], cache.shape[4], softmax.scale
        if geometry not in self.wrappers:
            self.wrappers[geometry] = self._plan(entries.pages_BM, *geometry, q_TND.dtype)
            self.alive.append(self.wrappers[geometry])
        out: Tensor = self.wrappers[geometry].run(q_TND.contiguous(), cache)
        return out

    def _plan(
        self,
        pages_BM: Tensor,
        heads: int,
        kv_heads: int,
        head_size: int,
        scale: float | None,
        dtype: torch.dtype,
    ) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        ends = [start + count for start, count in self.spans]
        pages = [-(-end // self.page_size) for end in ends]
        last = [end - (count - 1) * self.page_size for end, count in zip(ends, pages, strict=True)]
        rows = zip(pages_BM, pages, strict=True)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2")
        wrapper.plan(
            _starts([count for _, count in self.spans]),
            _starts(pages),
            torch.cat([row_M[:count] for row_M, count in rows]).int(),
            torch.tensor(last, dtype=torch.int32),
            heads,
            kv_heads,
            head_size,
            self.page_size,
            causal=True,
            sm_scale=scale,
            q_data_type=dtype,
        )
        return wrapper


def _starts(counts: list[int]) -> Tensor:
    """Return running sums from 0, on the host."""
    return torch.tensor([0, *counts]).cumsum(0).int()


class FlashInferAttention(TritonAttention):
    """See the module's docstring."""

    name = "flashinfer"

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        super().__init__(page_size, dtype)
        self._workspace: Tensor | None = None
        # The device copies a wrapper's plan from pinned memory up to a few launches later: keep the latest ones alive.
        self._alive: deque[Any] = deque(maxlen=_KEPT_PLANS)

    def unsupported(self, spec: KVSpec) -> list[str]:
        reasons = super().unsupported(spec)
        if isinstance(spec, LatentKV):
            reasons.append(f"{spec} are not passed to FlashInfer; triton serves them")
        if isinstance(spec, HeadKV) and spec.head_dim not in _HEAD_SIZES:
            reasons.append(f"head size {spec.head_dim}: FlashInfer has {_HEAD_SIZES}")
        if isinstance(spec, HeadKV) and spec.window is not None:
            reasons.append("sliding windows are not passed to FlashInfer; triton serves them")
        if self.dtype not in _DTYPES:
            reasons.append(f"dtype {self.dtype}: FlashInfer has bfloat16 and float16")
        return reasons

    def plan_prefill(self, chunks: Chunks) -> Plan:
        if chunks.spans is None or chunks.kv_start:
            return super().plan_prefill(chunks)
        if self._workspace is None:
            device = chunks.q_start.device
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return _Prefill(chunks.spans, self.page_size, self._workspace, self._alive)

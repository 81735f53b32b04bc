"""Attention over the KV pool, as a model's layers call it."""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels import HeadNorms, rotary_store_kv
from torch import Tensor

from specserve.attention.base import Plan
from specserve.kv.pool import KVPool
from specserve.layers.batch import GroupedQuery
from specserve.layers.rotary import Rope


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """One pass: writes new keys and values to their places, and attends as the plan says. ``first_layer``: the pool
    index of the model's first layer."""

    pool: KVPool
    plan: Plan
    pages_GBM: Tensor
    place_T: Tensor
    first_layer: int = 0

    def __call__(self, ask: GroupedQuery) -> Tensor:
        qkv_TND, heads = ask.qkv_TND, ask.num_kv_heads
        layer, own = self.first_layer + ask.layer, self.plan.reads_own and heads > 0
        cache, scales = self.pool.layers[layer], self.pool.scales[layer]
        pages_BM = self.pages_GBM[self.pool.tables[layer]]
        q_TND = rotary_store_kv(
            qkv_TND, *ask.rope, heads, cache, pages_BM, self.place_T, own, scales, ask.norms
        )
        kv_TND = qkv_TND[:, -2 * heads :] if own else None
        return self.plan.run(q_TND, cache, pages_BM, ask.softmax, kv_TND, scales).flatten(1)


def store_projected(
    pool: KVPool,
    layer: int,
    kv_TND: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    pages_GBM: Tensor,
    place_T: Tensor,
) -> None:
    """Normalize, rotate and store keys and values ``[T, 2 * kv heads, D]`` of a layer that does not run. May change
    ``kv_TND`` in place."""
    where = pool.layers[layer], pages_GBM[pool.tables[layer]], place_T
    rotary_store_kv(kv_TND, *rope, kv_TND.shape[1] // 2, *where, False, pool.scales[layer], norms)

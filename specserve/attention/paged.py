"""Attention over the KV pool, as a model's layers call it."""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels import rotary_store_kv, store_latents
from torch import Tensor

from specserve.attention.base import Entries, Plan
from specserve.attention.recurrent import StatePass
from specserve.kv.pool import KVPool
from specserve.layers.batch import DeltaRule, GroupedQuery, Softmax
from specserve.layers.latent import Latent, LatentRows, Projected
from specserve.layers.rotary import Rope


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """One pass: writes new keys and values to their places, and attends as the plan says. ``first_layer``: the pool
    index of the model's first layer. ``states``: those of its layers that keep one."""

    pool: KVPool
    plan: Plan
    pages_GBM: Tensor
    place_T: Tensor
    first_layer: int = 0
    states: StatePass | None = None

    def __call__(self, ask: GroupedQuery | Latent) -> Tensor:
        layer = self.first_layer + ask.layer
        cache, scales = self.pool.layers[layer], self.pool.scales[layer]
        pages_BM = self.pages_GBM[self.pool.tables[layer]]
        if isinstance(ask, Latent):
            entries = Entries(cache, pages_BM, None, scales, len(ask.rows.norm_C))
            store_projected(self.pool, layer, ask.rows, ask.rope, self.pages_GBM, self.place_T)
            return self.plan.run(ask.query_TNX, entries, Softmax(ask.scale)).flatten(1)
        qkv_TND, heads = ask.qkv_TND, ask.num_kv_heads
        own = self.plan.reads_own and heads > 0
        where, rope = (cache, pages_BM, self.place_T), ask.rope
        pairs, parts = rope.interleaved, ask.query_parts
        q_TND = rotary_store_kv(qkv_TND, *rope[:2], heads, *where, own, scales, ask.norms, pairs, parts)
        kv_TND = qkv_TND[:, -2 * heads :] if own else None
        return self.plan.run(q_TND, Entries(cache, pages_BM, kv_TND, scales), ask.softmax).flatten(1)

    def recur(self, ask: DeltaRule) -> Tensor:
        assert self.states is not None, "a target's pass"
        return self.states(ask)


def store_projected(
    pool: KVPool, layer: int, projected: Projected, rope: Rope, pages_GBM: Tensor, place_T: Tensor
) -> None:
    """Normalize, rotate and store what ``project_kv`` returns, of a layer that does not run. May change it in place."""
    where, scales = (pool.layers[layer], pages_GBM[pool.tables[layer]], place_T), pool.scales[layer]
    if isinstance(projected, LatentRows):
        store_latents(*projected, *rope[:2], *where, scales)
    else:
        kv_TND, norms = projected
        heads = kv_TND.shape[1] // 2
        rotary_store_kv(kv_TND, *rope[:2], heads, *where, False, scales, norms, rope.interleaved)

"""Latent attention, of DeepSeek-V2, arXiv 2405.04434: a token leaves one row for all heads in the cache.

Keys and values of heads are products of a normalized latent. They are never computed: a query is multiplied by its
head's part of the keys' weight (it is *absorbed*), attends to latents, and what it finds is multiplied by the values'
part. Prompts do the same, though for them keys and values would take fewer multiplications, of DeepSeek-V3's heads 320
a key instead of 1,088: rounded otherwise, they would make a text depend on what was cached or computed in one piece.

Shapes: T tokens, N heads, I inputs, C size of a latent, X of a latent and a rotated key, V size of a value.
"""

from __future__ import annotations

import specserve_kernels as kernels
from specserve_kernels import Rounded
from torch import Tensor, nn

from specserve.layers.batch import LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.latent import Latent, LatentRows
from specserve.layers.norms import RMSNorm
from specserve.layers.ranks import Update

EPS = 1e-6  # of the norms of latents, whatever a config says of others


class LatentAttention(nn.Module):
    """Has the interface of ``decoder.Attention``. Parameters have the names of checkpoints; all that read the layer's
    input are one projection. Each rank has some heads, latents are whole on each, and the sum over ranks follows
    ``o_proj``."""

    def __init__(self, config: LayerConfig, layer: int, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        assert config.latent is not None
        self.layer, self.config, self.latent = layer, config, config.latent
        name, heads, new = f"layers.{layer}.self_attn", config.num_heads, config.weights.projection
        rank, query_rank = self.latent.rank, self.latent.query_rank
        queries = heads * (self.latent.key_size + config.head_dim)
        first = {"q_proj": queries} if query_rank is None else {"q_a_proj": query_rank}
        row = {"kv_a_proj_with_mqa": rank + config.head_dim}
        self._row_from = int(sum(first.values()))
        self.qkv_proj = new(name, config.input_size, first | row, bias=False)
        if query_rank is not None:
            self.q_a_layernorm = norm(query_rank, EPS)
            self.q_b_proj = new(name, query_rank, {"q_b_proj": queries}, bias=False)
        self.kv_a_layernorm = norm(rank, EPS)
        made = heads * (self.latent.key_size + self.latent.value_size)
        self.kv_b_proj = new(name, rank, {"kv_b_proj": made}, bias=False)
        self.kv_b_proj.kept_plain = True
        self.o_proj = new(name, heads * self.latent.value_size, {"o_proj": config.hidden_size}, bias=False)

    def forward(self, x_TI: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Update, Tensor]:
        latent, heads = self.latent, self.config.num_heads
        made_TO: Tensor = self.qkv_proj(x_TI)
        query_TO, row_TX = made_TO.tensor_split([self._row_from], -1)
        if latent.query_rank is not None:
            query_TO = self.q_b_proj(self.q_a_layernorm(query_TO))
        weight_OC, _ = self.kv_b_proj.rows(None)
        key_NDC, value_NVC = weight_OC.unflatten(0, (heads, -1)).split(
            [latent.key_size, latent.value_size], 1
        )
        query_TNX = kernels.absorb_queries(query_TO.unflatten(-1, (heads, -1)), key_NDC, *call.rope[:2])
        ask = Latent(self.layer, query_TNX, self._rows(row_TX), call.rope, self.config.softmax.scale)
        found_TO = call.wanted(call.attend(ask))
        value_TNV = kernels.multiply_heads(found_TO.unflatten(-1, (heads, -1)), value_NVC)
        residual_TH = call.wanted(residual_TH)
        return self.config.ranks.sum_for_norm(self.o_proj(value_TNV.flatten(1))), residual_TH

    def project_kv(self, x_TI: Tensor | Rounded) -> LatentRows:
        """Return only what is stored."""
        return self._rows(self.qkv_proj.outputs_from(self._row_from, x_TI))

    def _rows(self, row_TX: Tensor) -> LatentRows:
        return LatentRows(row_TX, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)

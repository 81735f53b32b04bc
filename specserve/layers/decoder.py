"""The pre-norm decoder layer of target models and draft heads.

Shapes: T tokens (of all requests, packed), H hidden size, N heads (q, then k, then v), D head size, I inner size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from specserve_kernels import HeadNorms, Rounded
from torch import Tensor, nn

from specserve.layers.batch import GroupedQuery, LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.embedding import Embedding
from specserve.layers.experts import ExpertsMLP
from specserve.layers.latent_attention import LatentAttention
from specserve.layers.norms import RMSNorm
from specserve.layers.ranks import Update
from specserve.layers.weights import Projection


class Attention(nn.Module):
    """Grouped-query attention, which the caller's ``attend`` computes. Like every block, it takes its input and the
    residual stream, and returns the update and the stream. Each rank has some heads, and the sum over ranks follows
    ``o_proj``. ``norm``: that of heads; ``normed_values``: without a weight, of values too. ``fused``: files have q, k
    and v as one projection. ``query_parts``: heads that are projected for each of queries."""

    normed_values: ClassVar[bool] = False
    query_parts: ClassVar[int] = 1
    fused: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, layer: int, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        own = layer if config.index is None else config.index
        self.layer = own if config.reads is None else config.reads
        self.config = config
        name, size = f"layers.{layer}.self_attn", config.head_dim
        projected = self.query_parts * config.num_heads, *config.heads[1:]
        qkv = {f"{n}_proj": heads * size for n, heads in zip("qkv", projected, strict=True) if heads}
        qkv = {"qkv_proj": sum(qkv.values())} if self.fused else qkv
        new = config.weights.projection
        self.qkv_proj = new(name, config.input_size, qkv, config.qkv_bias)
        self.o_proj = new(name, config.num_heads * size, {"o_proj": config.hidden_size}, config.o_bias)

        self.q_norm, self.k_norm = (
            norm(size, config.rms_norm_eps) if config.qk_norm and heads else None
            for heads in config.heads[:2]
        )
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.shares = {"sinks": config.num_heads}

    def forward(self, x_TI: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Update, Tensor]:
        qkv_TO: Tensor = self.qkv_proj(x_TI)
        config = self.config
        projected_TND = qkv_TO.unflatten(-1, (-1, config.head_dim))
        qkv_TND = self.arranged(projected_TND, call.rope.position_T)
        softmax = replace(config.softmax, sinks_H=self.sinks)
        norms, parts = self.head_norms, self.query_parts
        ask = GroupedQuery(self.layer, qkv_TND, config.heads[1], call.rope, softmax, norms, parts)
        read_TI = self.gated(call.attend(ask), projected_TND, call)
        residual_TH = call.wanted(residual_TH)
        return config.ranks.sum_for_norm(self.o_proj(read_TI)), residual_TH

    def arranged(self, qkv_TND: Tensor, position_T: Tensor) -> Tensor:
        """Return the heads that the projection returns as ``attend`` takes them. May change them in place."""
        return qkv_TND

    def gated(self, attended_TI: Tensor, projected_TND: Tensor, call: LayerCall) -> Tensor | Rounded:
        """Return the input of the last projection, of the wanted rows."""
        return call.wanted(attended_TI)

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of single heads."""
        if self.q_norm is None:
            return None
        key_D = None if self.k_norm is None else self.k_norm.weight
        return HeadNorms(self.q_norm.weight, key_D, self.q_norm.eps, self.normed_values)

    def project_kv(self, x_TI: Tensor | Rounded) -> tuple[Tensor, HeadNorms | None]:
        """Return only keys and values ``[T, 2 * kv heads, D]``, neither normalized nor rotated, and their norms."""
        queries = self.query_parts * self.config.num_heads * self.config.head_dim
        kv = self.qkv_proj.outputs_from(queries, x_TI)
        return kv.unflatten(-1, (2 * self.config.num_kv_heads, self.config.head_dim)), self.head_norms


class MLP(nn.Module):
    """Gated feed-forward with a fused gate and up projection. Each rank has some channels, and the sum over ranks comes
    after ``down_proj``. ``module``: its name in the layer. ``up``, ``down``: their names in files; ``fused``: one for
    gate and up."""

    fused: ClassVar[bool] = False
    up: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    down: ClassVar[str] = "down_proj"

    def __init__(self, config: LayerConfig, layer: int, module: str = "mlp") -> None:
        super().__init__()
        name, size, inner = f"layers.{layer}.{module}", config.hidden_size, config.intermediate_size
        new = config.weights.projection
        self.activation, self.ranks = config.activation, config.ranks
        parts = {"gate_up_proj": inner + inner} if self.fused else dict.fromkeys(self.up, inner)
        self.gate_up_proj = new(name, size, parts, config.mlp_bias)
        self.down_proj = new(name, inner, {self.down: size}, config.mlp_bias)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Update, Tensor]:
        inner_TI = self.gate_up_proj.gate_for(self.down_proj, x_TH, self.activation)
        return self.ranks.sum_for_norm(self.down_proj(inner_TI)), residual_TH


def reader_of(block: nn.Module) -> Projection | None:
    """Return the projection that reads a block's input quantized; None for a block of another kind."""
    if isinstance(block, ExpertsMLP):
        apart = None if block.experts.more else block.shared_expert
        return block.experts.gate_up_proj if apart is None else reader_of(apart)
    if isinstance(block, Attention | LatentAttention):
        return block.qkv_proj
    return block.gate_up_proj if isinstance(block, MLP) else None


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a norm of the stream. ``layer``: its index in the KV pool."""

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[MLP]] = MLP
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    @classmethod
    def of(cls, **blocks: type[nn.Module]) -> type[Self]:
        """Return this class with other ``attention_class``, ``mlp_class`` or ``norm_class``."""
        assert all(hasattr(cls, name) for name in blocks)
        return type(cls.__name__, (cls,), blocks)

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__()
        self.rope = config.rope
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        kind = self.attention_class if config.latent is None else LatentAttention
        self.self_attn: Attention | LatentAttention = kind(config, layer, self.norm_class)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_mlp(config, layer)

    def make_mlp(self, config: LayerConfig, layer: int) -> nn.Module:
        if config.experts is None:
            return self.mlp_class(config, layer)
        return ExpertsMLP(config, layer, self.mlp_class)

    def embed(self, tokens_T: Tensor, embedding: Embedding) -> tuple[Tensor, Tensor]:
        """Do the same as ``enter``, with the tokens' embeddings as the stream."""
        return self.input_layernorm.embed(tokens_T, embedding)

    def enter(self, x_TH: Update, residual_TH: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        """Take the last block's output and the residual stream before it. Return the input of attention, and the
        residual stream at the layer's boundary."""
        return self.input_layernorm.add_for(reader_of(self.self_attn), x_TH, residual_TH)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Any, ...]:
        """Take the result of ``enter``. Return the input of the next ``enter``."""
        stream = self.self_attn(x_TH, residual_TH, call)
        normed = self.post_attention_layernorm.add_for(reader_of(self.mlp), *stream)
        out: tuple[Update, Tensor] = self.mlp(*normed)
        return out

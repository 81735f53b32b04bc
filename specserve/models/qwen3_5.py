"""Qwen3.5, 3.6 and 3.8, and Qwen3-Next: gated delta nets, and in every fourth layer attention with a gate.

Read from a language model's file, and from a vision-language model's, whose vision part is left out, as are the layers
that draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve_kernels import Rounded, gate_heads
from torch import Tensor, nn

from specserve.kv.spec import DeltaState
from specserve.layers.batch import LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer, reader_of
from specserve.layers.delta_net import GatedDeltaNet
from specserve.layers.norms import OffsetRMSNorm, RMSNorm
from specserve.layers.ranks import Update
from specserve.models.config import FULL, check_kinds
from specserve.models.partial_rope import PartialModel
from specserve.models.qwen_moe import with_experts

LINEAR = "linear_attention"


class GatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid. The projection of queries has each head's gate behind it."""

    query_parts: ClassVar[int] = 2

    def gated(self, attended_TI: Tensor, projected_TND: Tensor, call: LayerCall) -> Tensor | Rounded:
        gate_TND = call.wanted(projected_TND[:, 1 : 2 * self.config.num_heads : 2])
        attended_TI = call.wanted(attended_TI)
        return gate_heads(attended_TI, gate_TND, None, self.o_proj.rounds_to(len(attended_TI)))


class AttentionLayer(DecoderLayer):
    attention_class: ClassVar[type[Attention]] = GatedAttention
    norm_class: ClassVar[type[RMSNorm]] = OffsetRMSNorm


class DeltaLayer(AttentionLayer):
    """A gated delta net and an MLP, each on a norm of the stream."""

    net_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def __init__(self, config: LayerConfig, state: DeltaState, layer: int) -> None:
        assert config.index is not None
        nn.Module.__init__(self)
        self.rope = config.rope
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = self.net_class(config, state, layer, config.index)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_mlp(config, layer)

    def enter(self, x_TH: Update, residual_TH: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        return self.input_layernorm.add_for(self.linear_attn.in_proj_qkvz, x_TH, residual_TH)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Any, ...]:
        stream = self.linear_attn(x_TH, residual_TH, call)
        out: tuple[Update, Tensor] = self.mlp(
            *self.post_attention_layernorm.add_for(reader_of(self.mlp), *stream)
        )
        return out


class Qwen3_5Model(PartialModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attn_output_gate": (None, True)}
    unread: ClassVar[tuple[str, ...]] = (*PartialModel.unread, "mtp.")  # what drafts
    layer_class: ClassVar[type[DecoderLayer]] = AttentionLayer
    delta_class: ClassVar[type[DeltaLayer]] = DeltaLayer

    @classmethod
    def make_layer(cls, config: LayerConfig, layer: int) -> DecoderLayer:
        if config.state is None:
            return super().make_layer(config, layer)
        return cls.delta_class(config, config.state, layer)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        layer = super().read_layer(layer, fields)
        return replace(layer, qkv_bias=bias, o_bias=bias, qk_norm=True)

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        """Keys, values and states are indexed by kind."""
        layer = cls.read_layer(layer, fields)
        count, every = fields["num_hidden_layers"], fields["full_attention_interval"]
        kinds = fields.get("layer_types") or [LINEAR if (n + 1) % every else FULL for n in range(count)]
        check_kinds("layer_types", kinds, count, LINEAR, FULL)
        if FULL not in kinds:
            raise ValueError(f"layer_types must name {FULL} once at least, found {kinds}")
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
        state = DeltaState(*(fields[f"linear_{name}"] for name in names))
        if state.value_heads % state.key_heads:
            raise ValueError(
                f"linear_num_value_heads {state.value_heads} is not a multiple of linear_num_key_heads "
                f"{state.key_heads}"
            )
        return [
            replace(layer, state=state if kind == LINEAR else None, index=kinds[:number].count(kind))
            for number, kind in enumerate(kinds)
        ]


class Qwen3_5MoeModel(Qwen3_5Model):
    """With experts in place of MLPs, one of which serves every token."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3_5Model.defaults,
        "intermediate_size": 5632,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        return with_experts(super().read_layers(layer, fields), fields)


class GroupedDeltaNet(GatedDeltaNet):
    grouped: ClassVar[bool] = True


class Qwen3NextModel(Qwen3_5MoeModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen3_5MoeModel.defaults,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    }
    delta_class: ClassVar[type[DeltaLayer]] = DeltaLayer.of(net_class=GroupedDeltaNet)

"""Gemma 4's layer: values without a projection of their own, inputs that it has for itself, and experts beside the MLP.

Shapes: T tokens, N heads, D head size, H hidden size, P width of a layer's own inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from specserve_kernels import Rounded, Routes, rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.batch import LayerCall
from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.decoder import Attention
from specserve.layers.experts import Experts, Router
from specserve.layers.norms import RMSNorm, WideRMSNorm
from specserve.layers.ranks import Update, summed
from specserve.models.gemma import GemmaLayer


@dataclass(frozen=True, slots=True)
class Gemma4Config(LayerConfig):
    """``token_inputs``: width of the inputs of its own that a layer takes for each token, 0: it takes none."""

    token_inputs: int = 0


class Gemma4Attention(Attention):
    """Normalizes values, too, which may be the keys before their norm."""

    normed_values: ClassVar[bool] = True

    def arranged(self, qkv_TND: Tensor, position_T: Tensor) -> Tensor:
        q, k, _ = self.config.heads
        return qkv_TND if self.config.v_proj else torch.cat([qkv_TND, qkv_TND[:, q : q + k]], 1)


class Gemma4Router(nn.Module):
    """Reads the norm of a stream. Each expert's share has a factor. ``scale`` is the file's over the root of its
    size."""

    def __init__(self, config: LayerConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        size, self._eps = config.hidden_size, config.rms_norm_eps
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.scale = nn.Parameter(torch.empty(size, dtype=wide))
        self.per_expert_scale = nn.Parameter(torch.empty(experts.routing.experts, dtype=wide))
        self.proj = Router(experts, size)

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.scale.detach().copy_(found["scale"]).mul_(len(self.scale) ** -0.5)
        self.per_expert_scale.detach().copy_(found["per_expert_scale"])

    def forward(self, x_TH: Tensor) -> Routes:
        routes: Routes = self.proj(rms_norm(x_TH, self.scale, self._eps))
        return routes._replace(weight_TK=routes.weight_TK * self.per_expert_scale[routes.expert_TK])


class Gemma4Layer(GemmaLayer):
    """Returns a scale of the stream, too, and may add a gated input of its own for each token. Its experts, if it has
    any, read the stream beside the MLP.

    Shapes: P width of that input.
    """

    attention_class: ClassVar[type[Attention]] = Gemma4Attention
    norm_class: ClassVar[type[RMSNorm]] = WideRMSNorm

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__(replace(config, experts=None), layer)
        assert isinstance(config, Gemma4Config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.router, self.ranks = None, config.ranks
        if config.experts:
            self.router, self.experts = Gemma4Router(config, config.experts), Experts(config, layer)
            self.post_feedforward_layernorm_1 = self.norm_class(size, eps)
            self.pre_feedforward_layernorm_2 = self.norm_class(size, eps)
            self.post_feedforward_layernorm_2 = self.norm_class(size, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        if config.token_inputs:
            name, new, inputs = f"layers.{layer}", config.weights.projection, config.token_inputs
            self.per_layer_input_gate = new(name, size, {"per_layer_input_gate": inputs}, False)
            self.per_layer_projection = new(name, inputs, {"per_layer_projection": size}, False)
            self.post_per_layer_input_norm = self.norm_class(size, eps)

    def feed_forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Update, Tensor]:
        update_TH, residual_TH = super().feed_forward(x_TH, residual_TH)
        if self.router is not None:
            read_TH, routes = self.pre_feedforward_layernorm_2(residual_TH), self.router(residual_TH)
            mixed_TH = self.ranks.sum(self.experts(read_TH, routes))
            update_TH = self.post_feedforward_layernorm_1(summed(update_TH))
            update_TH += self.post_feedforward_layernorm_2(mixed_TH)
        return update_TH, residual_TH

    def forward(
        self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall, input_TP: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        update_TH, residual_TH, first_H = super().forward(x_TH, residual_TH, call)
        if input_TP is not None:
            residual_TH = residual_TH + self.post_feedforward_layernorm(summed(update_TH))
            gate_TP = F.gelu(self.per_layer_input_gate(residual_TH), approximate="tanh")
            gate_TP *= call.wanted(input_TP)
            update_TH, first_H = self.per_layer_projection(gate_TP), self.post_per_layer_input_norm.weight
        return update_TH, residual_TH, first_H, self.layer_scalar

"""The EAGLE-3 draft head. Li et al. 2025, arXiv 2503.01840.

Fuses three residual streams of the target with ``fc``; attention reads [norm(embedding); norm(feature)]; a norm
stands before the head only, and the state recycled between levels is the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from specserve_kernels import pair_inputs, rotary_table
from torch import Tensor, nn

from specserve.layers.decoder import MLP, Attend, Attention, RMSNorm
from specserve.layers.linear import Linear
from specserve.layers.rotary import inverse_frequencies
from specserve.models.draft.base import DraftConfig


class Eagle3Head(nn.Module):
    """One decoder layer of double input width and a head of ``draft_vocab_size`` rows."""

    def __init__(self, config: DraftConfig, layer: int, max_positions: int, embed: nn.Embedding) -> None:
        super().__init__()
        self.config = config
        # Held in a tuple so that the target's embedding is used but not registered as the head's own.
        self._embed = (embed,)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.fc = Linear(len(config.taps) * config.target_hidden_size, size, bias=config.fc_bias)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config.layer, layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.layer.intermediate_size)
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)
        inv_freq = inverse_frequencies(config.rope, config.layer.head_dim)
        table = rotary_table(inv_freq, max_positions, 1.0, torch.get_default_dtype())
        self.register_buffer("rope_P2D", table, persistent=False)
        self.rope_P2D: Tensor

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        out: Tensor = self.fc(torch.cat(list(tapped), dim=-1))
        return out

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``[norm(embedding); norm(feature)]`` and the features alone."""
        norms = self.input_layernorm.weight, self.hidden_norm.weight, self.hidden_norm.eps
        return pair_inputs(tokens_N, self._embed[0].weight, features_XH, source_N, norms)

    def _layer(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream before that is added."""
        pairs_N2H, features_NH = self._inputs(tokens_N, features_XH, source_N)
        a_NH = self.self_attn(pairs_N2H, self.rope_P2D[positions_N], attend)
        x_NH, residual_NH = self.post_attention_layernorm.add(a_NH, features_NH)
        return self.mlp(x_NH), residual_NH

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mlp_NH, residual_NH = self._layer(*args, **kwargs)
        return residual_NH + mlp_NH

    def draft(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        read_NH, states_NH = self.norm.add(*self._layer(*args, **kwargs))
        out: Tensor = self.lm_head(read_NH)
        return out, states_NH

    def logits(self, states_NH: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(states_NH))
        return out

    def project_kv(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None = None) -> Tensor:
        return self.self_attn.project_kv(self._inputs(tokens_N, features_XH, source_N)[0])

"""The EAGLE draft head (EAGLE and EAGLE-2 share weights and differ in the tree).

Li et al. 2024, arXiv 2401.15077. Reads the target's hidden state after its final norm; no norm before the
attention, none before the head; embedding and head are the target's.
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


class EagleHead(nn.Module):
    """``fc`` over [embedding; feature], then one decoder layer without an input norm."""

    def __init__(
        self, config: DraftConfig, layer: int, max_positions: int, embed: nn.Embedding, lm_head: nn.Module
    ) -> None:
        super().__init__()
        self.config = config
        # Held in tuples so that the target's modules are used but not registered as the head's own.
        self._embed, self._lm_head = (embed,), (lm_head,)
        size = config.layer.hidden_size
        self.fc = Linear(2 * size, size, bias=config.fc_bias)
        self.self_attn = Attention(config.layer, layer)
        self.post_attention_layernorm = RMSNorm(size, config.layer.rms_norm_eps)
        self.mlp = MLP(size, config.layer.intermediate_size)
        inv_freq = inverse_frequencies(config.rope, config.layer.head_dim)
        table = rotary_table(inv_freq, max_positions, 1.0, torch.get_default_dtype())
        self.register_buffer("rope_P2D", table, persistent=False)
        self.rope_P2D: Tensor

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return hidden_TH

    def _inputs(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None) -> Tensor:
        pairs_N2H, _ = pair_inputs(tokens_N, self._embed[0].weight, features_XH, source_N, None)
        out: Tensor = self.fc(pairs_N2H)
        return out

    def _layer(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream before that is added."""
        u_NH = self._inputs(tokens_N, features_XH, source_N)
        a_NH = self.self_attn(u_NH, self.rope_P2D[positions_N], attend)
        x_NH, residual_NH = self.post_attention_layernorm.add(a_NH, u_NH)
        return self.mlp(x_NH), residual_NH

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mlp_NH, residual_NH = self._layer(*args, **kwargs)
        return residual_NH + mlp_NH

    def draft(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states_NH = self(*args, **kwargs)
        return self.logits(states_NH), states_NH

    def logits(self, states_NH: Tensor) -> Tensor:
        out: Tensor = self._lm_head[0](states_NH)
        return out

    def project_kv(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None = None) -> Tensor:
        return self.self_attn.project_kv(self._inputs(tokens_N, features_XH, source_N))

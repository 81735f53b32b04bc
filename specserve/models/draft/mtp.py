"""MiMo's multi-token-prediction head, which is part of its target's checkpoint. Xiaomi 2025, arXiv 2505.07608.

``input_proj`` over [norm(feature); norm(embedding)], one decoder layer with the target's kinds of norms, a final norm,
and the target's head. Other engines zero the embedding next to the first feature; the published code and this one do
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specserve.layers.embedding import Embedding
from specserve.layers.linear import Linear
from specserve.layers.norms import RMSNorm
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.load import Borrowed


class MTPHead(LayerHead):
    """Without ``taps`` the features are the target's states after its final norm, otherwise those at the single tap.
    The head's final norm is ``norm`` here and ``final_layernorm`` in files."""

    def __init__(
        self, config: DraftConfig, layer: int, max_positions: int, embed: Embedding, lm_head: nn.Module
    ) -> None:
        super().__init__(config, embed)
        self._lm_head = Borrowed(lm_head)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self._add_layer(layer, max_positions)
        self.norm = RMSNorm(size, eps)

    @torch.no_grad()
    def read_embedding_first(self) -> None:
        """Swap the halves of a published ``input_proj``, which reads the feature first; all other heads read the
        embedding first."""
        weight = self.input_proj.weight
        weight.copy_(weight.roll(weight.shape[0], 1))

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return tapped[0] if tapped else hidden_TH

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        norms = self.token_layernorm.weight, self.hidden_layernorm.weight, self.hidden_layernorm.eps
        pairs_N2H, _ = self._pairs(self.input_proj, tokens_N, features_XH, source_N, norms)
        u_NH = self.input_proj(pairs_N2H)
        return self.input_layernorm(u_NH), u_NH

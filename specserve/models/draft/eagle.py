"""The EAGLE draft head. EAGLE and EAGLE-2 share weights and differ only in the tree.

Li et al. 2024, arXiv 2401.15077. It reads the target's hidden state after the final norm, has no norm before the
attention or the output head, and uses the target's embedding and head. Some heads trained as in HASS (arXiv 2408.15766)
have norms at these places, which the configuration names.
"""

from __future__ import annotations

import torch
from specserve_kernels import Rounded
from torch import Tensor, nn

from specserve.layers.embedding import Embedding
from specserve.layers.linear import Linear
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.load import Borrowed


class EagleHead(LayerHead):
    """``fc`` over [embedding; feature], then one decoder layer without an input norm."""

    def __init__(
        self, config: DraftConfig, layer: int, max_positions: int, embed: Embedding, lm_head: nn.Module
    ) -> None:
        super().__init__(config, embed)
        self._lm_head = Borrowed(lm_head)
        size = config.layer.hidden_size
        self.embedding_layernorm = self._new_norm(config.embedding_norm)
        self.hidden_states_layernorm = self._new_norm(config.feature_norm)
        self.fc = Linear(2 * size, size, bias=config.fc_bias)
        self.input_layernorm = self._new_norm(config.input_norm)
        self._add_layer(layer, max_positions)
        self.norm = self._new_norm(config.final_norm or False)

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        u_NH = self.fc(self._read(tokens_N, features_XH, source_N))
        return (u_NH if self.input_layernorm is None else self.input_layernorm(u_NH)), u_NH

    def _read(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None) -> Tensor | Rounded:
        """Return [embedding; feature], each normalized if the head has a norm for it."""
        norms, embed = (self.embedding_layernorm, self.hidden_states_layernorm), self._embed.module
        if norms == (None, None) and embed.scale == 1:
            return self._pairs(self.fc, tokens_N, features_XH, source_N, None)[0]
        halves = embed(tokens_N), features_XH if source_N is None else features_XH[source_N]
        return torch.cat([h if norm is None else norm(h) for norm, h in zip(norms, halves, strict=True)], -1)

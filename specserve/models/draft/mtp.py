"""Heads for multi-token prediction that are part of a target's checkpoint: MiMo's (Xiaomi 2025, arXiv 2505.07608), and
DeepSeek-V3's (arXiv 2412.19437), which GLM, Qwen3-Next and Qwen3.5 have too.

A projection of [norm(feature); norm(embedding)], DeepSeek's of [norm(embedding); norm(feature)], one decoder layer, a
final norm, and the target's head. Other engines zero the embedding next to the first feature; the published code of
MiMo and this one do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from specserve.layers.embedding import Embedding
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.load import Borrowed


class MTPHead(LayerHead):
    """Without ``taps`` the features are the target's states after its final norm, otherwise those at the single tap.
    ``projection``: the name of ``input_proj`` in files."""

    projection: ClassVar[str] = "input_proj"

    def __init__(
        self, config: DraftConfig, layer: int, max_positions: int, embed: Embedding, lm_head: nn.Module
    ) -> None:
        super().__init__(config, embed)
        self._lm_head = Borrowed(lm_head)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        norm = config.layer_class.norm_class
        self.token_layernorm = norm(size, eps)
        self.hidden_layernorm = norm(size, eps)
        new, projected = config.layer.weights.projection, {self.projection: size}
        self.input_proj = new(f"layers.{layer}", 2 * size, projected, bias=False)
        self.input_layernorm = norm(size, eps)
        self._add_layer(layer, max_positions)
        self.norm = norm(size, eps)

    @torch.no_grad()
    def read_embedding_first(self) -> None:
        """Swap the halves of a published ``input_proj``, which reads the feature first; all other heads read the
        embedding first."""
        weight, _ = self.input_proj.rows(None)
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


class NextNHead(MTPHead):
    """The head of DeepSeek-V3's kind: its layer is one of the target's."""

    projection: ClassVar[str] = "eh_proj"

    def read_embedding_first(self) -> None:
        """The file's projection does."""

"""The EAGLE-3 draft head. Li et al. 2025, arXiv 2503.01840.

``fc`` fuses residual streams of the target, three in the paper. Attention reads [norm(embedding); norm(feature)]. The
only other norm is before the output head, and the state recycled between levels is the one before that norm. Heads of
other trainers have other norms, as their configuration says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specserve_kernels import Rounded, pair_inputs
from torch import Tensor, nn

from specserve.layers.embedding import Embedding, make_head
from specserve.layers.linear import PLAIN, Linear
from specserve.layers.norms import RMSNorm
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.load import Borrowed


class Eagle3Head(LayerHead):
    """One decoder layer with double input width, and an output head of ``draft_vocab_size`` rows: ``lm_head`` if given,
    the embedding if the configuration says ``tied``, otherwise its own."""

    def __init__(
        self,
        config: DraftConfig,
        layer: int,
        max_positions: int,
        embed: Embedding,
        lm_head: nn.Module | None = None,
    ) -> None:
        super().__init__(config, embed)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self._add_fusion()
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self._add_layer(layer, max_positions)
        self.norm: RMSNorm = RMSNorm(size, eps)
        if lm_head is None and not config.tied:
            self.lm_head = make_head(size, config.draft_vocab_size, PLAIN, config.ranks)
        else:
            self._lm_head = Borrowed(lm_head or self._embed.module.as_head())

    def _add_fusion(self) -> None:
        """Add ``fc`` and the norms of its inputs. Without taps it reads the target's state after the final norm."""
        config, eps = self.config, self.config.layer.rms_norm_eps
        count, width = len(config.taps) or 1, config.target_hidden_size
        self.input_norm = RMSNorm(count * width, eps) if config.joint_norm else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count * config.tap_norms))
        size, bias = config.layer.hidden_size, config.fc_bias
        self.fc = Linear(count * width, size, bias=bias) if config.fuse else None

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        states = list(tapped) if self.config.taps else [hidden_TH]
        if self.fc_norm:
            parts = states if len(states) > 1 else states[0].chunk(len(self.fc_norm), -1)
            states = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        out = torch.cat(states, dim=-1) if len(states) > 1 else states[0]
        out = out if self.input_norm is None else self.input_norm(out)
        return out if self.fc is None else self.fc(out)

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Return ``[norm(embedding); norm(feature)]``, and the features alone, before or after their norm."""
        norms = self.input_layernorm.weight, self.hidden_norm.weight, self.hidden_norm.eps
        if not self.config.residual_normed:
            return self._pairs(self.self_attn.qkv_proj, tokens_N, features_XH, source_N, norms)
        pairs_N2H, _ = pair_inputs(*self._embed.module.table(tokens_N), features_XH, source_N, norms)
        return pairs_N2H, pairs_N2H[:, features_XH.shape[-1] :]

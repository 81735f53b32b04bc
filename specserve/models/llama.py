"""Llama (2, 3, 3.1, 3.2, Vicuna) as a target model.

Shapes: T tokens packed over requests, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specserve_kernels import rotary_table
from torch import Tensor, nn

from specserve.layers.decoder import Attend, DecoderLayer, RMSNorm
from specserve.layers.linear import Linear
from specserve.layers.rotary import inverse_frequencies
from specserve.models.config import ModelConfig


class LlamaModel(nn.Module):
    """A decoder-only model whose attention is the caller's.

    ``taps`` names boundaries of the residual stream: boundary L is what enters layer L (0: the embedding,
    number of layers: the last layer's output before the final norm).
    """

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.layer.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        inv_freq = inverse_frequencies(config.rope, config.layer.head_dim)
        table = rotary_table(inv_freq, max_positions, 1.0, torch.get_default_dtype())
        self.register_buffer("rope_P2D", table, persistent=False)
        self.rope_P2D: Tensor

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states after the final norm ``[T, H]`` and the residual streams at ``taps``."""
        rope_T2D = self.rope_P2D[positions_T]
        x_TH, residual_TH = self.embed_tokens(tokens_T), None
        tapped: dict[int, Tensor] = {}
        for boundary, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x_TH, residual_TH = layer.enter(x_TH, residual_TH)
            if boundary in taps:
                tapped[boundary] = residual_TH
            x_TH, residual_TH = layer(x_TH, residual_TH, rope_T2D, attend)
        assert residual_TH is not None
        hidden_TH, tapped[len(self.layers)] = self.norm.add(x_TH, residual_TH)
        return hidden_TH, [tapped[boundary] for boundary in taps]

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Scores over the vocabulary ``[T, V]`` of hidden states after the final norm."""
        out: Tensor = self.lm_head(hidden_TH)
        return out

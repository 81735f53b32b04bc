"""Llama (2, 3, 3.1, 3.2, Vicuna) as a target model, and the base class of similar architectures.

Shapes: T tokens packed over requests, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specserve.layers.batch import TokenBatch
from specserve.layers.decoder import DecoderLayer, LayerConfig, RMSNorm
from specserve.layers.linear import Linear
from specserve.layers.rotary import Rope, rope_table
from specserve.layers.weights import Projection
from specserve.models.config import ModelConfig


class LlamaModel(nn.Module):
    """A decoder-only model whose attention is provided by the caller.

    A subclass defines how its ``config.json`` is read: ``defaults`` replace absent fields, ``read_layer`` completes the
    geometry, ``read_layers`` repeats it for every layer, and ``read_window`` returns how far back attention sees (None:
    no limit). ``unread``: parts of the names of tensors that a file may have without a parameter for them.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    unread: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias = bool(fields.get("attention_bias"))
        return replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=bool(fields.get("mlp_bias")))

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> Iterable[LayerConfig]:
        """Return the geometry of every layer; ``layer`` has the fields that all architectures share."""
        return [cls.read_layer(layer, fields)] * fields["num_hidden_layers"]

    @classmethod
    def read_window(cls, fields: Mapping[str, Any]) -> int | None:
        return None

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(layer, i) for i, layer in enumerate(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.layers[0].rms_norm_eps)
        self.lm_head: Projection
        if config.tie_word_embeddings:
            self.lm_head = Linear.of(self.embed_tokens.weight)
        else:
            head = {"lm_head": config.vocab_size}
            self.lm_head = config.weights.projection("", config.hidden_size, head, bias=False)
        table = rope_table(config.rope, config.layers[0].head_dim, max_positions)
        self.register_buffer("rope_P2D", table, persistent=False)
        self.rope_P2D: Tensor

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def max_positions(self) -> int:
        """Positions that a slot may have."""
        return len(self.rope_P2D)

    def forward(self, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states after the final norm ``[T, H]``, or of the wanted rows ``[W, H]``, and the residual
        streams at ``batch.taps``."""
        rope = Rope(self.rope_P2D, batch.positions_T)
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        stream = first.embed(batch.tokens_T, self.embed_tokens.weight)
        tapped: dict[int, Tensor] = {}
        last = len(self.layers) - 1
        for boundary, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x_TH, residual_TH = layer.enter(*stream) if boundary else stream
            if boundary in batch.taps:
                tapped[boundary] = residual_TH
            wanted = batch.wanted_W if boundary == last else None
            stream = layer(x_TH, residual_TH, rope, batch.attend, wanted)
        hidden_TH, tapped[len(self.layers)] = self.norm.add(*stream)
        return hidden_TH, [tapped[boundary] for boundary in batch.taps]

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits ``[T, V]`` of hidden states after the final norm, written to ``out`` if given."""
        found: Tensor = self.lm_head(hidden_TH, out=out)
        return found

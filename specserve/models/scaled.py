"""Targets that scale their embeddings."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.decoder import DecoderLayer
from specserve.models.base import TargetModel


class ScaledModel(TargetModel):
    @cached_property
    def _scale(self) -> float:
        """The multiplier of embeddings."""
        return self.config.embedding_scale

    @cached_property
    def draft_embedding(self) -> nn.Embedding:
        made: nn.Embedding = nn.Embedding.from_pretrained(self.embed_tokens.weight.detach() * self._scale)
        return made

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the tokens' embeddings as the first layer reads them ``[T, H]``."""
        return F.embedding(tokens_T, self.embed_tokens.weight) * self._scale

    def _enter(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        stream_TH = self.embed(tokens_T)
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        return first.input_layernorm(stream_TH), stream_TH

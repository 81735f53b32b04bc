"""The base class of target models. Shapes: T tokens packed over requests, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import torch
from specserve_kernels import Gate
from torch import Tensor, nn

from specserve.layers.batch import LayerCall, TokenBatch
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.embedding import Embedding, make_head
from specserve.layers.rotary import Rope, RopeConfig, rope_table
from specserve.layers.weights import Projection
from specserve.models.config import ACTIVATIONS, ModelConfig, rope_config


class TargetModel(nn.Module):
    """A decoder-only model whose attention is provided by the caller.

    A subclass defines how its ``config.json`` is read: ``defaults`` replace absent fields, ``read_layer`` completes the
    geometry, ``read_layers`` repeats it for every layer, and ``read_ropes`` returns the rotary embeddings that layers
    choose from. They raise ValueError naming a field that they can't serve. ``only``: what fields may be, None: absent.
    ``unread``: parts of the names of tensors that a file may have without a parameter for them. ``beside``: beginnings
    of the names of a vision-language file's other parts, without ``model.``. ``renamed``: parts of names here, and what
    files have in their place. ``activations``: what values of ``activation_field`` mean.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unread: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    beside: ClassVar[tuple[str, ...]] = (
        *("vision_", "visual.", "multi_modal_projector.", "mm_projector.", "connector."),
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[Mapping[str, Gate]] = ACTIVATIONS
    activation_field: ClassVar[str] = "hidden_act"
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        return layer

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> Iterable[LayerConfig]:
        """Return the geometry of every layer; ``layer`` has the fields that all architectures share."""
        return [cls.read_layer(layer, fields)] * fields["num_hidden_layers"]

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return (rope_config(fields, source),)

    @classmethod
    def make_layer(cls, config: LayerConfig, layer: int) -> DecoderLayer:
        return cls.layer_class(config, layer)

    @classmethod
    def embedding_scale(cls, config: ModelConfig) -> float:
        """Return what embeddings are multiplied by."""
        return config.embedding_scale

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        tokens, ranks = config.vocab_size, config.ranks
        self.embed_tokens = Embedding(tokens, config.hidden_size, self.embedding_scale(config), ranks)
        self.layers = nn.ModuleList(self.make_layer(layer, i) for i, layer in enumerate(config.layers))
        self.norm = self.layer_class.norm_class(config.hidden_size, config.layers[-1].rms_norm_eps)
        self.lm_head: Projection
        if config.tie_word_embeddings:
            self.lm_head = self.embed_tokens.as_head()
        else:
            self.lm_head = make_head(config.hidden_size, tokens, config.weights, ranks)
        self.max_positions = max_positions  # that a slot may have
        sizes = {layer.rope: layer.head_dim for layer in config.layers}
        for number, size in sizes.items():
            table = rope_table(config.ropes[number], size, max_positions)
            self.register_buffer(f"rope{number}_P2R", table, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def _enter(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer's attention, and the residual stream."""
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        return first.embed(tokens_T, self.embed_tokens)

    def _token_inputs(self, tokens_T: Tensor, stream_TH: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return what each layer reads besides the stream, from the tokens and their embeddings."""
        return repeat(())

    def forward(self, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]:
        """Return what the final norm gives ``[T, H]``, of wanted rows ``[W, H]``, and the stream at ``batch.taps``."""
        return self.run(batch, self._enter(batch.tokens_T))

    def run(self, batch: TokenBatch, entered: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Do the same from the first layer's input and the residual stream on."""
        stream: tuple[Tensor, ...] = entered
        inputs = self._token_inputs(batch.tokens_T, entered[1])
        tapped: dict[int, Tensor] = {}
        last = len(self.layers) - 1
        for boundary, (layer, own) in enumerate(zip(self.layers, inputs, strict=False)):
            assert isinstance(layer, DecoderLayer)
            x_TH, residual_TH = layer.enter(*stream) if boundary else stream
            if boundary in batch.taps:
                tapped[boundary] = residual_TH
            wanted = batch.wanted_W if boundary == last else None
            table, how = self.get_buffer(f"rope{layer.rope}_P2R"), self.config.ropes[layer.rope]
            rope = Rope(table, batch.positions_T, how.interleaved)
            stream = layer(x_TH, residual_TH, LayerCall(rope, batch.attend, wanted), *own)
        hidden_TH, tapped[len(self.layers)] = self.norm.add(*stream)
        return hidden_TH, [tapped[boundary] for boundary in batch.taps]

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits ``[T, V]`` of hidden states after the final norm, written to ``out`` if given."""
        logits_TV: Tensor = self.lm_head(hidden_TH, out=out)
        if (cap := self.config.logit_cap) is not None:
            logits_TV.div_(cap).tanh_().mul_(cap)
        return logits_TV if self.config.logit_scale == 1 else logits_TV.mul_(self.config.logit_scale)

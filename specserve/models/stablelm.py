"""StableLM: Llama with layer norms, of whose heads a part is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.norms import LayerNorm
from specserve.models.partial_rope import PartialModel


class StableLmModel(PartialModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        ("qk_layernorm", "use_parallel_residual"), (None, False)
    )
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer.of(norm_class=LayerNorm)

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        bias, eps = bool(fields.get("use_qkv_bias")), fields["layer_norm_eps"]
        return super().read_layer(replace(layer, qkv_bias=bias, rms_norm_eps=eps), fields)

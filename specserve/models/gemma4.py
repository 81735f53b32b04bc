"""Gemma 4's text model: two sizes of heads, keys and values that the last layers share, and inputs of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specserve.layers.batch import Softmax
from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.embedding import Embedding, root_scale
from specserve.layers.norms import WideRMSNorm
from specserve.layers.rotary import RopeConfig
from specserve.models.config import FULL, SLIDING, ModelConfig, ropes_by_kind, with_windows
from specserve.models.gemma import GemmaModel
from specserve.models.gemma4_layer import Gemma4Config, Gemma4Layer
from specserve.models.qwen_moe import routing

_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4Model(GemmaModel):
    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaModel.defaults,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_bidirectional_attention": (None, False, "vision")}
    # Files have these for the layers that share others', too.
    unread: ClassVar[tuple[str, ...]] = (*GemmaModel.unread, ".k_proj.", ".v_proj.", ".k_norm.")
    beside: ClassVar[tuple[str, ...]] = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
    layer_class: ClassVar[type[DecoderLayer]] = Gemma4Layer

    @classmethod
    def read_layers(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> list[LayerConfig]:
        bias, inputs = bool(fields.get("attention_bias")), fields["hidden_size_per_layer_input"]
        layer = Gemma4Config.of(
            replace(layer, qkv_bias=bias, o_bias=bias, qk_norm=True, softmax=Softmax(1.0)),
            token_inputs=inputs,
            experts=_experts(fields) if fields.get("enable_moe_block") else None,
        )
        layers = with_windows(layer, fields["sliding_window"], fields, lambda n: (n + 1) % 6 != 0, rope=1)
        size, kv_heads = _sizes(fields, layer)
        whole = replace(
            layer, head_dim=size, num_kv_heads=kv_heads, v_proj=not fields.get("attention_k_eq_v")
        )
        layers = [each if each.rope else whole for each in layers[:-1]] + [whole]  # in every file
        return _shared(layers, fields["num_kv_shared_layers"], 1 + bool(fields.get("use_double_wide_mlp")))

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        ropes = fields.get("rope_parameters") or _ROPES
        return ropes_by_kind({**fields, "rope_parameters": ropes}, source, 1e6, 1e4)

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__(config, max_positions)
        first = config.layers[0]
        assert isinstance(first, Gemma4Config)
        self._inputs = first.token_inputs
        if width := len(config.layers) * self._inputs:
            self.embed_tokens_per_layer = Embedding(config.vocab_size, width, root_scale(self._inputs))
            projected = {"per_layer_model_projection": width}
            self.per_layer_model_projection = config.weights.projection(
                "", config.hidden_size, projected, False
            )
            self.per_layer_projection_norm = WideRMSNorm(self._inputs, first.rms_norm_eps)

    def _token_inputs(self, tokens_T: Tensor, stream_TH: Tensor) -> Iterable[tuple[Tensor, ...]]:
        if not self._inputs:
            return super()._token_inputs(tokens_T, stream_TH)
        embedded_TX = self.embed_tokens_per_layer(tokens_T)
        projected_TX = self.per_layer_model_projection(stream_TH) * self.config.hidden_size**-0.5
        input_TLP = self.per_layer_projection_norm.heads(projected_TX.unflatten(-1, (-1, self._inputs)))
        input_TLP = (input_TLP + embedded_TX.view(input_TLP.shape)) * 0.5**0.5
        return [(input_TP,) for input_TP in input_TLP.unbind(1)]


class Gemma4UnifiedModel(Gemma4Model):
    """Has another default window, and no inputs of layers."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma4Model.defaults,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "hidden_size_per_layer_input": 0,
    }


def _experts(fields: Mapping[str, Any]) -> ExpertsConfig:
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if type(fields.get(name)) is not int or fields[name] < 1:
            raise ValueError(f"{name} must be a positive integer, found {fields.get(name)!r}")
    chosen = routing(fields["num_experts"], {**fields, "norm_topk_prob": True}, "top_k_experts")
    return ExpertsConfig(chosen, fields["moe_intermediate_size"], module="")


def _sizes(fields: Mapping[str, Any], layer: LayerConfig) -> tuple[int, int]:
    """Return head size and KV heads of layers without a window, as published files name them, or as transformers writes
    them, layer by layer."""
    size = fields["global_head_dim"]
    kv_heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
    if written := fields.get("per_layer_config"):
        if not isinstance(written, dict) or not all(isinstance(each, dict) for each in written.values()):
            raise ValueError(f"per_layer_config must be an object of objects by layer, found {written!r}")
        _, last = max(written.items())
        size, kv_heads = last.get("head_dim", layer.head_dim), last.get("num_key_value_heads")
    kv_heads = kv_heads or layer.num_kv_heads
    if layer.num_heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {layer.num_heads} is not a multiple of num_global_key_value_heads {kv_heads}"
        )
    return size, kv_heads


def _shared(layers: list[LayerConfig], count: int, wider: int) -> list[LayerConfig]:
    """Let the last layers read the last own keys and values of their kind. Their MLPs are ``wider``."""
    own = layers[: len(layers) - count]
    last = last_stored(own)
    if missing := {each.rope for each in layers} - {*last}:
        kind = SLIDING if missing.pop() else FULL
        raise ValueError(f"num_kv_shared_layers {count} leaves no {kind} layer of its own keys and values")
    rest = layers[len(own) :]
    return own + [
        replace(each, reads=last[each.rope], intermediate_size=wider * each.intermediate_size)
        for each in rest
    ]


def last_stored(layers: Sequence[LayerConfig]) -> dict[int, int]:
    """Return the last layer that stores keys and values, by the number of its rope: 0 without a window, 1 with it."""
    return {each.rope: number for number, each in enumerate(layers) if each.reads is None}

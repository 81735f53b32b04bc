"""Attention that rotates the first channels of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from specserve_kernels import HeadNorms, Rounded
from torch import Tensor

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer
from specserve.layers.norms import RMSNorm
from specserve.layers.rotary import RopeConfig, rope_fields
from specserve.models.base import TargetModel
from specserve.models.config import check_rope_fields, rope_config


@dataclass(frozen=True, slots=True)
class PartialConfig(LayerConfig):
    """``rotated``: channels of a head that are rotated."""

    rotated: int = 0


class OrderedRMSNorm(RMSNorm):
    """A norm of channels that are not in the file's order."""

    def __init__(self, size: int, eps: float, order_D: Tensor) -> None:
        super().__init__(size, eps)
        self._order_D = order_D

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.weight.detach().copy_(found["weight"][self._order_D.to(found["weight"].device)])


class PartialAttention(Attention):
    """Moves the channels that are rotated in pairs to where a whole head has its pairs, half of it apart. Scores do not
    depend on the order of channels. ``interleaved``: pairs are neighbours in files, not half of the rotated apart."""

    order_D: Tensor
    interleaved: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, layer: int, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__(config, layer, norm)
        assert isinstance(config, PartialConfig)
        turned, rest = torch.arange(config.head_dim).split((config.rotated, config.head_dim - config.rotated))
        low, high = (turned[::2], turned[1::2]) if self.interleaved else turned.chunk(2)
        rest_low, rest_high = rest.tensor_split(2)
        self.register_buffer("order_D", torch.cat([low, rest_low, high, rest_high]), persistent=False)
        if config.qk_norm:
            size, eps = config.head_dim, config.rms_norm_eps
            self.q_norm, self.k_norm = (OrderedRMSNorm(size, eps, self.order_D) for _ in "qk")

    def arranged(self, qkv_TND: Tensor, position_T: Tensor) -> Tensor:
        q, k, v = self.config.heads
        qk_TND, v_TND = qkv_TND.split((q + k, v), 1)
        return torch.cat([qk_TND[..., self.order_D], v_TND], 1)

    def project_kv(self, x_TI: Tensor | Rounded) -> tuple[Tensor, HeadNorms | None]:
        kv_TND, norms = super().project_kv(x_TI)
        k_TND, v_TND = kv_TND.chunk(2, 1)
        return torch.cat([k_TND[..., self.order_D], v_TND], 1), norms


class PartialLayer(DecoderLayer):
    attention_class: ClassVar[type[Attention]] = PartialAttention


class InterleavedAttention(PartialAttention):
    interleaved: ClassVar[bool] = True


class PartialModel(TargetModel):
    """Rotates ``partial_rotary_factor`` of each head."""

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        layer = super().read_layer(layer, fields)
        return PartialConfig.of(layer, rotated=_rotated(layer, fields))

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        return (partial_rope(fields, source),)


def partial_rope(config: Mapping[str, Any], source: Path) -> RopeConfig:
    """Read the rotary embedding of the first part of each head."""
    check_rope_fields(config, source)
    fields, part = rope_fields(config), _rotary_part(config)
    kind = {"su": "longrope"}.get(str(fields.get("type")), fields.get("type"))
    fields = {**fields, "partial_rotary_factor": None, "type": kind}
    rope = rope_config({**config, "rope_scaling": None, "rope_parameters": fields}, source)
    return replace(rope, partial_rotary_factor=part)


def _rotated(layer: LayerConfig, config: Mapping[str, Any]) -> int:
    """Return how many channels of a head are rotated. Raises ValueError for halves that are not whole."""
    count = int(layer.head_dim * _rotary_part(config))
    if not 0 < count <= layer.head_dim or count % 2:
        raise ValueError(
            f"partial_rotary_factor must give 2 to {layer.head_dim} channels, evenly, found {count}"
        )
    return count


def _rotary_part(config: Mapping[str, Any]) -> float:
    written = rope_fields(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return 1.0 if written is None else float(written)

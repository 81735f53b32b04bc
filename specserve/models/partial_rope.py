"""Models that rotate the first channels of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specserve.layers.config import LayerConfig
from specserve.layers.rotary import RopeConfig, rope_fields
from specserve.models.base import TargetModel
from specserve.models.config import check_rope_fields, rope_config


class PartialModel(TargetModel):
    """Rotates ``partial_rotary_factor`` of each head. ``interleaved``: in pairs of neighbours."""

    interleaved: ClassVar[bool] = False

    @classmethod
    def read_layer(cls, layer: LayerConfig, fields: Mapping[str, Any]) -> LayerConfig:
        count = int(layer.head_dim * _rotary_part(fields))
        if not 0 < count <= layer.head_dim or count % 2:
            raise ValueError(
                f"partial_rotary_factor must give 2 to {layer.head_dim} channels, evenly, found {count}"
            )
        return super().read_layer(layer, fields)

    @classmethod
    def read_ropes(cls, fields: Mapping[str, Any], source: Path) -> tuple[RopeConfig, ...]:
        check_rope_fields(fields, source)
        written = rope_fields(fields)
        kind = {"su": "longrope"}.get(str(written.get("type")), written.get("type"))
        written = {**written, "partial_rotary_factor": None, "type": kind}
        rope = rope_config({**fields, "rope_scaling": None, "rope_parameters": written}, source)
        return (replace(rope, partial_rotary_factor=_rotary_part(fields), interleaved=cls.interleaved),)


def _rotary_part(config: Mapping[str, Any]) -> float:
    written = rope_fields(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return 1.0 if written is None else float(written)

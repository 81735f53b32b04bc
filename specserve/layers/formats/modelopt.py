"""FP8 and NVFP4 weights as stored by NVIDIA's ModelOpt, with one scale for the activations of each, which is not used.

Its configuration is ``hf_quant_config.json``, in newer checkpoints ``quantization_config`` as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specserve.layers.formats.float4 import MODELOPT
from specserve.layers.formats.fp8 import ACTIVATION_SCALES, KV_SCALES, PER_TENSOR, Fp8Layout, named_by
from specserve.layers.formats.stored import (
    Layout,
    StoredWeights,
    check_left_out,
    modules_with,
    objects,
    one_of,
    stored_weights,
    texts,
)

_NVFP4 = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_ALGORITHMS = ("FP8", *_NVFP4, "MIXED_PRECISION")


def read(config: Mapping[str, Any], names: Collection[str]) -> StoredWeights:
    """Read ``quant_method: modelopt``."""
    nested = config.get("quantization")
    fields = nested if isinstance(nested, Mapping) else config
    unread = (*ACTIVATION_SCALES, *KV_SCALES)
    if fields.get("quant_algo") is None:
        cache = fields.get("kv_cache_quant_algo") == "FP8" or fields.get("kv_cache_scheme")
        if cache and not modules_with(names, "weight_scale"):
            return StoredWeights("modelopt", {}, unread)
        raise ValueError(f"quantization_config: quant_algo must be {', '.join(_ALGORITHMS)}, found none")
    algorithm = one_of(fields, "quant_algo", _ALGORITHMS)
    if algorithm in _NVFP4:
        one_of(fields, "group_size", (MODELOPT.group,))
    for layer in objects(fields, "quantized_layers").values():
        one_of(layer, "quant_algo", _ALGORITHMS[:-1])
    layouts: dict[str, Layout] = dict.fromkeys(
        modules_with(names, "weight_scale"), Fp8Layout("weight_scale", PER_TENSOR)
    )
    if algorithm != "FP8":
        layouts |= dict.fromkeys(modules_with(names, "weight_scale_2"), MODELOPT)
    for field in ("exclude_modules", "ignore"):
        left = texts(fields, field)
        check_left_out(
            layouts, field, named_by(left, (each for each in left if not {*"*?["}.isdisjoint(each)))
        )
    return stored_weights("modelopt", layouts, unread)

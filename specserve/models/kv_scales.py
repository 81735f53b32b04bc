"""Read a checkpoint's scales for an FP8 KV cache, under the names that quantization tools use."""

from __future__ import annotations

import math
from pathlib import Path

from specserve_kernels import KVScales

from specserve.models.tensor_files import TensorFiles


def _names(part: str) -> tuple[str, ...]:
    """Return the names that ModelOpt, compressed-tensors, vLLM and AutoFP8 use, and the name of one scale for keys and
    values."""
    return (
        f"{part}_proj.{part}_scale",
        f"{part}_scale",
        f"attn.{part}_scale",
        f"{part}_proj.output_scale",
        f"qkv_proj.{part}_scale",
        "kv_scale",
    )


def has_kv_scales(path: Path) -> bool:
    """Return whether the checkpoint has scales for its first layer's KV cache."""
    files = TensorFiles(path)
    return any(f"layers.0.self_attn.{name}" in files for part in "kv" for name in _names(part))


def read_kv_scales(path: Path, layers: int) -> list[KVScales | None]:
    """Return the scales of each layer, None if it has none. A scale of only keys or only values is used for both.

    Raises ValueError naming a tensor that is not one positive number."""
    files = TensorFiles(path)

    def scale(layer: int, part: str) -> float | None:
        for name in (f"layers.{layer}.self_attn.{name}" for name in _names(part)):
            if name in files:
                found = files[name]
                value = float(found) if found.numel() == 1 else math.nan
                if not 0 < value < math.inf:
                    raise ValueError(
                        f"{files.file(name)}: tensor {name} must be one positive number, a scale for all heads, found "
                        f"{found.tolist()}"
                    )
                return value
        return None

    both = [(scale(layer, "k"), scale(layer, "v")) for layer in range(layers)]
    return [
        None if not (key or value) else KVScales(key or value or 1, value or key or 1) for key, value in both
    ]

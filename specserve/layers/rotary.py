"""Rotary position embedding: inverse frequencies with the published scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta and scaling as in a Hugging Face config; ``kind`` is one of ``ROPE_KINDS``."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
        """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (earlier)."""
        params = dict(config.get("rope_parameters") or {})
        scaling = {**(config.get("rope_scaling") or {}), **params}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ValueError(f"rope_scaling type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
        theta = params.get("rope_theta") or config.get("rope_theta") or default_theta
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return cls(
            theta=float(theta), kind=kind, **{n: scaling[n] for n in names if scaling.get(n) is not None}
        )


def _default(config: RopeConfig, inv: Tensor) -> Tensor:
    return inv


def _linear(config: RopeConfig, inv: Tensor) -> Tensor:
    return inv / config.factor


def _llama3(config: RopeConfig, inv: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by factor, short kept, a ramp between."""
    ratio = config.original_max_position_embeddings * inv / (2 * math.pi)
    smooth = (ratio - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv / config.factor + smooth * inv


ROPE_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3}


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Returns the float64 inverse frequencies ``[head_dim / 2]``."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return ROPE_KINDS[config.kind](config, config.theta**-exponent)

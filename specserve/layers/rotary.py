"""Rotary position embedding: inverse frequencies with the published scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from specserve_kernels import rotary_table
from torch import Tensor

THETA = 10000.0  # of a config that names no base


class Rope(NamedTuple):
    """The rotation of tokens: rows of a rotary table ``[P, 2, R]`` at their positions (int64 ``[T]``), in pairs of
    neighbours if ``interleaved``."""

    table_P2R: Tensor
    position_T: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta and scaling as in a Hugging Face config; ``kind`` is one of ``ROPE_KINDS``. The fields from ``beta_fast``
    on are yarn's: which frequencies it blends, and the multiplier of cos and sin. ``partial_rotary_factor``: the part
    of the pairs that a proportional one rotates; with others of a head's channels, the first of them. ``interleaved``:
    pairs are neighbours, not half of the rotated channels apart.
    ``llama_4_scaling_beta``: how queries grow behind the trained length, in models that do that.
    ``short_factor``, ``long_factor``: longrope's divisors of frequencies, up to the trained length and beyond."""

    theta: float = THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    llama_4_scaling_beta: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (earlier)."""
        scaling = rope_fields(config)
        kind = _kind(scaling)
        theta = scaling.get("rope_theta") or config.get("rope_theta") or THETA
        if kind == "default":
            return cls(theta=float(theta))
        scaling |= _lengths(config, scaling)
        values: dict[str, Any] = {
            name: _number(scaling, name, kind) for name in NUMBERS if scaling.get(name) is not None
        }
        if missing := [name for name in NEEDED[kind] if name not in values]:
            raise ValueError(f"rope_scaling of type {kind} needs {', '.join(missing)}")
        values["truncate"] = bool(scaling.get("truncate", True))
        if kind == "longrope":
            values |= {name: _divisors(scaling, name) for name in ("short_factor", "long_factor")}
        return cls(theta=float(theta), kind=kind, **values)

    @property
    def scale(self) -> float:
        """The multiplier of cos and sin."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            trained = math.log(self.original_max_position_embeddings)
            return math.sqrt(1 + math.log(self.factor) / trained) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """The multiplier of scores that latent attention adds."""
        scaled = self.kind != "default" and self.mscale_all_dim
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if scaled else 1.0  # type: ignore[arg-type]


NO_ROPE = RopeConfig(kind="none")
NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
)
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": (),
    "longrope": (),
}


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that apply. As in transformers 5, ``rope_scaling``, which users add, replaces all of
    ``rope_parameters``, which transformers writes into every config, theta included."""
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _kind(scaling: Mapping[str, Any]) -> str:
    """Return the scaling's kind. Raises ValueError if it or a part of it is not supported."""
    if nested := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope_parameters for each kind of layer ({', '.join(nested)}) are not supported; expected one set for all"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # of text alone, whose three positions are the same
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ValueError(f"rope_scaling type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if kind != "proportional" and scaling.get("partial_rotary_factor") not in (None, 1):
        part = scaling["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor {part!r} is not supported; expected 1")
    return str(kind)


def _lengths(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained length: next to the scaling, inside it, or else the model's own length. An absent factor is
    the model's length over the trained length."""
    name, length = "original_max_position_embeddings", config.get("max_position_embeddings")
    original, factor = config.get(name) or scaling.get(name), scaling.get("factor")
    if factor is None and isinstance(original, int | float) and isinstance(length, int | float) and original:
        factor = length / original
    return {name: original or length, "factor": factor}


def _number(scaling: Mapping[str, Any], name: str, kind: str) -> float:
    value = scaling[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"rope_scaling of type {kind}: {name} must be a positive number, found {value!r}")
    return value


def _divisors(scaling: Mapping[str, Any], name: str) -> tuple[float, ...]:
    found = scaling.get(name)
    if not isinstance(found, list) or not all(type(each) in (int, float) and each > 0 for each in found):
        raise ValueError(f"rope_scaling of type longrope: {name} must be a list of positive numbers")
    return tuple(found)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(config: RopeConfig, inv_D2: Tensor) -> Tensor:
    """Llama 3.1's scaling: divide long wavelengths by the factor, keep short ones, interpolate in between."""
    ratio = config.original_max_position_embeddings * inv_D2 / (2 * math.pi)
    smooth = (ratio - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv_D2 / config.factor + smooth * inv_D2


def _yarn(config: RopeConfig, inv_D2: Tensor) -> Tensor:
    """Keep channels that rotate often over the original length, divide those that rotate seldom, interpolate in
    between."""
    size = len(inv_D2)
    low, high = (_channel(config, turns, 2 * size) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size, dtype=inv_D2.dtype, device=inv_D2.device) - low) / (high - low)).clamp(0, 1)
    return ramp * inv_D2 / config.factor + (1 - ramp) * inv_D2


def _channel(config: RopeConfig, turns: float, head_dim: int) -> float:
    """Return the fractional index of the channel that rotates ``turns`` times over the original length."""
    length = config.original_max_position_embeddings
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _proportional(config: RopeConfig, inv_D2: Tensor) -> Tensor:
    """Rotate the first pairs as in a whole head, and the others not at all."""
    rotated = int(config.partial_rotary_factor * len(inv_D2))
    return torch.where(torch.arange(len(inv_D2)) < rotated, inv_D2 / config.factor, 0)


def _longrope(config: RopeConfig, inv_D2: Tensor) -> Tensor:
    divisors = torch.tensor(config.long_factor, dtype=inv_D2.dtype, device=inv_D2.device)
    if len(divisors) != len(inv_D2):
        raise ValueError(f"rope_scaling: factors must be {len(inv_D2)} numbers, found {len(divisors)}")
    return inv_D2 / divisors


ROPE_KINDS: dict[str, Callable[[RopeConfig, Tensor], Tensor]] = {
    "default": lambda _, inv_D2: inv_D2,
    "linear": lambda config, inv_D2: inv_D2 / config.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
    "longrope": _longrope,
}


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the float64 inverse frequencies ``[head_dim / 2]``, 0 for a layer that does not rotate."""
    if config == NO_ROPE:
        return torch.zeros(head_dim // 2, dtype=torch.float64)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return ROPE_KINDS[config.kind](config, config.theta**-exponent)


def rope_table(config: RopeConfig, head_dim: int, positions: int) -> Tensor:
    """Return cos and signed sin of every position ``[positions, 2, R]``, scaled, in the default dtype."""
    if config.kind == "longrope" and positions <= config.original_max_position_embeddings:
        config = replace(config, long_factor=config.short_factor)
    part = 1.0 if config.kind == "proportional" else config.partial_rotary_factor
    inv_R2 = inverse_frequencies(config, int(part * head_dim))
    return rotary_table(inv_R2, positions, config.scale, torch.get_default_dtype())

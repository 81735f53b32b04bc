"""A target model's configuration, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.layers.decoder import LayerConfig
from specserve.layers.rotary import RopeConfig
from specserve.models.registry import model_class

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a target model is built from. ``sliding_window``: attention sees so many tokens back, None: all."""

    architecture: str
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    sliding_window: int | None = None

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def longest_context(self) -> tuple[int, str]:
        """Most positions it serves, and the field that says so. A scaled rope reaches further than the positions
        trained before it; within a sliding window a model attends to all."""
        longest, limit = self.max_position_embeddings, "max_position_embeddings"
        reach = {"linear": longest, "yarn": self.rope.original_max_position_embeddings}
        if (scaled := int(reach.get(self.rope.kind, 0) * self.rope.factor)) > longest:
            longest, limit = scaled, f"{self.rope.kind} rope scaling"
        if self.sliding_window is not None and self.sliding_window < longest:
            return self.sliding_window, "sliding_window"
        return longest, limit


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError naming the file when it is missing, unreadable or not an object."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def rope_config(config: Mapping[str, Any], source: Path) -> RopeConfig:
    """Reads the rotary embedding. Raises ValueError naming the file when it is of an unknown kind."""
    check_rope_fields(config, source)
    try:
        rope = RopeConfig.from_dict(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    written = (config.get("rope_parameters") or {}).get("rope_theta") or rope.theta
    if config.get("rope_scaling") and written != rope.theta:
        log.warning(
            "%s: rope_scaling replaces rope_parameters, as in transformers: the rotary base is %g, not %g. For the "
            "other, write rope_theta into rope_scaling",
            source,
            rope.theta,
            written,
        )
    return rope


def check_rope_fields(config: Mapping[str, Any], source: Path) -> None:
    """Raises ValueError naming a field that is of another type than published ones."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), dict | None):
            raise ValueError(f"{source}: {name} must be an object or null, found {config[name]!r}")
    for fields in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        if fields.get("rope_theta") is not None:
            check_number(fields, "rope_theta", source)


def check_number(config: Mapping[str, Any], name: str, source: Path) -> None:
    found = config.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise ValueError(f"{source}: {name} must be a positive number, found {found!r}")


def check_count(config: Mapping[str, Any], name: str, source: Path, optional: bool = False) -> None:
    found = config.get(name)
    if (found is None and optional) or (type(found) is int and found > 0):
        return
    raise ValueError(f"{source}: {name} must be a positive integer{' or null' * optional}, found {found!r}")


def layer_config(config: Mapping[str, Any], source: Path) -> LayerConfig:
    """Reads the geometry of a decoder layer. Raises ValueError naming a missing or impossible field."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        check_count(config, name, source)
    for name in ("num_key_value_heads", "head_dim"):
        check_count(config, name, source, optional=True)
    if "rms_norm_eps" in config:
        check_number(config, "rms_norm_eps", source)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act must be silu, found {config['hidden_act']!r}")
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        input_size=hidden,
    )


def load_model_config(model_path: Path) -> ModelConfig:
    """Reads ``config.json`` (and the end tokens of ``generation_config.json``) of a target model."""
    path = model_path / "config.json"
    fields = read_json(path)
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"{path}: architectures must name one architecture, found {architectures!r}")
    model = model_class(architectures[0], path)
    fields = {**model.defaults, **fields}
    _check(fields, path)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        layer=model.read_layer(layer_config(fields, path), fields),
        rope=rope_config(fields, path),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=int(fields.get("max_position_embeddings") or 2048),
        eos_token_ids=_end_tokens(model_path, fields),
        bos_token_id=fields.get("bos_token_id"),
        dtype=fields.get("dtype") or fields.get("torch_dtype"),
        sliding_window=model.read_window(fields),
    )


def _check(fields: Mapping[str, Any], path: Path) -> None:
    for name in ("vocab_size", "num_hidden_layers"):
        check_count(fields, name, path)
    for name in ("max_position_embeddings", "sliding_window"):
        check_count(fields, name, path, optional=True)
    if not isinstance(tied := fields.get("tie_word_embeddings"), bool | None):
        raise ValueError(f"{path}: tie_word_embeddings must be true or false, found {tied!r}")
    if fields.get("quantization_config"):
        raise ValueError(
            f"{path}: quantization_config is not supported; weights must be float16, bfloat16 or float32"
        )


def _end_tokens(model_path: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    source = model_path / "generation_config.json"
    eos = (read_json(source) if source.exists() else {}).get("eos_token_id")
    if eos is None:
        source, eos = model_path / "config.json", fields.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{source}: eos_token_id must be a token id, a list of them or null, found {eos!r}")
    return tuple(ids)

"""A target model's configuration, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.layers.decoder import LayerConfig
from specserve.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a target model is built from."""

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

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size


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
    try:
        return RopeConfig.from_dict(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def layer_config(config: Mapping[str, Any], source: Path) -> LayerConfig:
    """Reads the geometry of a decoder layer. Raises ValueError naming a missing or impossible field."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if not isinstance(config.get(name), int) or config[name] <= 0:
            raise ValueError(f"{source}: {name} must be a positive integer, found {config.get(name)!r}")
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
    config = read_json(path)
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise ValueError(f"{path}: architectures must name one architecture, found {architectures!r}")
    for name in ("vocab_size", "num_hidden_layers"):
        if not isinstance(config.get(name), int) or config[name] <= 0:
            raise ValueError(f"{path}: {name} must be a positive integer, found {config.get(name)!r}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ValueError(f"{path}: {name} true is not supported")
    generation = model_path / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        layer=layer_config(config, path),
        rope=rope_config(config, path),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=config.get("bos_token_id"),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )

"""Read a target model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specserve.layers.formats import read_format
from specserve.layers.linear import PLAIN
from specserve.layers.weights import WeightFormat
from specserve.models.config import (
    COUNT,
    TEXT,
    TRUTH,
    ModelConfig,
    check,
    layer_config,
    read_json,
    rope_config,
)
from specserve.models.registry import model_class
from specserve.models.tensor_files import TensorFiles

_SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with a quantization config that ``config.json`` lacks, and their ``quant_method``."""


def load_model_config(model_path: Path) -> ModelConfig:
    """Read a target model's ``config.json``, and the end tokens of ``generation_config.json``."""
    path = model_path / "config.json"
    fields = read_json(path)
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"{path}: architectures must name one architecture, found {architectures!r}")
    model = model_class(architectures[0], path)
    fields = {**model.defaults, **fields}
    check(fields, path, COUNT, "vocab_size", "num_hidden_layers")
    check(fields, path, COUNT.or_null, "max_position_embeddings", "sliding_window")
    check(fields, path, TRUTH, "tie_word_embeddings", optional=True)
    weights, layer = _weights(fields, path), layer_config(fields, path)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=fields["vocab_size"],
        layers=tuple(model.read_layers(replace(layer, weights=weights), fields)),
        rope=rope_config(fields, path),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=int(fields.get("max_position_embeddings") or 2048),
        eos_token_ids=_end_tokens(model_path, fields),
        bos_token_id=fields.get("bos_token_id"),
        dtype=_dtype(fields, path),
        sliding_window=model.read_window(fields),
        weights=weights,
    )


def _dtype(fields: Mapping[str, Any], path: Path) -> str | None:
    """Return the dtype under its new or its old name. "auto" says no more than an absent field."""
    names = ("dtype", "torch_dtype")
    check(fields, path, TEXT, *names, optional=True)
    given = [fields[name].removeprefix("torch.") for name in names if fields.get(name) not in (None, "auto")]
    return given[0] if given else None


def _weights(fields: Mapping[str, Any], path: Path) -> WeightFormat:
    """Return the weight format from ``config.json``, or from the file that older tools wrote next to it."""
    given = fields.get("quantization_config") or fields.get("compression_config")
    for name, method in _SIDE_FILES.items():
        if not given and path.with_name(name).exists():
            path = path.with_name(name)
            given = {"quant_method": method, **read_json(path)}
    if not given:
        return PLAIN
    try:
        return read_format(given, TensorFiles(path.parent).dtypes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _end_tokens(model_path: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    source = model_path / "generation_config.json"
    eos = (read_json(source) if source.exists() else {}).get("eos_token_id")
    if eos is None:
        source, eos = model_path / "config.json", fields.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{source}: eos_token_id must be a token id, a list of them or null, found {eos!r}")
    return tuple(ids)

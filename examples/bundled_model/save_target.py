"""Writes a Llama target as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from specserve.layers.linear import PLAIN
from specserve.models.checkpoint import file_tensors
from specserve.models.config import ModelConfig
from specserve.models.base import TargetModel


def target_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of a Llama target with plain rotary embedding."""
    if config.architecture != "LlamaForCausalLM":
        raise ValueError(f"saving a target of architecture {config.architecture} is not supported")
    if config.rope.kind != "default":
        raise ValueError(f"saving a target with {config.rope.kind} rope scaling is not supported")
    layer, *others = config.layers
    if config.weights != PLAIN or any(other != layer for other in others):
        raise ValueError("saving a target of quantized weights or unequal layers is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0]
        if len(config.eos_token_ids) == 1
        else list(config.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def save_target(model: TargetModel, config: ModelConfig, path: Path, dtype: torch.dtype) -> None:
    """Writes ``config.json`` and one ``model.safetensors`` with Hugging Face's names."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor.to(dtype).cpu().contiguous().clone()
        for name, tensor in file_tensors(model).items()
    }
    (path / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (path / "config.json").write_text(json.dumps(target_config(config, dtype), indent=2) + "\n")

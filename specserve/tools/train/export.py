"""Write trained drafts in the published file formats, which this server and others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from specserve.models.checkpoint import file_tensors
from specserve.models.config import ModelConfig
from specserve.models.draft.block import BlockConfig
from specserve.models.draft.head import DraftConfig
from specserve.tools.files import replacing

FORMATS = ("safetensors", "bin")
OUTER = ("fc.", "norm.", "lm_head.")  # tensors that do not belong to the decoder layer


def layer_tensors(draft: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a draft with one decoder layer, whose names get a prefix."""
    tensors = file_tensors(draft)
    return {name if name.startswith(OUTER) else prefix + name: tensors[name] for name in tensors}


def layer_config(
    config: DraftConfig | BlockConfig, target: ModelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the fields that describe a draft's layers, which are Llama's."""
    layer = config.layer
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "bias": isinstance(config, DraftConfig) and config.fc_bias,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


class Files(NamedTuple):
    """What is written of a draft: tensors, configuration, and the name of the weights' file in each of ``FORMATS``."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    names: tuple[str, str] = ("model.safetensors", "pytorch_model.bin")


def write(files: Files, path: Path, dtype: torch.dtype, form: str) -> None:
    """Write ``config.json`` and the weights, floating-point tensors in ``dtype``, others unchanged."""
    path.mkdir(parents=True, exist_ok=True)
    ready = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous().clone()
        for name, tensor in files.tensors.items()
    }
    name = files.names[FORMATS.index(form)]
    with replacing("--output", path / name) as to, to.open("wb") as file:
        if form == "bin":
            torch.save(ready, file)
        else:
            file.write(save(ready, metadata={"format": "pt"}))
    with replacing("--output", path / "config.json") as to:
        to.write_text(json.dumps(files.config, indent=2) + "\n")
